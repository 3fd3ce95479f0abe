"""How fast is a training step, dense and with MST, in every phase, and where does its time go?

    mst bench step --config ds_configs/demo.json [--ranks 2] [--set model.n_layer=4] [--json | --append FILE]
    deepspeed --num_accelerators 8 --module benchmarks.step --config ds_configs/gpt2_small.json
    mst bench step --device cuda …           124M, 1.5B and 6.7B in blocks on one GPU: see benchmarks/step_cuda.py

Two DeepSpeed engines of the same config stand side by side, method dense and the config's own, and step in turns on the
same micro-batch of random tokens (one a step, no accumulation). MST's is taken to the middle of each phase of its
schedule by real topology steps. `ours_ms` and `rival_ms` are medians of whole steps without instruments, ranges the
middle half; `speedup` is the median of the ratios of neighbouring steps. Compute follows mst.compute.backend.

    parts       forward, backward, communication (DeepSpeed's collectives), optimizer, masking (gradients, weights);
                measured on further steps with instruments, which wait at every part: they add up to a little more
    topology    what a topology step takes longer than an ordinary one; "whole run" spreads it over the schedule
    FLOP/s      FLOPs that the step needs (the causal accounting of `mst flops`, masked weights not counted) per second;
                MFU: as a share of the peak of all ranks' devices
    memory      a rank's: weights, gradients and states after a step, and the peak within one (CUDA: allocated; CPU:
                resident set)
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import step_cuda
from benchmarks.fitting import capacity_here, layers_that_fit
from benchmarks.machine import machine, middle_half, peak_flops, wait_for
from mst_scale.arguments import Parser

Row = dict[str, Any]
PARTS = ("forward", "backward", "communication", "optimizer", "masking")
INSTRUMENTED = 3  # steps
MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet", "comms_logger", "scheduler")


@dataclass
class Side:
    """One engine, and how much memory it holds."""

    engine: Any
    batch: tuple[torch.Tensor, torch.Tensor]
    held: float | None = None  # bytes

    def step(self) -> None:
        self.engine.backward(self.engine(*self.batch))
        self.engine.step()

    def step_in_parts(self, watch: Any) -> None:
        with watch.span("forward"):
            loss = self.engine(*self.batch)
        with watch.span("backward"):
            self.engine.backward(loss)
        with watch.span("optimizer"):
            self.engine.step()


class Bench:
    """Both sides on this rank."""

    def __init__(self, ranks: Any, options: argparse.Namespace):
        from mst_scale.config import load

        self.ranks, self.options = ranks, options
        ours = load(options.config, options.set, options.method)
        theirs = load(options.config, [o for o in options.set if not o.startswith("mst.")], "dense")
        self.experiment, rival = (self._one_micro_batch(e) for e in (ours, theirs))
        if options.layers is not None:
            layers = options.layers
            if layers == "fit":
                layers = layers_that_fit(self.experiment, rival, ranks.world_size, capacity_here())
            self.experiment, rival = (
                replace(e, model=replace(e.model, n_layer=layers)) for e in (self.experiment, rival)
            )
        self.micro = self.experiment.deepspeed["train_micro_batch_size_per_gpu"]
        self.batch = self._random_tokens()
        self.dense, self.mst = (self._built(e) for e in (rival, self.experiment))
        self.device = self.dense.engine.device
        self.batch = (self.batch[0].to(self.device), self.batch[1].to(self.device))
        for side in (self.dense, self.mst):
            side.batch = self.batch

    def _one_micro_batch(self, experiment: Any) -> Any:
        from mst_scale.config.check import batch_shape, check

        check(experiment)
        micro = self.options.micro or batch_shape(experiment.deepspeed, self.ranks.world_size)[1]
        deepspeed = {k: v for k, v in experiment.deepspeed.items() if k not in MONITORS}
        deepspeed.update(
            train_micro_batch_size_per_gpu=micro,
            gradient_accumulation_steps=1,
            train_batch_size=micro * self.ranks.world_size,
            steps_per_print=2**31,
        )
        return replace(experiment, deepspeed=deepspeed)

    def _random_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        model = self.experiment.model
        generator = torch.Generator().manual_seed(self.ranks.rank)
        tokens, targets = torch.randint(model.vocab_size, (2, self.micro, model.context), generator=generator)
        if model.predicted < model.context:  # BERT: as many positions as it predicts
            targets[:, model.predicted :] = -1
        return tokens, targets

    def _built(self, experiment: Any) -> Side:
        import mst_scale
        from mst_scale import zero_shards
        from mst_scale.models import build

        before = _held()
        torch.manual_seed(0)
        with zero_shards.partitioned_construction(experiment.deepspeed):
            model = build(experiment.model)
        side = Side(mst_scale.initialize(model=model, config=experiment)[0], self.batch)
        device = side.engine.device
        side.batch = (self.batch[0].to(device), self.batch[1].to(device))
        side.step()  # states exist from here on
        now = _held()
        side.held = None if now is None or before is None else now - before
        return side

    # --- one phase ---

    def phase(self, phase: Any) -> tuple[Row, list[Row]]:
        """(a row, what each collective took) in the middle of this phase."""
        from mst_scale.flops import dense_step_flops, step_flops

        step = self.enter(phase)
        times = self._alternate(lambda: self.pin(step))
        theirs, ours = ([self._slowest(t) for t in side] for side in times)
        ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
        mst, model = self.mst.engine.mst, self.experiment.model
        sequences = self.micro * self.ranks.world_size
        needed = {
            "ours": sequences * step_flops(model, mst.densities(), mst.pattern, "causal").total,
            "rival": sequences * dense_step_flops(model, "causal").total,
        }
        row: Row = {
            "phase": phase.name,
            "step": step,
            "sparsity": round(mst.sparsity, 4),
            "attention": _name(mst.pattern),
            "ours_ms": _ms(ours),
            "ours_range": [_ms([q]) for q in middle_half(ours)],
            "rival": "the same DeepSpeed run, dense",
            "rival_ms": _ms(theirs),
            "rival_range": [_ms([q]) for q in middle_half(theirs)],
            "speedup": round(statistics.median(ratios), 3),
            "speedup_range": [round(q, 3) for q in middle_half(ratios)],
            "flop_reduction": round(needed["rival"] / needed["ours"], 3),
        }
        collectives = []
        for who, side, taken in (("ours", self.mst, ours), ("rival", self.dense, theirs)):
            seconds = statistics.median(taken)
            row[f"{who}_tokens_per_s"] = round(sequences * model.context / seconds)
            row[f"{who}_flops_per_s"] = needed[who] / seconds
            row[f"{who}_mfu"] = needed[who] / seconds / self.peak
            row[f"{who}_peak_bytes"] = self._peak_memory(side, step)
            parts, found = self._parts(side, lambda: self.pin(step))
            row[f"{who}_parts_ms"] = parts
            collectives += [{"phase": phase.name, "side": who, "step": "ordinary", **c} for c in found]
        topology, found = self._topology(step, phase)
        row["topology_ms"] = topology
        collectives += [{"phase": phase.name, "side": "ours", "step": "topology", **c} for c in found]
        return row, collectives

    def enter(self, phase: Any) -> int:
        """Take MST's masks to the middle of this phase by a real topology step; the step to stay at."""
        schedule, mst = self.mst.engine.mst.schedule, self.mst.engine.mst
        middle = (phase.start + phase.stop) // 2
        step = max(phase.start, middle - middle % schedule.interval)
        inside, due = range(step, phase.stop), schedule.is_topology_step
        quiet = [s for s in inside[: 4 * schedule.interval] if not due(s + 1)]
        step = next((s for s in quiet if not due(s + 2)), quiet[0] if quiet else step)
        if not mst.idle and step:
            self.mst.engine.global_steps = step - 1
            mst.masks_loaded()  # what a checkpoint of that step would do
            self.mst.step()
            assert abs(mst.sparsity - schedule.at(step).sparsity) < 0.01 or mst.blocks is not None
        return step

    def pin(self, step: int) -> None:
        """The next step of MST is an ordinary one of this phase, however many are taken."""
        self.mst.engine.global_steps = step
        self.mst.engine.mst.settled = step

    def _alternate(self, prepare: Callable[[], None]) -> list[list[float]]:
        times: list[list[float]] = [[], []]
        for _ in range(self.options.rounds + 1):
            for side, kept in zip((self.dense, self.mst), times, strict=True):
                prepare()
                dist.barrier()
                wait_for(self.device)
                start = time.perf_counter()
                side.step()
                wait_for(self.device)
                kept.append(time.perf_counter() - start)
        return [kept[1:] for kept in times]

    def _slowest(self, seconds: float) -> float:
        found = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.ranks.control)
        return float(found)

    def _parts(self, side: Side, prepare: Callable[[], None]) -> tuple[dict[str, float], list[Row]]:
        from benchmarks.stopwatch import Stopwatch

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
        if mst.idle or due is None:
            return None, []
        extra = []

        def at_topology_step() -> None:
            self.pin(due - 1)
            mst.masks_loaded()

        for _ in range(3):
            taken = []
            for prepare in (at_topology_step, lambda: self.pin(step)):
                prepare()
                dist.barrier()
                wait_for(self.device)
                start = time.perf_counter()
                self.mst.step()
                wait_for(self.device)
                taken.append(self._slowest(time.perf_counter() - start))
            extra.append(taken[0] - taken[1])
        return _ms(extra), self._parts(self.mst, at_topology_step)[1]

    def _peak_memory(self, side: Side, step: int) -> int | None:
        self.pin(step)
        start = _held()
        _forget_peak()
        side.step()
        peak = _peak()
        return None if None in (start, peak, side.held) else int(side.held + max(0, peak - start))  # type: ignore

    # --- all phases ---

    def run(self) -> dict[str, Any]:
        from mst_scale.ledger import forecast

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
            "model": f"{model.n_layer} layers × {model.n_embd}, {model.padded_vocab} rows, context {model.context}",
            "backend": self.experiment.mst.compute.backend,
            "zero_stage": self.mst.engine.zero_optimization_stage(),
            "dtype": str(dtype).removeprefix("torch."),
            "ranks": self.ranks.world_size,
            "sequences_per_rank": self.micro,
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
            theirs += phase.steps * row["rival_ms"]
        return {
            "phase": "whole run",
            "computed": "each phase's share of the steps times its median, topology steps added",
            "ours_ms": round(ours / run.steps, 2),
            "rival": "the same DeepSpeed run, dense",
            "rival_ms": round(theirs / run.steps, 2),
            "speedup": round(theirs / ours, 3),
            "flop_reduction": round(run.reduction("causal"), 3),
        }


def _name(pattern: Any) -> str:
    return pattern.kind if pattern.kind == "dense" else f"{pattern.kind} {pattern.stride}"


def _ms(seconds: Sequence[float]) -> float:
    return round(1e3 * statistics.median(seconds), 2)


def _summed(value: float, ranks: Any) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total, group=ranks.control)
    return float(total)


# --- memory of this rank ---


def _held() -> int | None:
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc: give back what is free, so that it is not counted
        ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def _peak() -> int | None:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _status("VmHWM")


def _forget_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak of the resident set starts anew


def _status(key: str) -> int | None:
    file = Path("/proc/self/status")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), None)


# --- ranks ---


def _worker(rank: int, options: argparse.Namespace, port: int, results: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(options.ranks),
        LOCAL_WORLD_SIZE=str(options.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    from mst_scale import distributed

    try:
        found = here(options)
    except distributed.Elsewhere:
        return  # another rank says why
    except Exception as error:
        if not distributed.is_plain(error):
            raise
        results.put((distributed.exit_code(error), str(error)))
        raise SystemExit(distributed.exit_code(error)) from None
    if rank == 0:
        results.put(found)


def here(options: argparse.Namespace) -> dict[str, Any]:
    """Measure as one of the ranks that a launcher has started."""
    threads = options.threads or max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    sys.stdout, out = sys.stderr, sys.stdout  # DeepSpeed speaks on stdout, where our JSON belongs
    from mst_scale import distributed

    ranks = distributed.init()
    bench = ranks.together(lambda: Bench(ranks, options))
    found = bench.run()
    ranks.leave()
    sys.stdout = out
    return found


def launched() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks and measure."""
    from mst_scale.distributed import free_port

    results = mp.get_context("spawn").SimpleQueue()
    try:
        mp.spawn(_worker, (options, free_port(), results), nprocs=options.ranks)
    except mp.ProcessExitedException:
        if results.empty():
            raise
        code, said = results.get()  # by the rank that found it
        raise (ValueError if code == 2 else OSError)(said) from None
    found: dict[str, Any] = results.get()
    return found


def parser() -> argparse.ArgumentParser:
    found = Parser(prog="mst bench step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--config", required=True, metavar="C", help="the experiment (ds_configs/*.json)")
    found.add_argument("--method", metavar="M", help="overrides mst.method of our side")
    found.add_argument("--set", action="append", default=[], metavar="K=V", help="override any key, repeatable")
    found.add_argument("--micro", type=int, metavar="N", help="sequences a rank and step (the config's)")
    found.add_argument(
        "--layers", type=_number_or_fit, metavar="N", help='instead of the config\'s; "fit": as many as fit on the GPU'
    )
    found.add_argument("--phases", nargs="+", metavar="P", help="only these: warmup ultra restore dense")
    found.add_argument("--rounds", type=int, default=7, help="pairs of steps in each phase (7)")
    found.add_argument("--ranks", type=int, default=1, help="processes to start here; a launcher's take precedence")
    found.add_argument("--threads", type=int, help="CPU threads a rank (the cores, shared)")
    found.add_argument("--append", metavar="FILE", help="add a section to this file, say benchmarks/results/step.md")
    output = found.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="for machines")
    output.add_argument("--markdown", action="store_true", help="the section that --append would add")
    found.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    return found


def _number_or_fit(word: str) -> int | str:
    return word if word == "fit" else int(word)


def check_options(options: argparse.Namespace) -> None:
    """Mistakes are found before ranks are started."""
    from mst_scale.config import load
    from mst_scale.config.check import batch_shape, check
    from mst_scale.ledger import forecast

    for name, least in (("rounds", 2), ("ranks", 1), ("micro", 1), ("threads", 1), ("layers", 1)):
        value = getattr(options, name)
        if isinstance(value, int) and value < least:
            raise ValueError(f"--{name} must be at least {least}, not {value}")
    experiment = load(options.config, options.set, options.method)
    check(experiment)
    if options.micro is None:
        batch_shape(experiment.deepspeed, int(os.environ["WORLD_SIZE"]) if launched() else options.ranks)
    known = dict.fromkeys(phase.name for phase in forecast(experiment).phases)
    for name in options.phases or ():
        if name not in known:
            raise ValueError(f"--phases {name}: this schedule has {', '.join(known)}")
    if options.layers == "fit":
        capacity_here()
    if options.append and not int(os.environ.get("RANK", "0")):
        try:
            with open(options.append, "a"):
                pass
        except OSError as error:
            raise ValueError(f"--append {options.append}: {error.strerror}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    from benchmarks.step_report import markdown, table

    given = list(sys.argv[1:] if arguments is None else arguments)
    device = Parser(prog="mst bench step", add_help=False, allow_abbrev=False)
    device.add_argument("--device", choices=("cuda",))
    where, others = device.parse_known_args(given)
    if where.device:
        return step_cuda.main(others)
    options = parser().parse_args(given)
    check_options(options)
    found = here(options) if launched() else run(options)
    if int(os.environ.get("RANK", "0")):
        return 0
    command = "mst bench step " + " ".join(given)
    if options.append:
        with Path(options.append).open("a") as file:
            file.write("\n" + markdown(found, command))
    if options.json:
        print(json.dumps(found))
    else:
        print(markdown(found, command) if options.markdown else table(found["rows"]))
    return 0


if __name__ == "__main__":
    from mst_scale import distributed

    try:
        code = main()
    except Exception as error:  # one line from one rank, and no rank waits for another
        distributed.end(error)
    raise SystemExit(code)
