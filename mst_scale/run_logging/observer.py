"""Observes the weights of a sharded model while it trains, for the report and for TensorBoard.

Each rank reduces its own slices to a few sums (moments, picture cells, histogram bins), and one small all-reduce per
kind adds them up: no weights are sent, at any ZeRO stage. Nothing is written to the model and no random number is
drawn, so observation does not change training, bit for bit.

Snapshots are kept of the ends of phases (`snapshots.py`). TensorBoard gets pictures and histograms every
`training.histogram_every` steps, as long as they have taken less than 1 % of the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mst_scale import zero_shards
from mst_scale.checkpoints import manifests, mask_files
from mst_scale.checkpoints.multiplied import multiplied_weights_of
from mst_scale.comm import Ranks, logger
from mst_scale.comm.exchange import Exchanges, Stages
from mst_scale.config import Experiment
from mst_scale.errors import UserError
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.masks import assemble
from mst_scale.run_logging import snapshots
from mst_scale.run_logging.metrics import OptionalWrites
from mst_scale.run_logging.snapshots import Matrix, Snapshot
from mst_scale.shard import Shard
from mst_scale.sparsity_variation import Schedule

SHARE = 0.01  # fraction of the training time that TensorBoard's pictures and histograms may take
EMBEDDINGS = ("wte.", "wpe.", "embeddings.")  # of a dense run, whose checkpoint does not state its targets
BINS = 65  # odd: zeros fall into the middle bin, from which inactive weights are subtracted


ChooseTargets = Callable[[], dict[str, torch.nn.Parameter]]


class Observer:
    """Observes the weights of one run. All methods are called on all ranks."""

    shards: zero_shards.Store
    exchange: Exchanges

    def __init__(
        self, engine: Any, experiment: Experiment, out: Path, ranks: Ranks, step: int, *, choose_targets: ChooseTargets
    ):
        """Begin to observe; `choose_targets` finds the matrices of a run without masks, and may raise UserError."""
        self.engine, self.out, self.ranks = engine, out, ranks
        self.every = experiment.training.histogram_every
        self.schedule: Schedule = engine.mst.schedule
        self.keep_at = phase_ends(self.schedule)
        self.disk = OptionalWrites()
        self.started, self.spent = time.monotonic(), 0.0
        self.stages = Stages(zero_shards.groups_of(engine).stages)
        named = zero_shards.named_parameters(engine.module)
        sizes = self.stages.joined({name: math.prod(zero_shards.shape_of(p)) for name, p in named})
        self.parameters = sum(sizes.values())
        self.enabled = self._find_shards(choose_targets)
        self.rewind(step)
        if step == 0 and self.enabled:
            self._keep(0)

    def _find_shards(self, choose_targets: ChooseTargets) -> bool:
        mst = self.engine.mst
        if mst.masks_weights:
            self.shards, self.exchange = mst.store, mst.state.exchange
            return True
        try:
            self.shards = zero_shards.shards_of(self.engine, choose_targets())
        except UserError as error:
            logger.info("no snapshots of weights are kept: %s", error)
            return False
        self.exchange = zero_shards.exchanges_of(
            self.shards.parameters, zero_shards.groups_of(self.engine), self.engine.device
        )
        return True

    def rewind(self, step: int) -> None:
        """Remove the snapshots after `step`, to which the run is rolled back."""
        self.ranks.on_first(lambda: snapshots.cut(self.out, step))

    def after(self, step: int, samples: int) -> None:
        """Keep a snapshot and write to TensorBoard if they are due after this step."""
        if self.enabled and step in self.keep_at:
            self._keep(step)
        if self.enabled and self.every and step % self.every == 0:
            self._show(samples)

    def _keep(self, step: int) -> None:
        phase = self.schedule.at(max(0, step - 1)).phase
        snapshot = self.snapshot(step, phase)
        if self.ranks.first:
            self.disk.attempt("snapshots of the weights", lambda: snapshots.save(self.out, snapshot))

    def _show(self, samples: int) -> None:
        """Write pictures and histograms to TensorBoard, through the writer of DeepSpeed's monitor."""
        tensorboard = getattr(self.engine.monitor, "tb_monitor", None)
        writer = getattr(tensorboard, "summary_writer", None)
        start = time.monotonic()
        affordable = self.spent <= SHARE * (start - self.started)
        if not self.ranks.any(writer is not None and affordable):
            return
        snapshot = self.snapshot(0, "")
        histograms = self._histograms({m.name: m.largest for m in snapshot.matrices})
        if writer is not None:
            self.disk.attempt("TensorBoard's pictures", lambda: _write_images(writer, snapshot, histograms, samples))
        self.spent += time.monotonic() - start

    def snapshot(self, step: int, phase: str) -> Snapshot:
        """Return a snapshot of the current weights, the same on every rank."""
        slices = self.shards.slices
        active = [self._active(i) for i in range(len(slices))]
        moments = torch.zeros(len(slices), 2, dtype=torch.float64)
        largest = torch.zeros(len(slices), dtype=torch.float64)
        for i, part in enumerate(slices):
            weight = self.shards.weight(i)  # on every rank: a compact store brings it together
            if part.length:
                moments[i, 0] = weight.sum(dtype=torch.float64)
                moments[i, 1] = torch.linalg.vector_norm(weight, dtype=torch.float64).square()
                low, high = weight.aminmax()
                largest[i] = torch.maximum(-low, high)
        moments = self.exchange.sum(moments)
        largest = self.exchange.max(largest)
        matrices = {
            part.name: _describe(part.name, part.cut.matrix, active[i], moments[i].tolist(), float(largest[i]))
            for i, part in enumerate(slices)
        }
        weights, shares = (self.stages.joined(pictures) for pictures in self._pictures())
        found = list(self.stages.joined(matrices).values())
        return Snapshot(step, phase, self.engine.mst.sparsity, self.parameters, found, weights, shares)

    def _pictures(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return mean |weight| and the share of active weights in the cells of each pictured matrix."""
        slices, drawn = self.shards.slices, self._drawn()
        cells = {}
        for i in drawn:
            magnitudes = cell_sums(self.shards.weight(i), slices[i], magnitude=True)
            cells[i] = torch.stack([magnitudes, cell_sums(self._flags(i), slices[i])])
        weights, shares = {}, {}
        for exchange, here in self.exchange.grouped(drawn):
            summed = exchange.sum(torch.cat([cells[i].flatten() for i in here]))
            for i, found in zip(here, summed.split([cells[i].numel() for i in here]), strict=True):
                sizes = _cell_sizes(slices[i].cut.matrix)
                weights[slices[i].name], shares[slices[i].name] = found.view(cells[i].shape).numpy() / sizes
        return weights, shares

    def _drawn(self) -> list[int]:
        """Return this rank's pictured matrices."""
        names = [part.name for part in self.shards.slices]
        shown = set(snapshots.pictured(list(self.stages.joined(dict.fromkeys(names)))))
        return [i for i, name in enumerate(names) if name in shown]

    def _histograms(self, largest: dict[str, float]) -> dict[str, tuple[list[float], list[float]]]:
        """Return (edges, counts) of the active weights of each pictured matrix."""
        slices = self.shards.slices
        drawn = self._drawn()
        counts = torch.zeros(len(slices), BINS, dtype=torch.float64)
        for i in drawn:
            top = largest[slices[i].name] or 1.0
            weight = self.shards.weight(i)
            if torch.are_deterministic_algorithms_enabled():
                weight = weight.cpu()  # torch's histogram on GPUs raises an error then
            if slices[i].length:
                counts[i] = torch.histc(weight, BINS, -top, top).double().cpu()
        counts = self.exchange.sum(counts)
        found = {}
        for i in drawn:
            name, top = slices[i].name, largest[slices[i].name] or 1.0
            counts[i, BINS // 2] -= slices[i].numel - self._active(i)
            found[name] = (np.linspace(-top, top, BINS + 1).tolist(), counts[i].tolist())
        return self.stages.joined(found)

    def _active(self, i: int) -> int:
        """Return the number of active weights of the whole parameter."""
        masks = self.engine.mst.masks
        part = self.shards.slices[i]
        return int(masks[part.name].active) if len(masks) else math.prod(part.shape)

    def _flags(self, i: int) -> Tensor:
        """Return this rank's slice of the mask, one byte per weight."""
        masks, part = self.engine.mst.masks, self.shards.slices[i]
        if len(masks) and not masks[part.name].dense:
            return masks[part.name].flags()
        return torch.ones(part.length, dtype=torch.bool, device=self.shards.weight(i).device)


def _write_images(
    writer: Any, snapshot: Snapshot, histograms: dict[str, tuple[list[float], list[float]]], at: int
) -> None:
    for name, cells in snapshot.weights.items():
        top = float(cells.max()) or 1.0
        sides = np.concatenate([cells / top, np.ones((cells.shape[0], 2)), snapshot.active[name]], axis=1)
        writer.add_image(f"mst_weights_and_mask/{name}", sides[None], at)
    moments = {m.name: m for m in snapshot.matrices}
    for name, (edges, counts) in histograms.items():
        matrix = moments[name]
        count, total = matrix.active, matrix.mean * math.prod(matrix.shape)
        squares = count * matrix.std_active**2 + total**2 / max(1, count)
        writer.add_histogram_raw(
            f"mst_living_weights/{name}", min=edges[0], max=edges[-1], num=count, sum=total,
            sum_squares=squares, bucket_limits=edges[1:], bucket_counts=counts, global_step=at,
        )  # fmt: skip
    writer.flush()


def phase_ends(schedule: Schedule) -> set[int]:
    """Return the steps after which snapshots are kept: the last step of each phase, before its topology changes."""
    return {phase.stop - 1 for phase in schedule.phases[:-1]} | {schedule.total_steps}


def _describe(name: str, shape: tuple[int, int], active: int, sums: list[float], largest: float) -> Matrix:
    total, squares = sums  # of the weights, and of their squares

    def std(count: int) -> float:
        return math.sqrt(max(0.0, squares / count - (total / count) ** 2)) if count else 0.0

    numel = math.prod(shape)
    return Matrix(name, shape, active, total / numel, std(numel), std(active), largest)


def cell_sums(flat: Tensor, shard: Shard, magnitude: bool = False) -> Tensor:
    """Return the sums of a flat shard over the cells of the matrix's picture, of absolute values if `magnitude`.

    Cell (a, b) covers the rows r with ⌊r·R/rows⌋ = a and the columns c with ⌊c·C/cols⌋ = b. These are two products with
    0/1 matrices, a span of rows at a time, with temporaries of a few MB on a CPU.
    """
    (rows, columns), start = shard.cut.matrix, shard.start
    high, wide = snapshots.grid(shard.cut.matrix)
    row_axis, column_axis = shard.cut.axes
    cols, device = column_axis.length, flat.device
    total = torch.zeros(high, wide, device=device)
    if not flat.numel():
        return total.cpu()
    across = _belongs(column_axis.logical(torch.arange(cols, device=device)), columns, wide)
    end = start + flat.numel()
    span = packed_bits.CPU_SPAN if device.type == "cpu" else packed_bits.DEVICE_SPAN
    step = max(1, span // cols)
    first, last = start // cols, -(-end // cols)
    for r in range(first, last, step):
        until = min(r + step, last)
        block = torch.zeros((until - r) * cols, device=device)
        begin, stop = max(start, r * cols), min(end, until * cols)
        block[begin - r * cols : stop - r * cols] = flat[begin - start : stop - start]
        if magnitude:
            block.abs_()
        down = _belongs(row_axis.logical(torch.arange(r, until, device=device)), rows, high)
        total += down.T @ (block.view(-1, cols) @ across)
    return total.cpu()


def _belongs(lines: Tensor, extent: int, cells: int) -> Tensor:
    """Return (lines, cells): 1 where a line, of `extent` lines, belongs to the cell."""
    return torch.nn.functional.one_hot(lines * cells // extent, cells).to(torch.float32)


def _cell_sizes(shape: tuple[int, int]) -> np.ndarray:
    """Return the number of weights in each cell."""
    high, wide = snapshots.grid(shape)
    down = np.bincount(np.arange(shape[0]) * high // shape[0], minlength=high)
    across = np.bincount(np.arange(shape[1]) * wide // shape[1], minlength=wide)
    return np.outer(down, across)


def snapshot_of_checkpoint(checkpoint: Path) -> Snapshot:
    """Return the weights of a checkpoint as a snapshot, reading one matrix at a time."""
    weights = multiplied_weights_of(checkpoint)
    masks = mask_files.read_all(checkpoint) if (checkpoint / mask_files.FOLDER).is_dir() else None
    targets = [name for name, s in weights.shapes.items() if len(s) > 1 and not name.startswith(EMBEDDINGS)]
    head: dict[str, Any] = {"names": targets, "step": 0, "phase": "dense"} if masks is None else masks.head
    drawn, matrices = snapshots.pictured(head["names"]), []
    pictures: dict[str, np.ndarray] = {}
    shares: dict[str, np.ndarray] = {}
    total = active = 0
    for name in head["names"]:
        values = weights.read(name).detach().flatten()
        shard = Shard.whole(name, weights.shapes[name])
        shape = shard.cut.matrix
        flags = torch.ones(values.numel(), dtype=torch.bool)
        if masks is not None:
            flags = packed_bits.unpack(assemble(masks.shards(name), name), values.numel())
        count = int(flags.sum())
        total, active = total + values.numel(), active + count
        sums = [float(values.sum(dtype=torch.float64)), float(values.double().square().sum())]
        matrices.append(_describe(name, shape, count, sums, float(values.abs().max())))
        if name in drawn:
            pictures[name] = cell_sums(values, shard, magnitude=True).numpy() / _cell_sizes(shape)
            shares[name] = cell_sums(flags, shard).numpy() / _cell_sizes(shape)
    step = int((manifests.head(checkpoint) or {}).get("step") or head["step"])
    parameters = sum(math.prod(shape) for shape in weights.shapes.values())
    sparsity = 1 - active / total if total else 0.0
    return Snapshot(step, head["phase"], sparsity, parameters, matrices, pictures, shares)
