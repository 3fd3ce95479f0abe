"""Measures a phase of the schedule, on both sides of `benchmarks.step_sides`, and computes the whole run.

It measures whole steps of both engines in turn without instrumentation, peak memory, additional steps with a stopwatch
for their parts and collectives, and topology steps next to ordinary ones. `benchmarks.step` describes the columns.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import memory
from .machine import machine, peak_flops
from .page import Row
from .step_sides import Pair, Side
from .timing import Run, in_rounds, longest, middle_half, seconds_of

PARTS = ("forward", "backward", "communication", "optimizer", "masking")
INSTRUMENTED = 3  # steps


class Bench:
    """The rows and collectives of both sides."""

    def __init__(self, pair: Pair, options: argparse.Namespace):
        self.pair, self.options = pair, options
        self.ranks, self.experiment, self.device = pair.ranks, pair.experiment, pair.device
        self.dense = pair.dense

    @property
    def mst(self) -> Side:
        """MST's side; another engine where the storage of weights changes."""
        return self.pair.mst

    def run(self) -> dict[str, Any]:
        """Measure every phase, and compute the whole run."""
        from mst_scale.flops.ledger import forecast

        dtype = next(self.dense.engine.module.parameters()).dtype
        one, source = peak_flops(self.device, dtype)
        self.peak = _summed(one, self.ranks)
        run = forecast(self.experiment)
        known: dict[str, Any] = {}
        for phase in run.phases:
            known.setdefault(phase.name, phase)
        wanted = self.options.phases or list(known)
        rows, collectives = [], []
        for name, phase in known.items():
            if name in wanted:
                row, found = self.phase(phase)
                rows.append(row)
                collectives += found
        if set(wanted) == known.keys():
            rows.append(self._whole(run, rows))
        for row in rows:
            row["ranks"] = self.ranks.world_size
        return {
            "machine": {**machine(torch.get_num_threads()), "device": str(self.device)},
            "setting": self._setting(dtype, source),
            "rows": rows,
            "collectives": collectives,
        }

    def _setting(self, dtype: torch.dtype, source: str) -> Row:
        model = self.experiment.model
        return {
            "config": self.options.config,
            "method": self.experiment.mst.method,
            "model": f"{model.n_layer} layers × {model.n_embd}, {model.padded_vocab} rows, context {model.seq_length}",
            "backend": self.experiment.mst.compute.backend,
            "zero_stage": self.mst.engine.zero_optimization_stage(),
            "dtype": str(dtype).removeprefix("torch."),
            "ranks": self.ranks.world_size,
            "sequences_per_rank": self.pair.micro,
            "rounds": self.options.rounds,
            "peak_flops_per_s": self.peak,
            "peak_is": source,
        }

    def _whole(self, run: Any, rows: list[Row]) -> Row:
        """The run's mean step, from each phase's share of the steps and the topology steps in it."""
        by_phase, schedule = {row["phase"]: row for row in rows}, self.mst.engine.mst.schedule
        topology = list(schedule.topology_steps())
        ours = theirs = 0.0
        for phase in run.phases:
            row = by_phase[phase.name]
            steps = sum(phase.start < s <= phase.stop for s in topology)
            ours += phase.steps * row["ours_ms"] + steps * (row["topology_ms"] or 0.0)
            theirs += phase.steps * row["baseline_ms"]
        return {
            "phase": "whole run",
            "computed": "each phase's share of the steps times its median, topology steps added",
            "ours_ms": round(ours / run.steps, 2),
            "baseline": "the same DeepSpeed run, dense",
            "baseline_ms": round(theirs / run.steps, 2),
            "speedup": round(theirs / ours, 3),
            "flop_reduction": round(run.reduction("causal"), 3),
        }

    # --- one phase ---

    def phase(self, phase: Any) -> tuple[Row, list[Row]]:
        """(a row, what each collective took) in the middle of this phase."""
        from mst_scale.flops.formulas import dense_step_flops, step_flops

        step = self.pair.enter(phase)

        def at_ordinary_step() -> None:
            self.pair.pin(step)

        theirs, ours = in_rounds(
            [self.dense.step, self.mst.step], self.options.rounds, lambda run: self._seconds(at_ordinary_step, run)
        )
        ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
        mst, model = self.mst.engine.mst, self.experiment.model
        sequences = self.pair.micro * self.ranks.world_size
        needed = {
            "ours": sequences * step_flops(model, mst.densities(), mst.pattern, "causal").total,
            "baseline": sequences * dense_step_flops(model, "causal").total,
        }
        row: Row = {
            "phase": phase.name,
            "step": step,
            "sparsity": round(mst.sparsity, 4),
            "attention": mst.pattern.label,
            "weights": self._storage(),
            "ours_ms": _ms(ours),
            "ours_range": [_ms([q]) for q in middle_half(ours)],
            "baseline": "the same DeepSpeed run, dense",
            "baseline_ms": _ms(theirs),
            "baseline_range": [_ms([q]) for q in middle_half(theirs)],
            "speedup": round(statistics.median(theirs) / statistics.median(ours), 3),
            "paired_speedup": round(statistics.median(ratios), 3),
            "speedup_range": [round(q, 3) for q in middle_half(ratios)],
            "flop_reduction": round(needed["baseline"] / needed["ours"], 3),
        }
        collectives = []
        for who, side, taken in (("ours", self.mst, ours), ("baseline", self.dense, theirs)):
            seconds = statistics.median(taken)
            row[f"{who}_tokens_per_s"] = round(sequences * model.seq_length / seconds)
            row[f"{who}_flops_per_s"] = needed[who] / seconds
            row[f"{who}_mfu"] = needed[who] / seconds / self.peak
            row[f"{who}_peak_bytes"] = self._peak_memory(side, step)
            parts, found = self._parts(side, at_ordinary_step)
            row[f"{who}_parts_ms"] = parts
            collectives += [{"phase": phase.name, "side": who, "step": "ordinary", **c} for c in found]
        topology, found = self._topology(step, phase)
        row["topology_ms"] = topology
        collectives += [{"phase": phase.name, "side": "ours", "step": "topology", **c} for c in found]
        return row, collectives

    def _storage(self) -> str:
        from mst_scale import zero_shards

        if zero_shards.is_compact(self.mst.engine.module):
            return "compact"
        return "dense" if self.mst.engine.mst.sparsity == 0 else "masked"

    def _seconds(self, prepare: Callable[[], object], run: Run) -> float:
        """The seconds of the slowest rank."""
        prepare()
        dist.barrier()
        return longest(seconds_of(run, self.device), self.ranks.control)

    def _parts(self, side: Side, prepare: Callable[[], None]) -> tuple[dict[str, float], list[Row]]:
        from .stopwatch import Stopwatch

        watch, mst = Stopwatch(self.device), side.engine.mst
        plain, mst.span = mst.span, watch.span
        try:
            for _ in range(INSTRUMENTED):
                prepare()
                with watch.running():
                    side.step_in_parts(watch)
        finally:
            mst.span = plain
        parts = {name: round(ms / INSTRUMENTED, 3) for name, ms in watch.parts.items()}
        collectives = [
            {
                "name": name,
                "calls": c.calls / INSTRUMENTED,
                "bytes": c.payload / INSTRUMENTED,
                "ms": c.ms / INSTRUMENTED,
            }
            for name, c in sorted(watch.collectives.items())
        ]
        return {name: parts.get(name, 0.0) for name in (*PARTS, "topology")}, collectives

    def _topology(self, step: int, phase: Any) -> tuple[float | None, list[Row]]:
        """Milliseconds that a topology step of this phase takes longer than an ordinary one (median of 3), if any."""
        mst = self.mst.engine.mst
        due = next((s for s in range(step + 1, phase.stop) if mst.schedule.is_topology_step(s)), None)
        if not mst.masks_weights or due is None:
            return None, []

        def at_topology_step() -> None:
            self.pair.pin(due - 1)
            mst.masks_replaced()

        extra = []
        for _ in range(3):
            longer = self._seconds(at_topology_step, self.mst.step)
            extra.append(longer - self._seconds(lambda: self.pair.pin(step), self.mst.step))
        return _ms(extra), self._parts(self.mst, at_topology_step)[1]

    def _peak_memory(self, side: Side, step: int) -> int | None:
        self.pair.pin(step)
        peak = memory.peak_of(side.step, self.pair.memory)
        return None if peak is None or side.held is None else int(side.held + max(0, peak))


def _ms(seconds: Sequence[float]) -> float:
    return round(1e3 * statistics.median(seconds), 2)


def _summed(value: float, ranks: Any) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total, group=ranks.control)
    return float(total)
