"""A run of method mst whose sparse phase is trained compact: dense, compact and dense again, by another engine each
time, ends bit for bit as the run of dense storage does."""

import functools
import json
import os
import shutil
import signal
import subprocess

import pytest

from mst_scale.checkpoints import finding
from mst_scale.zero_shards import compact_files
from tests.support import forked, pool, tiny_run
from tests.support.whole_runs import arguments, compact_attempt, differing, short_stretches, without_times

pytestmark = pytest.mark.full

STEPS, BORDER, HALF, RESTORED = 33, 5, 12, 30  # compact from BORDER to at least 25; checkpoints at HALF and RESTORED
RUN = {
    "mst": {
        "method": "mst",
        "sparsity": {"max": 0.8, "warmup": BORDER, "ultra": 20, "restore": 5},
        "topology": {"interval": 4, "check_every": 3},
        "attention": {"pattern": "strided", "stride": 8},
        "compute": {"backend": "dense"},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "gradient_clipping": 0,  # at ZeRO-1 and 2 dense storage sums its norm in float32
    "training": {"steps": STEPS, "eval_every": 12, "save_every": 6, "keep_checkpoints": 20},
}
# under a real launcher, a compact phase has at least 50 steps
LONG = {
    **RUN,
    "mst": {**RUN["mst"], "sparsity": {"max": 0.8, "warmup": BORDER, "ultra": 52, "restore": 5}},
    "training": {**RUN["training"], "steps": 65},
}


# with accumulation on several ranks, stages 0 and 1 add gradients up before they reduce them, and growth does not
ONE_MICRO_BATCH = "train_batch_size=4"


def stored(compact, stage):
    return ["--set", f"mst.compute.compact={compact}", "--set", f"zero_optimization.stage={stage}"]


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """The folder of a run of dense storage for (ranks, stage), which tests only read; each is trained once."""

    @functools.cache
    def trained(ranks, stage):
        folder = tmp_path_factory.mktemp(f"dense-{ranks}-{stage}")
        run_here(ranks, folder, "out", "off", stage)
        return folder / "out"

    return trained


def run_here(ranks, folder, out, compact, stage, *more, **blocks):
    """Return what rank 0 logged."""
    words = arguments(folder, out, *stored(compact, stage), *more, **RUN | blocks)
    said = pool.run(compact_attempt, ranks, words)
    assert all(code == 0 for code, _ in said), said
    return said[0][1]


def assert_same(one, other, steps=STEPS):
    for here, there in zip(*(without_times(tiny_run.rows(out)) for out in (one, other)), strict=True):
        assert here.pop("grad_norm") == pytest.approx(there.pop("grad_norm"), rel=1e-6)  # sums of float64 and float32
        assert here == there
    assert differing(one, other, finding.tag_of(steps)) == []


def assert_stretches(out, said, first_dense):
    """Check that steps from BORDER on were compact, and those from `first_dense` on not, or a few later."""
    starts = json.loads((out / "run.json").read_text())["starts"]
    borders = [start["from_step"] for start in starts]
    assert len(borders) == 3 and borders[:2] == [0, BORDER] and first_dense <= borders[2] < first_dense + 5
    assert [start["how"] for start in starts] == ["continued with another storage"] * 2 + ["finished"]
    assert "was not freed" not in said
    checkpoints = out / "checkpoints"
    assert (checkpoints / finding.tag_of(BORDER) / "zero").is_dir(), "the first checkpoint after the change"
    assert f"from step {BORDER}, from memory" in said and not list(checkpoints.glob("*.partial"))
    assert not list(checkpoints.glob("*/mst/compact.safetensors")), "the form is dense by default"


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_ends_bit_for_bit_as_with_dense_storage(tmp_path, dense, stage):
    said = run_here(2, tmp_path, "compact", "auto", stage, "--set", "training.async_save=true")
    assert_same(tmp_path / "compact", dense(2, stage))
    assert_stretches(tmp_path / "compact", said, BORDER + 20)


def test_a_launched_run_changes_its_storage(tmp_path):
    run_here(2, tmp_path, "dense", "off", 3, **LONG)
    words = arguments(tmp_path, "compact", *stored("auto", 3), "--set", "training.async_save=true", **LONG)
    launcher = ["deepspeed", "--num_accelerators", "2", "--master_port", str(tiny_run.free_port()), "--module"]
    ended = subprocess.run(
        [*launcher, "mst_scale.pretrain", *words], env=tiny_run.environment(), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said[-3000:]
    assert_same(tmp_path / "compact", tmp_path / "dense", LONG["training"]["steps"])
    assert_stretches(tmp_path / "compact", said, BORDER + 52)
    assert said.count("another engine continues\n") == 2


@pytest.mark.parametrize(("ranks", "stage", "key"), [
    (2, 0, ONE_MICRO_BATCH),
    (2, 3, "zero_optimization.offload_optimizer.device=cpu"),
    (1, 0, "bf16.enabled=true"),
    (1, 1, "checkpoint.load_universal=true"),
])  # fmt: skip
def test_any_engine_hands_its_state_over(tmp_path, ranks, stage, key):
    for out, compact in (("dense", "off"), ("compact", "auto")):
        assert "was not freed" not in run_here(ranks, tmp_path, out, compact, stage, "--set", key)
    assert_same(tmp_path / "compact", tmp_path / "dense")
    found = json.loads((tmp_path / "compact" / "run.json").read_text())
    assert len(found["starts"]) == 3 and found["restarts"] == 0


@pytest.mark.slow
def test_a_run_with_compiled_blocks_changes_its_storage_and_resumes(tmp_path):
    """Its losses are those of eager blocks to rounding; a run stopped in the compact steps ends as the first one."""
    keys = ("--set", "training.compile=true")
    whole = run_here(1, tmp_path, "whole", "auto", 2, *keys)
    run_here(1, tmp_path, "eager", "auto", 2)
    run_here(1, tmp_path, "stopped", "auto", 2, *keys, "--stop-at", str(HALF))
    run_here(1, tmp_path, "stopped", "auto", 2, *keys)
    assert "was not freed" not in whole
    compiled, eager, stopped = (tiny_run.rows(tmp_path / out) for out in ("whole", "eager", "stopped"))
    losses = [[row["loss"] for row in rows] for rows in (compiled, eager)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)  # rounding, after steps in which masks move
    assert compiled[-1]["loss"] == stopped[-1]["loss"]
    assert differing(tmp_path / "whole", tmp_path / "stopped", finding.tag_of(STEPS)) == []


PIPELINE = ("model.n_layer=2", "mst.targets.lm_head=true", "pipeline.stages=2")


@pytest.mark.parametrize(("stage", "form"), [pytest.param(1, "dense", marks=pytest.mark.slow), (0, "compact")])
def test_a_pipeline_ends_bit_for_bit_as_with_dense_storage(tmp_path, stage, form):
    """With the head tied across its two stages; it also resumes from its compact steps, there and on one rank."""
    keys = [word for key in (*PIPELINE, f"training.checkpoint_form={form}") for word in ("--set", key)]
    run_here(2, tmp_path, "dense", "off", stage, *keys)
    assert "was not freed" not in run_here(2, tmp_path, "compact", "auto", stage, *keys)
    assert_same(tmp_path / "compact", tmp_path / "dense")
    starts = json.loads((tmp_path / "compact" / "run.json").read_text())["starts"]
    assert [start["how"] for start in starts] == ["continued with another storage"] * 2 + ["finished"]
    rows = tiny_run.rows(tmp_path / "compact"), tiny_run.rows(tmp_path / "dense")
    small = [mine["state_bytes"] < 0.8 * theirs["state_bytes"] for mine, theirs in zip(*rows, strict=True)]
    assert any(small) and not all(small), "some steps were compact"
    half = finding.tag_of(HALF)
    assert compact_files.file_of(tmp_path / "compact" / "checkpoints" / half).is_file() == (form == "compact")
    for out in ("again", "alone"):
        shutil.copytree(tmp_path / "compact", tmp_path / out)
    run_here(2, tmp_path, "again", "auto", stage, *keys, "--resume", half)
    tiny_run.assert_continued(tmp_path / "again", tmp_path / "compact", HALF)
    assert_same(tmp_path / "again", tmp_path / "dense")
    run_here(1, tmp_path, "alone", "auto", stage, *keys, "--set", "pipeline.stages=1", "--resume", half)
    tiny_run.assert_continued(tmp_path / "alone", tmp_path / "compact", HALF)
    for mine, theirs in zip(tiny_run.rows(tmp_path / "alone"), rows[1], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-3) and mine["sparsity"] == theirs["sparsity"]


def test_killed_in_its_compact_steps_it_continues_compact(tmp_path, dense):
    words = arguments(
        tmp_path, "killed", *stored("auto", 2), "--set", "training.checkpoint_form=compact", "--set",
        "training.async_save=true", **RUN,
    )  # fmt: skip
    ranks = forked.start(2, words, tmp_path / "logs", short_stretches)
    tiny_run.wait_for((tmp_path / "killed" / "checkpoints" / finding.tag_of(HALF)).is_dir, ranks)
    for rank in ranks:
        rank.kill()
    assert forked.end(ranks, 60) == [-signal.SIGKILL] * 2
    assert compact_files.file_of(tmp_path / "killed" / "checkpoints" / finding.tag_of(HALF)).is_file()
    run_here(2, tmp_path, "killed", "auto", 2, "--set", "training.checkpoint_form=compact")
    assert differing(tmp_path / "killed", dense(2, 2), finding.tag_of(STEPS)) == []


def test_a_checkpoint_of_dense_storage_continues_compact_and_the_reverse(tmp_path, dense):
    shutil.copytree(dense(1, 1), tmp_path / "compact")
    folder = dense(1, 1).parent  # of the same corpus
    said = run_here(1, folder, tmp_path / "compact", "auto", 1, "--resume", finding.tag_of(HALF))
    assert "stores whole matrices" in said and ": creating a copy" in said
    assert_same(tmp_path / "compact", dense(1, 1))
    shutil.copytree(tmp_path / "compact", tmp_path / "again")
    run_here(1, folder, tmp_path / "again", "off", 1, "--resume", finding.tag_of(RESTORED))
    tiny_run.assert_continued(tmp_path / "again", tmp_path / "compact", RESTORED)
    assert_same(tmp_path / "again", dense(1, 1))


def test_a_run_that_is_asked_to_stop_at_a_border_continues_there(tmp_path, dense):
    """The signal may also come while another engine takes over."""
    words = arguments(tmp_path, "out", *stored("auto", 1), **RUN)
    [process] = forked.start(1, words, tmp_path / "logs", short_stretches)
    tiny_run.wait_for((tmp_path / "out" / "checkpoints" / finding.tag_of(BORDER)).is_dir, [process])
    os.kill(process.pid, signal.SIGTERM)
    assert None not in forked.end([process], 120), "it ends by itself"
    run_here(1, tmp_path, "out", "auto", 1)
    assert_same(tmp_path / "out", dense(1, 1))


def test_a_run_that_stops_at_a_border_continues_there(tmp_path, dense):
    """Asked again, it is there already."""
    record = tmp_path / "out" / "run.json"
    for count in (1, 2):
        run_here(1, tmp_path, "out", "auto", 1, "--stop-at", str(BORDER))
        starts = json.loads(record.read_text())["starts"]
        assert len(starts) == count and starts[-1]["last_step"] == BORDER
    run_here(1, tmp_path, "out", "auto", 1)
    assert_same(tmp_path / "out", dense(1, 1))
    assert json.loads(record.read_text())["starts"][-3]["from_step"] == BORDER
