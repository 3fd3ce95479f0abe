"""Loss spikes: what counts as one, and a rollback that leaves the batch out, exactly and on all ranks alike."""

import math
import shutil

import pytest

from mst_scale.config import SpikeConfig
from mst_scale.pretrain import saving, training_loop
from mst_scale.pretrain.batches import MicroBatches
from mst_scale.pretrain.spikes import Spikes, batch_number
from tests.support import pool, tiny_run
from tests.support.whole_runs import MST, arguments, assert_same_run, logged_attempt

pytestmark = pytest.mark.full

DENSE = {"method": "dense"}
BAD = 13  # the batch that makes the loss jump


def test_a_jump_counts_and_drift_and_noise_do_not():
    spikes = Spikes(SpikeConfig(window=16, deviations=8, rise=0.5))
    losses = [4 - 0.05 * i + 0.1 * math.sin(7 * i) for i in range(40)]
    assert [spikes.begins(loss) for loss in losses] == [False] * 40
    assert spikes.begins(losses[-1] + 9) and not spikes.begins(losses[-1] + 8), "one spike, seen once"
    assert not spikes.begins(losses[-1]) and spikes.begins(losses[-1] + 9)
    assert not spikes.begins(math.nan) and len(spikes.losses) == 16


def test_a_spike_that_has_begun_continues_after_a_checkpoint():
    config = SpikeConfig(window=8, deviations=2, rise=0.1)
    spikes = Spikes(config, [1.0, 1.1, 0.9, 1.0, 1.05])
    assert spikes.begins(3.0) and spikes.in_spike
    assert not Spikes(config, spikes.losses, spikes.in_spike).begins(3.1)
    assert Spikes(config, spikes.losses).begins(3.1)


def test_the_bound_by_hand():
    spikes = Spikes(SpikeConfig(window=4, deviations=2, rise=0.1), [1.0])
    assert spikes.threshold() == math.inf, "half of the window is needed"
    spikes = Spikes(SpikeConfig(window=8, deviations=2, rise=0.1), [1.0, 2.0, 3.0, 5.0])
    assert spikes.threshold() == pytest.approx(2.5 + 2 * 1.4826 * 1.0)  # median 2.5, deviations 1.5, .5, .5, 2.5
    assert Spikes(SpikeConfig(window=4, deviations=2, rise=0.7), [1.0] * 4).threshold() == 1.7
    assert Spikes(SpikeConfig(action="off", window=4), [1.0] * 4).threshold() == math.inf


def test_skipped_batches_are_stepped_over():
    assert [batch_number(step, ()) for step in range(4)] == [0, 1, 2, 3]
    assert [batch_number(step, (2,)) for step in range(4)] == [0, 1, 3, 4]
    assert [batch_number(step, (4, 2, 3)) for step in range(4)] == [0, 1, 5, 6]
    assert [batch_number(step, (0, 1, 4)) for step in range(4)] == [2, 3, 5, 6]


def spiky(rank, world, argv, kind, killed=False):
    """Batch 13 is broken: its targets are shifted, or its loss is not a number. Steps 17 on cost a rank its life."""
    read, update, roll_back = MicroBatches.read, MicroBatches.update, training_loop.Run._roll_back

    def broken_targets(self, sampler, number, index):
        tokens, targets = read(self, sampler, number, index)
        if kind == "jump" and sampler is self.train and number == BAD:
            targets = (targets + 31) % 64
        return tokens, targets

    def not_a_number(self, step, number):
        bad = number == BAD and kind == "nan"
        return update(self, step, number) * (math.nan if bad else 1.0)

    def then_killed(self, bad):
        done = roll_back(self, bad)
        raise SystemExit(9 if done else 8)

    MicroBatches.read, MicroBatches.update = broken_targets, not_a_number
    if killed:
        training_loop.Run._roll_back = then_killed
    try:
        return logged_attempt(rank, world, argv)
    finally:
        MicroBatches.read, MicroBatches.update, training_loop.Run._roll_back = read, update, roll_back


def without_the_batch(rank, world, argv):
    """The run that never sees the batch."""
    inner = training_loop.batch_number
    training_loop.batch_number = lambda step, skipped: step + (step >= BAD)
    try:
        return logged_attempt(rank, world, argv)
    finally:
        training_loop.batch_number = inner


def rolling(folder, out, action="rollback", stage=1, mst=MST):
    spike = {"action": action, "window": 6, "deviations": 4, "rise": 0.3}
    training = {"steps": 20, "spike": spike, "eval_every": 0, "stop_after_nonfinite": 1}
    # DeepSpeed's Adam on the CPU rounds its bias correction otherwise after a load: torch's is exact
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "torch_adam": True}}
    blocks = {"training": training, "mst": mst, "zero_optimization": {"stage": stage}, "optimizer": optimizer}
    return arguments(folder, out, **blocks)


@pytest.mark.parametrize(
    ("stage", "kind", "mst"),
    [(0, "jump", MST), (1, "jump", MST), (2, "nan", MST), (3, "jump", MST), (1, "nan", DENSE), (3, "jump", DENSE)],
    ids=lambda one: one["method"] if isinstance(one, dict) else str(one),
)
def test_a_rollback_ends_as_a_run_without_the_batch(tmp_path, stage, kind, mst):
    argv = rolling(tmp_path, "plain", stage=stage, mst=mst)
    assert [code for code, _ in pool.run(without_the_batch, 2, argv)] == [0, 0]
    argv = rolling(tmp_path, "out", stage=stage, mst=mst)
    assert pool.run(spiky, 2, argv, kind, True)[0][0] == 9, "killed right after going back"
    results = pool.run(spiky, 2, argv, kind)
    assert [code for code, _ in results] == [0, 0], results
    assert_same_run(tmp_path / "out", tmp_path / "plain", "step00000020")
    (event,) = [e for e in story(tmp_path)["events"] if e["what"] == "rolled back"]
    assert event["skipped"] == [BAD] and event["to_step"] == 12 and event["from_step"] in (14, 15)


def story(folder):
    import json

    return json.loads((folder / "out" / "run.json").read_text())


def test_by_default_a_spike_is_logged_and_the_run_continues(tmp_path):
    results = pool.run(spiky, 2, rolling(tmp_path, "out", action="log"), "jump")
    assert [code for code, _ in results] == [0, 0]
    (event,) = [e for e in story(tmp_path)["events"] if e["what"] != "revived dead units"]
    assert event["what"] == "spike" and event["step"] == BAD + 1 and event["loss"] > event["bound"]
    assert tiny_run.rows(tmp_path / "out")[-1]["step"] == 20
    shutil.rmtree(tmp_path / "out")
    results = pool.run(spiky, 2, rolling(tmp_path, "out", action="log"), "nan")
    assert [code for code, _ in results] == [3, 3] and "not finite" in "".join(text for _, text in results)


def drops(rank, world, argv):
    """The exit code of a run with a spike, and how often it removes the copies in memory."""
    inner, dropped = saving.Saves.drop_copies, []
    saving.Saves.drop_copies = lambda self: (dropped.append(1), inner(self))
    try:
        return spiky(rank, world, argv, "jump")[0], len(dropped)
    finally:
        saving.Saves.drop_copies = inner


def test_a_rollback_removes_the_copies_in_memory_and_nothing_else_does(tmp_path):
    argv = [*rolling(tmp_path, "out"), "--set", "training.save_every=0"]
    assert pool.run(drops, 2, argv) == [(0, 1)] * 2, "at the last save"
    assert [e["what"] for e in story(tmp_path)["events"] if e["what"] != "revived dead units"] == ["spike"]
    shutil.rmtree(tmp_path / "out")
    assert pool.run(drops, 2, rolling(tmp_path, "out")) == [(0, 2)] * 2, "in the rollback, too"


def test_without_a_checkpoint_there_is_no_rollback(tmp_path):
    argv = [*rolling(tmp_path, "out"), "--set", "training.save_every=0"]
    assert [code for code, _ in pool.run(spiky, 2, argv, "jump")] == [0, 0]
    assert [e["what"] for e in story(tmp_path)["events"] if e["what"] != "revived dead units"] == ["spike"]
    shutil.rmtree(tmp_path / "out")
    assert [code for code, _ in pool.run(spiky, 2, argv, "nan")] == [3, 3]
