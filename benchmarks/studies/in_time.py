"""How much longer must dense training of the same model run to reach what a study's methods reach: in time, measured.

    python -m mst_scale.benchmarks.studies.in_time [--study channels] [--widths 128 256 512] [--markdown | --json]

A study says how many times its FLOPs a method is worth; FLOPs are not time. Here DeepSpeed engines of the study's model
step in turns: dense, with sparse single weights, with sparse blocks, and with as many channels as live. A run's time is
that of its steps: of those that are as sparse as it gets, of dense ones, and between them by the number of living
weights. `worth in time` is the time that dense training of the model needs for the loss, divided by the run's.

    weights    mst at that sparsity, its kernels chosen by mst.compute.backend = auto
    blocks     the same in blocks of 16 × 16
    channels   a model whose MLPs and heads are made with a share of their channels: small dense products

Topology steps are left out: they are one step in a hundred. The wider models say how step times change with the width;
their losses are not those of the study.

What `mst plan` expects of GPUs stands below: how much faster than dense a whole run with the schedule of `weights` is,
in blocks by the roofline of their kernels, and in channels, whose products and attention take their share of dense ones
and whose element-wise passes take no less. It is not measured. Worth in time there is worth in FLOPs, times that, over
the reduction of FLOPs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from mst_scale.config import Experiment, load
from mst_scale.config.check import check
from mst_scale.costs.flops import dense_step_flops
from mst_scale.costs.ledger import forecast
from mst_scale.distributed.parser import Parser, at_least
from mst_scale.plan import gpus
from mst_scale.plan.clock import step_seconds
from mst_scale.plan.phases import phases
from mst_scale.plan.setting import setting_of

from ..local_ranks import run_on
from ..machine import machine
from ..page import aside, grid, outputs, tell
from ..step_sides import Side
from ..timing import in_rounds, middle_half
from . import facts
from .page import answers
from .plan import FOLDER, Cell, Plan, job, read_plan

CARDS = {"A100": "a100-80gb", "H200": "h200"}
CONFIGS = ("gpt2_small", "gpt2_xl", "gpt3_6.7b")
SIDES = (32, 64)
BLOCKS = {"mst.topology.granularity": {"block": 16, "min_blocks": 2}}


@dataclass(frozen=True)
class Steps:
    """Milliseconds of the steps of one model: dense, and by kind where a share of the weights lives."""

    width: int
    dense: list[float]
    sparse: Mapping[tuple[str, float], list[float]]


def narrowed(model: nn.Module, density: float) -> nn.Module:
    """A GPT whose MLPs and heads have a share of their channels."""
    for block in model.blocks:  # type: ignore[union-attr]
        attention, mlp = block.attention, block.mlp
        width, heads = attention.proj.out_features, attention.n_head
        attention.head_dim = max(1, round(density * attention.head_dim))
        inner, neurons = heads * attention.head_dim, max(1, round(density * mlp.up.out_features))
        attention.qkv = nn.Linear(width, 3 * inner, bias=False)
        attention.proj = nn.Linear(inner, width, bias=False)
        mlp.up, mlp.down = nn.Linear(width, neurons, bias=False), nn.Linear(neurons, width, bias=False)
    return model


def side(experiment: Experiment, density: float | None = None) -> Side:
    """An engine at its first step; with `density` one of so many channels, that attends as the first step would."""
    import mst_scale
    from mst_scale.hybrid_sparse_attention import set_pattern
    from mst_scale.models import build

    torch.manual_seed(0)
    model = build(experiment.model)
    pattern = experiment.attention_schedule.pattern_at(0)
    if density is not None:
        model, experiment = narrowed(model, density), dense(experiment)
    engine = mst_scale.initialize(model=model, config=experiment)[0]
    if density is not None:
        set_pattern(engine.module, pattern)
    shape = experiment.deepspeed["train_micro_batch_size_per_gpu"], experiment.model.context
    tokens, targets = torch.randint(experiment.model.vocab_size, (2, *shape))
    return Side(engine, (tokens, targets))


def dense(experiment: Experiment) -> Experiment:
    return replace(experiment, mst=load({"model": {}, "mst": {"method": "dense"}}).mst)


def measured(width: int, weights: Experiment, blocks: Experiment, densities: Sequence[float], rounds: int) -> Steps:
    """All kinds step in turns, each in the sparse steps that its run begins with."""
    most = weights.mst.sparsity.max
    sides = {("dense", 1.0): side(dense(weights)), ("weights", round(1 - most, 6)): side(weights)}
    sides["blocks", round(1 - most, 6)] = side(blocks)
    sides |= {("channels", density): side(weights, density) for density in densities}
    times = dict(zip(sides, in_rounds([one.step for one in sides.values()], rounds), strict=True))
    milliseconds = {what: [1e3 * seconds for seconds in found] for what, found in times.items()}
    return Steps(width, milliseconds.pop(("dense", 1.0)), milliseconds)


def here(options: argparse.Namespace) -> dict[str, Any]:
    threads = options.threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    with aside():
        from mst_scale import distributed

        ranks = distributed.init()
        plan = read_plan(options.study)
        found = [_of_width(plan, width, options.rounds) for width in options.widths]
        ranks.leave()
    return {"machine": machine(threads), "steps": found}


def _of_width(plan: Plan, width: int, rounds: int) -> Steps:
    cells = {cell.variant: cell for cell in plan.cells()}
    weights = _widened(_experiment(plan, cells["weights"]), width)
    compute = replace(weights.mst, compute=replace(weights.mst.compute, backend="auto"))
    weights = replace(weights, mst=compute)
    blocks = load(_raw(weights), [f"{key}={json.dumps(value)}" for key, value in BLOCKS.items()])
    for one in (weights, blocks):
        check(one)
    channels = [_experiment(plan, cell) for name, cell in cells.items() if name.startswith("channels")]
    densities = sorted({round(1 - one.mst.sparsity.max, 6) for one in channels})
    return measured(width, weights, blocks, densities, rounds)


def _raw(experiment: Experiment) -> dict[str, Any]:
    from mst_scale.config import to_dict

    return to_dict(experiment)


def _experiment(plan: Plan, cell: Cell) -> Experiment:
    return job(plan, cell, plan.rates_of(cell)[0], plan.seeds[0], plan.config["data"]["dir"]).experiment


def _widened(experiment: Experiment, width: int) -> Experiment:
    return replace(experiment, model=replace(experiment.model, n_embd=width))


# --- what follows for the runs ---


def run_seconds(experiment: Experiment, steps: Steps) -> float:
    """Of all its steps; between the sparsest ones and dense ones by the share of weights that live."""
    sparse, schedule = 1 - experiment.mst.sparsity.max, experiment.schedule
    of_dense, total = statistics.median(steps.dense), 0.0
    weights_from = getattr(experiment.mst.options, "weights_from", 0.0) * experiment.training.steps
    for step in range(experiment.training.steps):
        kind = "channels" if step < weights_from else "weights"
        of_sparse = statistics.median(steps.sparse[kind, round(sparse, 6)])
        living = 1 - schedule.at(step).sparsity
        total += of_sparse + (of_dense - of_sparse) * max(0.0, living - sparse) / (1 - sparse)
    return total / 1e3


def rows_of(plan: Plan, steps: Steps) -> list[dict[str, Any]]:
    """By method; the rival is dense training of the model for as long as it takes to that loss."""
    told = {row["variant"]: row for row in _cells(plan) if row["share"] == 1}
    whole, found = told.pop("dense"), []
    for cell in plan.cells():
        row = told.get(cell.variant)
        worth = None if row is None else row["worth_same_model_paper"]
        if row is None or worth is None:
            continue
        experiment = _experiment(plan, cell)
        seconds, of_dense = run_seconds(experiment, steps), statistics.median(steps.dense)
        faster = experiment.training.steps * of_dense / 1e3 / seconds
        in_time = faster * row["flops"] / whole["flops"]  # FLOPs of dense steps are their time
        found.append(
            {
                "variant": cell.variant,
                "val_loss": row["val_loss"],
                "worth": worth,
                "ours_ms": 1e3 * seconds / experiment.training.steps,
                "rival": "the same model, dense, trained as long as it takes to that loss",
                "rival_ms": of_dense,
                "speedup": in_time * worth["value"],
                "speedup_range": [in_time * worth[end] for end in ("low", "high") if worth[end] is not None],
            }
        )
    return found


def expected(plan: Plan) -> list[dict[str, Any]]:
    """By card and ready config: how many times faster than dense a run is, not measured."""
    weights = plan.variants["weights"]
    schedule = {key: value for key, value in weights.set.items() if key.startswith("mst.")}
    schedule |= {"mst.compute.backend": "block", "mst.attention.stride": 0.25}
    found = []
    for card, gpu in CARDS.items():
        for name in CONFIGS:
            row: dict[str, Any] = {"gpu": card, "config": name}
            for side in SIDES:
                blocks = {**schedule, "mst.topology.granularity": {"block": side, "min_blocks": 2}}
                settings = [f"{key}={json.dumps(value)}" for key, value in blocks.items()]
                run = load(name, settings, weights.method)
                alone = replace(setting_of(run, 8), ranks=1)
                of_dense = step_seconds(run, alone, gpus.machine(gpu, 1))
                of_phases = phases(run, of_dense, alone, gpus.machine(gpu, 1))
                row[f"blocks of {side}"] = faster([(p.steps, p.expected_seconds) for p in of_phases], of_dense.total)
            head, kept = dense_step_flops(run.model, "causal"), 1 - run.mst.sparsity.max
            share = (head.head + kept * (head.matrices - head.head)) / head.matrices
            narrow = of_dense.total - (1 - share) * of_dense.products - (1 - kept) * of_dense.attention
            of_channels = [(p.steps, narrow if p.sparsity else of_dense.total) for p in of_phases]
            row["channels"] = faster(of_channels, of_dense.total)
            row["flop_reduction"] = forecast(run).reduction("causal")
            found.append(row)
    return found


def faster(parts: Sequence[tuple[int, float]], dense_seconds: float) -> float:
    return dense_seconds * sum(steps for steps, _ in parts) / sum(steps * seconds for steps, seconds in parts)


def _cells(plan: Plan) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answers(plan, facts.known(FOLDER), plan.config["data"]["dir"])["cells"]
    return found


def table(rows: Sequence[Mapping[str, Any]], steps: Sequence[Steps], on_gpus: Sequence[Mapping[str, Any]]) -> str:
    def spread(low: Any, high: Any) -> str:
        return "" if low is None else f" ({low:.2f} to {high:.2f})"

    lines_of_methods = [
        [
            row["variant"],
            f"{row['val_loss']:.4f}",
            f"{row['worth']['bound']}{row['worth']['value']:.2f}{spread(row['worth']['low'], row['worth']['high'])}",
            f"{row['ours_ms']:.1f}",
            f"{row['rival_ms'] / row['ours_ms']:.2f}",
            f"{row['worth']['bound']}{row['speedup']:.2f}{spread(*(row['speedup_range'] or (None, None)))}",
        ]
        for row in rows
    ]
    head = ["method", "validation loss", "worth in FLOPs", "mean step ms", "faster than dense", "worth in time"]
    times = [
        [found.width, kind, f"{1 - density:.0%}" if density < 1 else "", *_step(of, found.dense)]
        for found in steps
        for (kind, density), of in {("dense", 1.0): found.dense, **found.sparse}.items()
    ]
    kinds = grid(["width", "weights", "sparse", "step ms (middle half)", "faster than dense"], times)
    lines = [[f"{cell:.2f}" if isinstance(cell, float) else cell for cell in row.values()] for row in on_gpus]
    heads = [
        "expected, not measured",
        "config",
        *(f"blocks of {side}" for side in SIDES),
        "channels",
        "FLOPs ÷, causal",
    ]
    return "\n\n".join([grid(head, lines_of_methods), kinds, grid(heads, lines)])


def _step(of: Sequence[float], dense_ms: Sequence[float]) -> list[str]:
    low, high = middle_half(of)
    return [
        f"{statistics.median(of):.1f} ({low:.1f}–{high:.1f})",
        f"{statistics.median(dense_ms) / statistics.median(of):.2f}",
    ]


def parser() -> argparse.ArgumentParser:
    found = Parser(
        prog="python -m mst_scale.benchmarks.studies.in_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--study", default="channels", metavar="NAME", help="(default: %(default)s)")
    found.add_argument(
        "--widths", type=at_least(4), nargs="+", default=[128, 256, 512], metavar="W", help="the first is the study's"
    )
    found.add_argument("--rounds", type=at_least(2), default=30, help="steps of each (30)")
    found.add_argument("--threads", type=at_least(1), help="CPU threads (the cores)")
    outputs(found)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    found = run_on(1, here, options)
    plan = read_plan(options.study)
    rows = rows_of(plan, found["steps"][0])
    setting = {"study": options.study, "rounds": options.rounds, "dtype": "float32"}
    command = f"python -m mst_scale.benchmarks.studies.in_time --study {options.study} --rounds {options.rounds}"
    tables, about = table(rows, found["steps"], expected(plan)), found["machine"]
    tell(options, rows, tables, about=about, doc=__doc__, command=command, setting=setting)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
