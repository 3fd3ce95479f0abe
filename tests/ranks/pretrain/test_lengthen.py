"""A run that is given more steps goes on as the longer run would have, bit for bit, or is refused with the cure."""

import json
import shutil
from pathlib import Path

import pytest

from mst_scale.run_logging.record import Record
from tests.ranks.pretrain.test_branch import EXACT, IN_STEPS
from tests.support import pool
from tests.support.whole_runs import MST, arguments, assert_same_run, attempt, differing, logged_attempt

WSD = {"lr_schedule": "wsd", "warmup": 2, "decay": 4, "steps": 12}


# 6.1 steps: a step reads 256 tokens, and the model has 4,608 weights
IN_TOKENS = {**MST, "sparsity": {"max": 0.8, "sparse_tokens": 0.34, "stages": 2}}


def spoken(rank: int, world: int, argv: list[str]) -> tuple[int, str, list[str]]:
    """`attempt`, with the lines that the run says beside its progress."""
    said: list[str] = []
    print_message, Record.print_message = Record.print_message, lambda record, message: said.append(message)
    try:
        return *attempt(rank, world, argv), said
    finally:
        Record.print_message = print_message


def run(folder: Path, out: str, *more: str, **blocks) -> tuple[int, str, list[str]]:
    blocks = {"optimizer": EXACT, "training": WSD, "mst": {"method": "dense"}, **blocks}
    return pool.run(spoken, 1, arguments(folder, out, *more, **blocks))[0]


@pytest.mark.parametrize(
    ("mst", "decay", "from_step"),
    [
        (IN_STEPS, 4, 8),
        pytest.param(IN_TOKENS, 4, 8, marks=pytest.mark.full),
        pytest.param({"method": "dense"}, 0, 12, marks=pytest.mark.full),
    ],
)
def test_a_lengthened_run_is_the_longer_one(tmp_path, mst, decay, from_step):
    blocks = {"mst": mst, "training": {**WSD, "decay": decay, "eval_every": 4}}
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert run(tmp_path, "whole", "--steps", "16", **blocks)[:2] == (0, "")
    assert run(tmp_path, "out", **blocks)[:2] == (0, "")
    resolved = (out / "config.json").read_bytes()
    code, _, (line, _) = run(tmp_path, "out", "--set", "gradient_clipping=0.5", **blocks)
    assert (out / "config.json").read_bytes() == resolved, "nothing was trained as that says"
    assert code == 0 and line.startswith(f"{out} is finished") and f"from step {from_step}" in line
    assert ("decays from step 9" in line) == bool(decay)
    shutil.copytree(out / "checkpoints", tmp_path / "kept")
    assert run(tmp_path, "out", "--steps", "16", **blocks)[:2] == (0, "")
    assert json.loads((out / "run.json").read_text())["starts"][-1]["from_step"] == from_step
    assert_same_run(out, whole, "step00000016")
    # had it been killed before its first save, it would go on from the shorter run's checkpoint again
    shutil.rmtree(out / "checkpoints")
    tag = f"step{from_step:08}"
    shutil.copytree(tmp_path / "kept" / tag, out / "checkpoints" / tag)
    assert run(tmp_path, "out", "--steps", "16", **blocks)[:2] == (0, "")
    assert differing(out, whole, "step00000016") == []


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    folder = tmp_path_factory.mktemp("short")
    assert run(folder, "out", training={**WSD, "warmup": 0.2})[:2] == (0, "")
    return folder


@pytest.mark.parametrize(
    ("more", "reported"),
    [
        (["--set", "training.warmup=0.2"], "--set training.warmup=2"),
        (["--set", "training.lr_schedule=cosine"], "cosine"),
        (["--set", "training.warmup=2", "--resume", "step00000012"], "checkpoint of step 9 or"),
        (
            ["--set", "training.warmup=2"],
            "decays from step 9",
        ),
    ],
)
def test_changes_to_the_run_are_rejected_in_one_line(tmp_path, short, more, reported):
    shutil.copytree(short, tmp_path, dirs_exist_ok=True)
    if "decays" in reported:
        shutil.rmtree(tmp_path / "out" / "checkpoints" / "step00000008")
    code, text, _ = run(tmp_path, "out", "--steps", "20", *more)
    (error,) = (line for line in text.splitlines() if line.startswith("mst_scale: "))
    assert code == 2 and reported in error, text
    assert (tmp_path / "out" / "checkpoints" / "step00000012").is_dir()


def test_one_message_says_all_that_an_extension_lacks(tmp_path, short):
    """No option helps a run that kept no checkpoint from before its decay."""
    shutil.copytree(short, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step00000008")
    code, text, _ = run(tmp_path, "out", "--steps", "20", training={**WSD, "warmup": 0.2})
    assert code == 2 and "decays from step 9 on, and no earlier checkpoint was kept" in text, text
    assert "in a run that is to be extended, increase training.keep_checkpoints" in text
    assert "--set training.warmup=2" in text and text.count("\n") <= 1


def test_a_restart_at_a_fraction_of_the_run_is_rejected(tmp_path):
    training = {**WSD, "restart": 0.5}
    assert run(tmp_path, "out", training=training)[:2] == (0, "")
    code, text, _ = run(tmp_path, "out", "--steps", "20", training=training)
    assert code == 2 and "training.restart" in text and text.count("\n") <= 1, text


def test_phases_that_are_shares_of_the_run_are_rejected(tmp_path):
    assert run(tmp_path, "out", mst=MST)[:2] == (0, "")
    code, text, (line, _) = *run(tmp_path, "out", "--steps", "20", mst=MST)[:2], run(tmp_path, "out", mst=MST)[2]
    reported = "set mst.sparsity, mst.topology.interval and mst.attention.dense_from in steps (integers)"
    assert code == 2 and reported in text and text.count("\n") <= 1
    code, text, _ = run(tmp_path, "out", "--steps", "20", "--resume", "step00000012", mst=MST)
    assert code == 2 and reported in text and "step -" not in text and text.count("\n") <= 1, "there is no step to name"
    out = tmp_path / "out"
    assert line == f"{out} is finished (12 steps); `mst report {out}` shows it", "nobody has asked for more steps"


def test_a_finished_run_may_have_a_damaged_older_checkpoint(tmp_path):
    training = {**WSD, "decay": 4, "save_every": 4, "keep_checkpoints": 3}
    assert run(tmp_path, "out", training=training)[:2] == (0, "")
    (tmp_path / "out" / "checkpoints" / "step00000004" / "manifest.json").unlink()
    code, text, _ = run(tmp_path, "out", training=training)
    assert code == 0 and "Traceback" not in text, text


def test_a_run_says_once_what_it_is_expected_to_gain(tmp_path):
    """Only on the first rank; plain dense training has nothing to expect."""
    blocks = {"training": {**WSD, "decay": 4}, "mst": IN_TOKENS}
    first, second = pool.run(logged_attempt, 2, arguments(tmp_path, "out", **blocks))
    assert first[0] == second[0] == 0
    assert [text.count("expected FLOP multiplier of") for _, text in (first, second)] == [1, 0]
    assert first[1].count("plain dense training for train-cost, plain dense training for inference-cost") == 1
    dense = pool.run(logged_attempt, 1, arguments(tmp_path, "dense", **{**blocks, "mst": {"method": "dense"}}))
    assert dense[0][0] == 0 and "expected FLOP" not in dense[0][1]


def test_fewer_steps_than_a_run_has_taken_are_rejected(tmp_path):
    assert run(tmp_path, "out", "--stop-at", "8")[:2] == (0, "")
    before = (tmp_path / "out" / "run.json").read_bytes()
    code, reported, _ = run(tmp_path, "out", "--steps", "7")
    assert code == 2 and "is at step 8 already, and training.steps is 7" in reported and len(reported.splitlines()) == 1
    assert (tmp_path / "out" / "run.json").read_bytes() == before
