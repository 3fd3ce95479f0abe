"""What the observer sees of sharded weights is what they are, on any ZeRO stage; looking changes nothing."""

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import mst_scale
from mst_scale.comm import Ranks
from mst_scale.config import load
from mst_scale.engine.targets import choose_targets
from mst_scale.errors import Damaged
from mst_scale.mixed_growing.config import TopologyConfig
from mst_scale.run_logging import snapshots
from mst_scale.run_logging.observer import Observer, cell_sums, phase_ends, snapshot_of_checkpoint
from mst_scale.shard import Shard
from mst_scale.sparsity_variation import SparsityConfig
from tests.support import pool, tiny_run
from tests.support.toy_engine import full, mst_config, train
from tests.support.toys import toy
from tests.support.whole_runs import MST, arguments, without_times


def cells_by_hand(matrix: np.ndarray, cells: int) -> np.ndarray:
    """Mean of each cell, weight by weight."""
    rows, cols = matrix.shape
    high, wide = min(cells, rows), min(cells, cols)
    total, count = np.zeros((high, wide)), np.zeros((high, wide))
    for r in range(rows):
        for c in range(cols):
            total[r * high // rows, c * wide // cols] += matrix[r, c]
            count[r * high // rows, c * wide // cols] += 1
    return total / count


def looked_at(rank, world, stage, folder, method):
    with pytest.MonkeyPatch.context() as patch:  # the process serves other tests too
        patch.setattr(snapshots, "CELLS", 6)  # smaller than the toy's matrices, and no divisor of their sides
        return look_and_gather(rank, world, stage, folder, method)


def look_and_gather(rank, world, stage, folder, method):
    raw = mst_config(stage, world, method=method)
    engine, *_ = mst_scale.initialize(model=toy(), config=raw)
    ranks = Ranks(rank, rank, world, torch.distributed.group.WORLD)
    experiment = load(raw)
    targets = partial(choose_targets, engine.module, experiment.mst.targets)
    observer = Observer(engine, experiment, Path(folder), ranks, step=0, choose_targets=targets)
    train(engine, rank, world, 24)
    before = [observer.shards.weight(i).clone() for i in range(3)]
    seen = observer.snapshot(24, "ultra")
    assert all(torch.equal(a, observer.shards.weight(i)) for i, a in enumerate(before))
    histograms = observer._histograms({m.name: m.largest for m in seen.matrices})
    engine.save_checkpoint(folder, tag="saved")
    weights, masks = {}, {}
    for i, part in enumerate(observer.shards.slices):
        engine.mst.store = observer.shards
        weights[part.name] = full(engine, observer.shards.weight(i), i, world).view(part.shape).numpy()
        masks[part.name] = full(engine, observer._flags(i), i, world).view(part.shape).numpy()
    return seen, weights, masks, histograms


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_moments_pictures_and_histograms_are_those_of_the_whole_weights(tmp_path, stage, monkeypatch):
    results = pool.run(looked_at, 3, stage, str(tmp_path), "mst")
    seen, weights, masks, histograms = results[0]
    assert [m.name for m in seen.matrices] == ["up.weight", "down.weight", "out.weight"]
    assert 0.5 < seen.sparsity < 0.9 and seen.parameters == sum(p.numel() for p in toy().parameters())
    for m in seen.matrices:
        w, kept = weights[m.name].astype(np.float64), masks[m.name]
        assert m.shape == w.shape and m.active == kept.sum() and 0 < m.active < w.size
        # sums of at most 481 float32 in another order
        assert m.mean == pytest.approx(w.mean(), rel=1e-6, abs=1e-8)
        assert m.std == pytest.approx(w.std(), rel=1e-6)
        assert m.std_active == pytest.approx(w[kept > 0].std(), rel=1e-6)
        assert m.largest == np.abs(w).max()
        np.testing.assert_allclose(seen.weights[m.name], cells_by_hand(np.abs(w), 6), rtol=1e-5)
        np.testing.assert_allclose(seen.active[m.name], cells_by_hand(kept, 6), rtol=1e-6)
        edges, counts = histograms[m.name]
        assert sum(counts) == m.active and min(counts) >= 0
        expected, _ = np.histogram(w[kept > 0].astype(np.float32), np.float32(edges))
        assert np.abs(np.array(counts) - expected).sum() <= 4, "but for weights on a border"
    for other in results[1:]:
        assert other[0].matrices == seen.matrices, "every rank sees the same"
    monkeypatch.setattr(snapshots, "CELLS", 6)
    at_rest = snapshot_of_checkpoint(tmp_path / "saved")
    assert (at_rest.step, at_rest.parameters) == (24, seen.parameters) and at_rest.sparsity == pytest.approx(
        seen.sparsity
    )
    for m, there in zip(seen.matrices, at_rest.matrices, strict=True):
        assert (there.name, there.shape, there.active, there.largest) == (m.name, m.shape, m.active, m.largest)
        assert (there.mean, there.std, there.std_active) == pytest.approx((m.mean, m.std, m.std_active), abs=1e-7)
        np.testing.assert_allclose(at_rest.weights[m.name], seen.weights[m.name], rtol=1e-5)
        np.testing.assert_allclose(at_rest.active[m.name], seen.active[m.name], rtol=1e-6)


def test_a_dense_run_is_looked_at_too(tmp_path):
    seen, weights, masks, _ = pool.run(looked_at, 3, 1, str(tmp_path), "dense")[0]
    assert seen.sparsity == 0.0 and all(masks[m.name].all() for m in seen.matrices)
    assert seen.matrices[0].std == pytest.approx(weights["up.weight"].std(), rel=1e-6)
    assert [path.name for path in snapshots.paths(tmp_path)] == ["step00000000.npz"], "the start is kept"


class Writer:
    """Stands in for TensorBoard's."""

    def __init__(self):
        self.images, self.histograms = {}, {}

    def add_image(self, tag, image, step):
        self.images[tag] = image

    def add_histogram_raw(self, tag, **values):
        self.histograms[tag] = values

    def flush(self):
        pass


def looks(rank, world, folder, spent):
    raw = mst_config(1, world)
    engine, *_ = mst_scale.initialize(model=toy(), config=raw)
    ranks = Ranks(rank, rank, world, torch.distributed.group.WORLD)
    experiment = load(raw)
    targets = partial(choose_targets, engine.module, experiment.mst.targets)
    observer = Observer(engine, experiment, Path(folder), ranks, step=1, choose_targets=targets)
    train(engine, rank, world, 20)
    writer = Writer()
    engine.monitor.tb_monitor = SimpleNamespace(summary_writer=writer if rank == 0 else None)
    observer.spent = spent
    before = observer.spent
    observer.after(20, 160)  # not a multiple of histogram_every
    assert not writer.images
    observer.after(observer.every, 160)
    return writer.images, writer.histograms, observer.spent - before


def test_tensorboard_shows_weights_next_to_masks_while_it_takes_less_than_one_percent(tmp_path):
    first, *others = pool.run(looks, 3, str(tmp_path), 0.0)
    images, histograms, seconds = first
    assert sorted(images) == [f"mst_weights_and_mask/{name}.weight" for name in ("down", "out", "up")]
    image = images["mst_weights_and_mask/up.weight"]
    assert image.shape == (1, 37, 13 + 2 + 13) and image.min() >= 0 and image.max() == 1, "weights, a rule, mask"
    assert set(np.unique(image[0, :, 15:])) == {0.0, 1.0}
    values = histograms["mst_living_weights/up.weight"]
    assert values["num"] == image[0, :, 15:].sum() == sum(values["bucket_counts"])
    assert seconds > 0 and all(not seen and not counted for seen, counted, _ in others)
    # an hour spent in a run of seconds: left out on every rank alike, and nothing hangs
    assert pool.run(looks, 3, str(tmp_path), 3600.0) == [({}, {}, 0.0)] * 3


def test_slices_add_up_wherever_they_are_cut(monkeypatch):
    monkeypatch.setattr(snapshots, "CELLS", 4)
    monkeypatch.setattr("mst_scale.mixed_growing.packed_bits.CPU_SPAN", 30)  # several spans
    flat = torch.arange(11 * 7, dtype=torch.float32) - 30
    whole = cell_sums(flat, Shard.whole("w", (11, 7)), magnitude=True)
    sizes = np.outer(np.bincount(np.arange(11) * 4 // 11), np.bincount(np.arange(7) * 4 // 7))
    np.testing.assert_allclose(whole / sizes, cells_by_hand(flat.abs().view(11, 7).numpy(), 4), rtol=1e-6)
    for cut in (0, 1, 6, 7, 40, 76, 77):
        first, second = (Shard.of_range("w", (11, 7), a, b - a) for a, b in ((0, cut), (cut, 77)))
        parts = cell_sums(flat[:cut], first, True) + cell_sums(flat[cut:], second, True)
        assert torch.equal(parts, whole), "whole numbers: no rounding"


def test_phase_ends_are_the_last_steps_of_each_phase():
    schedule = SparsityConfig().schedule(140_000, TopologyConfig())
    assert phase_ends(schedule) == {9_999, 109_999, 119_999, 140_000}
    assert [schedule.at(step).phase for step in sorted(phase_ends(schedule))] == ["warmup", "ultra", "restore", "dense"]


def test_a_snapshot_is_read_back_and_a_damaged_one_is_named(tmp_path):
    rng = np.random.default_rng(3)
    cells = {"a.0.b": rng.random((6, 5)).astype(np.float32)}
    matrix = snapshots.Matrix("a.0.b", (600, 500), 30_000, 1e-4, 0.02, 0.05, 0.4)
    snapshots.save(tmp_path, snapshots.Snapshot(7, "ultra", 0.9, 123, [matrix], cells, cells))
    (path,) = snapshots.paths(tmp_path)
    back = snapshots.load(path)
    assert (back.step, back.phase, back.parameters, back.matrices) == (7, "ultra", 123, [matrix])
    np.testing.assert_allclose(back.weights["a.0.b"], cells["a.0.b"], rtol=1e-3)  # half precision
    np.testing.assert_allclose(back.active["a.0.b"], cells["a.0.b"], atol=1 / 500)  # a byte
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(Damaged, match=f"{path} cannot be read"):
        snapshots.load(path)


def test_each_kind_of_matrix_is_pictured_in_the_first_and_the_middle_block():
    kinds = ("attention.qkv", "mlp.up")
    names = ["wte.weight", *(f"blocks.{i}.{kind}.weight" for i in range(50) for kind in kinds)]
    assert snapshots.pictured(names) == [f"blocks.{i}.{kind}.weight" for i in (0, 25) for kind in kinds]
    assert snapshots.pictured(["up.weight", "down.weight"]) == ["up.weight", "down.weight"]
    many = [f"h.{i}.{kind}" for i in range(3) for kind in "abcdefghijklmnop"]
    assert len(snapshots.pictured(many)) == snapshots.PICTURES


def test_a_run_keeps_phase_ends_shows_the_rest_in_tensorboard_and_trains_as_if_unseen(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from tests.support.whole_runs import attempt

    board = {"tensorboard": {"enabled": True, "output_path": str(tmp_path / "tb"), "job_name": ""}}
    argv = arguments(tmp_path, "seen", mst=MST, training={"histogram_every": 4}, **board)
    assert pool.run(attempt, 2, argv) == [(0, "")] * 2
    argv = arguments(tmp_path, "unseen", mst=MST, training={"histogram_every": 0})
    assert pool.run(attempt, 2, argv) == [(0, "")] * 2
    seen, unseen = tiny_run.rows(tmp_path / "seen"), tiny_run.rows(tmp_path / "unseen")
    assert without_times(seen) == without_times(unseen)
    assert all(row["peak_memory_bytes"] > 1e6 for row in seen)
    steps = [snapshots.load(path).step for path in snapshots.paths(tmp_path / "seen")]
    assert steps[0] == 0 and steps[-1] == 12 and len(steps) >= 4
    last = snapshots.load(snapshots.paths(tmp_path / "seen")[-1])
    assert {m.name: m.active / math.prod(m.shape) for m in last.matrices} == dict.fromkeys(
        [m.name for m in last.matrices], 1.0
    )
    events = EventAccumulator(str(tmp_path / "tb"), size_guidance={"images": 0, "compressedHistograms": 0})
    events.Reload()
    tags = events.Tags()
    assert {"mst/loss", "mst/sparsity", "mst/target_sparsity", "mst/attention_stride"} <= set(tags["scalars"])
    for what in ("churn", "density", "pruned", "grown", "ever_active"):
        assert f"mst_{what}/blocks.0.mlp.up.weight" in tags["scalars"], "by layer"
    assert "mst_weights_and_mask/blocks.0.attention.qkv.weight" in tags["images"]
    assert "mst_living_weights/blocks.0.mlp.up.weight" in tags["histograms"]
    first = events.Histograms("mst_living_weights/blocks.0.mlp.up.weight")[0]
    assert first.step % 32 == 0, (
        "a busy machine leaves out the first ones, so that less than 1 % of the time goes there"
    )
    ends_dense = first.step == 96  # only the last one was shown
    shown = first.histogram_value.num
    assert shown == 16 * 64 if ends_dense else 0 < shown < 16 * 64, "of active weights only, by samples"


def test_a_run_set_back_forgets_later_snapshots(tmp_path):
    matrix = snapshots.Matrix("w", (2, 2), 4, 0.0, 1.0, 1.0, 2.0)
    for step in (0, 5, 9):
        snapshots.save(tmp_path, snapshots.Snapshot(step, "ultra", 0.5, 4, [matrix]))
    snapshots.cut(tmp_path, 5)
    assert [path.stem for path in snapshots.paths(tmp_path)] == ["step00000000", "step00000005"]
