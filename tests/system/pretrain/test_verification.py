"""`pretrain` with `training.verify_every`: a flipped bit ends it with exit code 4, and it continues from before."""

import json
import os

import pytest
import torch

from mst_scale import zero_shards
from mst_scale.pretrain.training_loop import Run
from mst_scale.run_logging.run_file import CORRUPTED
from tests.support import pool, tiny_run
from tests.support.whole_runs import MST, arguments, attempt, differing, without_times

FLIPPED_AT = 8
VERIFIED = {"verify_every": 4, "save_every": 4, "keep_checkpoints": 3}


def flipped(rank, world, argv, name):
    """A run in which a bit of one rank flips after a step."""
    advance = Run.advance

    def disturbed(run):
        advance(run)
        if run.step == FLIPPED_AT and rank == 1:
            value = next(v.tensor for v in zero_shards.held_values(run.engine) if name in v.name)
            value.data.view(-1).view(torch.uint8)[9] ^= 1 << 3

    Run.advance = disturbed
    os.environ["MST_FAILED"] = argv[argv.index("--out") + 1] + ".failed"  # as a launcher does
    try:
        return attempt(rank, world, argv)
    finally:
        Run.advance = advance


def record_of(out):
    return json.loads((out / "run.json").read_text())


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "mst", "name"), [(1, {"method": "dense"}, "exp_avg of"), (3, MST, "shard of"), (0, MST, "exp_avg_sq of")]
)
def test_a_run_continues_from_before_the_flip_and_ends_as_if_it_had_not_been(tmp_path, stage, mst, name):
    blocks = {"mst": mst, "zero_optimization": {"stage": stage}}
    plain = arguments(tmp_path, "plain", training={"save_every": 4, "keep_checkpoints": 3}, **blocks)
    assert [code for code, _ in pool.run(attempt, 2, plain)] == [0, 0]
    argv = arguments(tmp_path, "out", training=VERIFIED, **blocks)
    (first, said), (second, silent) = pool.run(flipped, 2, argv, name)
    assert (first, second) == (4, 4) and said.count("\n") == 1 and not silent
    assert "rank 1 (" in said and name in said and f"corrupted at step {FLIPPED_AT}" in said
    out = tmp_path / "out"
    assert record_of(out)["starts"][-1]["how"] == CORRUPTED
    assert out.with_name("out.failed").read_text() == "1\n", "the launcher learns which rank it was"
    events = map(json.loads, (out / "events.jsonl").read_text().splitlines())
    (event,) = [one for one in events if one["event"] == "corrupted"]
    expected = {"kind": "memory", "ranks": [1], "step": FLIPPED_AT, "verified": 4, "decided": True}
    assert expected.items() <= event.items() and len(event["hosts"]) == 1
    assert [code for code, _ in pool.run(attempt, 2, argv)] == [0, 0]
    assert record_of(out)["starts"][-1]["from_step"] == 4 and (out / "checkpoints" / "step00000008").is_dir()
    assert without_times(tiny_run.rows(out))[-1] == without_times(tiny_run.rows(tmp_path / "plain"))[-1]
    assert differing(out, tmp_path / "plain") == []


@pytest.mark.full
def test_without_a_checkpoint_from_before_the_oldest_is_taken_with_a_warning(tmp_path):
    training = {"verify_every": 4, "save_every": 1, "keep_checkpoints": 2}
    argv = arguments(tmp_path, "out", training=training)
    (code, said), _ = pool.run(flipped, 2, argv, "exp_avg of")
    assert code == 4 and "keep_checkpoints" in said, "what may happen is said at the start"
    (code, said), _ = pool.run(attempt, 2, argv)
    assert code == 0 and "may contain it" in said
    assert record_of(tmp_path / "out")["starts"][-1]["from_step"] == FLIPPED_AT - 1
