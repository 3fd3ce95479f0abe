"""Measures the time multiplier of a study's methods: how much longer dense training takes to reach the same loss.

    python -m mst_scale.benchmarks.studies.in_time [--study channels] [--widths 128 256 512] [--markdown | --json]

A study gives the FLOP multiplier of a method, but FLOPs are not time. Here DeepSpeed engines of the study's model take
steps in turn: dense, and with sparse single weights, blocks and channels. The time of a run is the sum of its steps:
those at the highest sparsity and dense ones are measured, and others are interpolated by their number of active
weights. The time multiplier is the time that dense training of the model needs to reach the loss, divided by the run's.

    weights    mst at that sparsity, its kernels chosen by mst.compute.backend = auto
    blocks     the same in blocks of 16 × 16 and 32 × 32
    channels   the same in whole channels (mst.topology.granularity = channel)

Topology steps are left out, as they are one step in a hundred. The wider models show how step times change with the
width; their losses are not those of the study.

The last table has what `mst plan` predicts for GPUs: how much faster than dense a whole run with this schedule is. It
is not measured. The time multiplier is then the FLOP multiplier, times this speedup, divided by the FLOP reduction.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mst_scale.comm import run_program
from mst_scale.comm.parser import at_least
from mst_scale.config import Experiment, load
from mst_scale.config.check import check
from mst_scale.config.deepspeed import precision_of
from mst_scale.flops.ledger import forecast
from mst_scale.methods import NoOptions
from mst_scale.mixed_growing.config import BlockGranularity, TopologyConfig
from mst_scale.plan import gpus
from mst_scale.plan.setting import setting_of
from mst_scale.plan.step_time import phases, step_seconds

from ..local_ranks import run_on
from ..machine import machine
from ..page import aside, command_line, grid, parse, show
from ..step_sides import Side, engine_of
from ..timing import in_rounds, middle_half
from . import records
from .page import answers
from .plan import FOLDER, Cell, Plan, job, read_plan

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
CARDS = {"A100": "a100-80gb", "H200": "h200"}
CONFIGS = ("gpt2_small", "gpt2_xl", "gpt3_6.7b")
KINDS: dict[str, dict[str, Any]] = {
    "weights": {},
    "blocks of 16": {"granularity": BlockGranularity(16, 2)},
    "blocks of 32": {"granularity": BlockGranularity(32, 2)},
    "channels": {"granularity": "channel", "policy": "static"},
}
ON_GPUS: dict[str, dict[str, Any]] = {
    "blocks of 32": KINDS["blocks of 32"],
    "blocks of 64": {"granularity": BlockGranularity(64, 2)},
    "channels": KINDS["channels"],
}


@dataclass(frozen=True)
class Steps:
    """Milliseconds of the steps of one model: dense, and by kind where a share of the weights lives."""

    width: int
    dense: list[float]
    sparse: Mapping[tuple[str, float], list[float]]


def side(experiment: Experiment) -> Side:
    """An engine at its first step."""
    engine = engine_of(experiment)
    shape = experiment.deepspeed["train_micro_batch_size_per_gpu"], experiment.model.seq_length
    tokens, targets = torch.randint(experiment.model.vocab_size, (2, *shape))
    return Side(engine, (tokens, targets))


def measured(plan: Plan, width: int, rounds: int) -> Steps:
    """All kinds step in turns, each in the sparse steps that its run begins with."""
    sparse = [e for cell in plan.cells() if not (e := _experiment(plan, cell)).mst.stays_dense]
    first = replace(sparse[0], model=replace(sparse[0].model, n_embd=width))
    densities = dict.fromkeys(density_of(e) for e in sparse)
    sides = {("dense", 1.0): side(replace(first, mst=load({"model": {}, "mst": {"method": "dense"}}).mst))}
    sides |= {(kind, density): side(made(first, KINDS[kind], density)) for kind in KINDS for density in densities}
    times = dict(zip(sides, in_rounds([one.step for one in sides.values()], rounds), strict=True))
    milliseconds = {what: [1e3 * seconds for seconds in found] for what, found in times.items()}
    return Steps(width, milliseconds.pop(("dense", 1.0)), milliseconds)


def density_of(experiment: Experiment) -> float:
    """Return the share of active weights in the sparsest phase."""
    return round(1 - experiment.mst.sparsity.max, 6)


def made(like: Experiment, kind: dict[str, Any], density: float) -> Experiment:
    """That run with masks of this kind, as sparse from its first step."""
    topology = TopologyConfig(random_ratio=1.0, grown_moments="active_mean", **kind)
    sparsity = replace(like.mst.sparsity, max=1 - density, distribution="uniform")
    compute = replace(like.mst.compute, backend="auto")
    mst = replace(like.mst, method="mst", options=NoOptions(), sparsity=sparsity, topology=topology, compute=compute)
    found = replace(like, mst=mst)
    check(found)
    return found


def here(options: argparse.Namespace) -> dict[str, Any]:
    """Measure in this process."""
    threads = options.threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    with aside():
        from mst_scale import comm

        ranks = comm.init()
        plan = read_plan(options.study)
        found = [measured(plan, width, options.rounds) for width in options.widths]
        ranks.leave()
    return {"machine": machine(threads), "steps": found}


def _experiment(plan: Plan, cell: Cell) -> Experiment:
    return job(plan, cell, plan.rates_of(cell)[0], plan.seeds[0], plan.config["data"]["dir"]).experiment


# --- what follows for the runs ---


def run_seconds(experiment: Experiment, steps: Steps) -> float:
    """Return the time of all steps, interpolated between the sparsest and the dense ones by active weights."""
    sparse, schedule = 1 - experiment.mst.sparsity.max, experiment.schedule
    of_dense, total = statistics.median(steps.dense), 0.0
    weights_from = getattr(experiment.mst.options, "weights_from", 0.0) * experiment.training.steps
    granularity = experiment.mst.topology.granularity
    if granularity == "channel":
        weights_from = experiment.training.steps
    kept = f"blocks of {granularity.block}" if isinstance(granularity, BlockGranularity) else "weights"
    for step in range(experiment.training.steps):
        kind = "channels" if step < weights_from else kept
        of_sparse = statistics.median(steps.sparse[kind, density_of(experiment)])
        density = 1 - schedule.at(step).sparsity
        total += of_sparse + (of_dense - of_sparse) * max(0.0, density - sparse) / (1 - sparse)
    return total / 1e3


def rows_of(plan: Plan, steps: Steps) -> list[dict[str, Any]]:
    """Return one row per method; the baseline is dense training of the model until it reaches the same loss."""
    cells, found = _cells(plan), []
    sparse = {row["variant"]: row for row in cells if not row["dense"]}
    whole = next(row["flops"] / row["share"] for row in cells if row["dense"])
    for cell in plan.cells():
        row = sparse.get(cell.variant)
        multiplier = None if row is None else row["worth_same_model_paper"]
        if row is None or multiplier is None:
            continue
        experiment = _experiment(plan, cell)
        seconds, of_dense = run_seconds(experiment, steps), statistics.median(steps.dense)
        faster = experiment.training.steps * of_dense / 1e3 / seconds
        in_time = faster * row["flops"] / whole  # FLOPs of dense steps are their time
        found.append(
            {
                "variant": cell.variant,
                "val_loss": row["val_loss"],
                "flop_multiplier": multiplier,
                "ours_ms": 1e3 * seconds / experiment.training.steps,
                "baseline": "the same model, dense, trained until it reaches the same loss",
                "baseline_ms": of_dense,
                "speedup": in_time * multiplier["value"],
                "speedup_range": [in_time * multiplier[end] for end in ("low", "high") if multiplier[end] is not None],
            }
        )
    return found


def expected(plan: Plan) -> list[dict[str, Any]]:
    """By card and ready config: how many times faster than dense a run is, not measured."""
    found = []
    like = next(e for cell in plan.cells() if not (e := _experiment(plan, cell)).mst.stays_dense)
    attention = replace(like.mst.attention, stride=256)  # a quarter of the context
    for card, gpu in CARDS.items():
        for name in CONFIGS:
            ready = load(name)
            steps = replace(ready.training, steps=like.training.steps)
            run = replace(ready, training=steps, mst=replace(like.mst, attention=attention))
            row: dict[str, Any] = {"gpu": card, "config": name}
            for kind, topology in ON_GPUS.items():
                one = made(run, topology, density_of(like))
                if kind != "channels":  # `auto` knows of no crossover of GPUs
                    one = replace(one, mst=replace(one.mst, compute=replace(one.mst.compute, backend="block")))
                alone = replace(setting_of(one, 8), ranks=1)
                of_dense = step_seconds(one, alone, gpus.machine(gpu, 1))
                of_phases = phases(one, of_dense, alone, gpus.machine(gpu, 1))
                expected_seconds = sum(p.steps * p.expected_seconds for p in of_phases)
                row[kind] = of_dense.total * sum(p.steps for p in of_phases) / expected_seconds
            row["flop_reduction"] = forecast(one).reduction("causal")
            found.append(row)
    return found


def _cells(plan: Plan) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answers(plan, records.known(FOLDER), plan.config["data"]["dir"])["cells"]
    return found


def table(rows: Sequence[Mapping[str, Any]], steps: Sequence[Steps], on_gpus: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as tables of Markdown."""

    def spread(low: Any, high: Any) -> str:
        return "" if low is None else f" ({low:.2f} to {high:.2f})"

    lines_of_methods = [
        [
            row["variant"],
            f"{row['val_loss']:.4f}",
            f"{m['bound']}{m['value']:.2f}{spread(m['low'], m['high'])}",
            f"{row['ours_ms']:.1f}",
            f"{row['baseline_ms'] / row['ours_ms']:.2f}",
            f"{m['bound']}{row['speedup']:.2f}{spread(*(row['speedup_range'] or (None, None)))}",
        ]
        for row in rows
        for m in [row["flop_multiplier"]]
    ]
    head = ["method", "validation loss", "FLOP multiplier", "mean step ms", "faster than dense", "time multiplier"]
    times = [
        [found.width, kind, f"{1 - density:.0%}" if density < 1 else "", *_step(of, found.dense)]
        for found in steps
        for (kind, density), of in {("dense", 1.0): found.dense, **found.sparse}.items()
    ]
    kinds = grid(["width", "weights", "sparse", "step ms (middle half)", "faster than dense"], times)
    lines = [[f"{cell:.2f}" if isinstance(cell, float) else cell for cell in row.values()] for row in on_gpus]
    heads = ["expected, not measured", "config", *ON_GPUS, "FLOPs ÷, causal"]
    return "\n\n".join([grid(head, lines_of_methods), kinds, grid(heads, lines)])


def _step(of: Sequence[float], dense_ms: Sequence[float]) -> list[str]:
    low, high = middle_half(of)
    return [
        f"{statistics.median(of):.1f} ({low:.1f}–{high:.1f})",
        f"{statistics.median(dense_ms) / statistics.median(of):.2f}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its results."""
    parser = command_line("python -m mst_scale.benchmarks.studies.in_time", __doc__)
    option = parser.add_argument
    option("--study", default="channels", metavar="NAME", help="(default: %(default)s)")
    option("--widths", type=at_least(4), nargs="+", default=[128, 256, 512], metavar="W", help="the study's own first")
    option("--rounds", type=at_least(2), default=30, metavar="N", help="steps of each (default: 30)")
    option("--threads", type=at_least(1), metavar="N", help="CPU threads (default: the cores)")
    options = parse(parser, arguments)
    found = run_on(1, here, options)
    plan = read_plan(options.study)
    rows = rows_of(plan, found["steps"][0])
    setting = {"study": options.study, "rounds": options.rounds, "dtype": DTYPES[precision_of(plan.config)]}
    return show(options, rows, table(rows, found["steps"], expected(plan)), found["machine"], setting)


if __name__ == "__main__":
    run_program(main)
