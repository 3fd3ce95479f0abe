"""Runs `mst flops`, which counts the FLOPs that a run will cost and save, and prints the paper's tables."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mst_scale.cli import add_command, align
from mst_scale.errors import UserError
from mst_scale.units import format_flops

if TYPE_CHECKING:
    from mst_scale.config import Experiment
    from mst_scale.flops.formulas import Flops
    from mst_scale.flops.ledger import Forecast

TEXT = """\
Count the FLOPs of a run from its config, before it is started: per phase, on average and per component, compared with
a dense run and with the paper's tiny model. The unit is GFLOPs per sequence, forward and backward (3 × forward). There
are two ways to count dense attention:

  paper    dense attention counts as the full L × L square, as in the paper
  causal   dense attention counts the L (L + 1) / 2 pairs that a causal kernel computes

Sparse attention counts its own pairs in both.

examples:
  mst flops --config gpt2_small
  mst flops --config gpt2_small --method rigl --json
  mst flops --config gpt2_small --method dense-short --match-flops gpt2_small
  mst flops --config large.json --method ligo --from runs/small
  mst flops --paper
"""

IGNORED = (
    "Not counted: norms, GELU, softmax, biases, embedding look-ups, the optimizer (except Muon's Newton-Schulz) and "
    "the recomputation of activation checkpointing. Topology steps are counted separately, with --topology."
)


def add(subparsers: Any) -> None:
    """Add the command to the parser."""
    command = add_command(subparsers, "flops", run, "count the FLOPs of a run, and print the paper's table", TEXT)
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", metavar="C", help="a file, or the name of a ready-made config")
    source.add_argument("--paper", action="store_true", help="print the paper's table next to our count")
    option = command.add_argument
    option("--method", metavar="M", help="overrides mst.method")
    option(
        "--match-flops",
        metavar="C",
        help="for dense-short: config or folder of the run whose FLOPs to match (default: this config with mst)",
    )
    option(
        "--from",
        dest="grow_from",
        metavar="RUN",
        help="for expand, ligo and stack: the smaller run, whose FLOPs count too",
    )
    option("--set", action="append", default=[], metavar="K=V", help="override any key, repeatable")
    option("--ranks", type=int, metavar="N", help="ranks that share the batch, which matters if it is set per rank")
    option("--topology", action="store_true", help="also count topology steps, on a separate line")
    option("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the FLOPs of a config, or the paper's table."""
    if args.paper:
        if args.method or args.match_flops or args.grow_from or args.set or args.topology or args.ranks is not None:
            others = "--method, --match-flops, --from, --set, --ranks and --topology"
            raise UserError(f"--paper prints the paper's own runs: leave out {others}")
        found = _paper()
        print(json.dumps(found) if args.json else _paper_table(found))
        return 0
    from mst_scale.config import load
    from mst_scale.config.deepspeed import batch_shape
    from mst_scale.config.parallel import sizes_of
    from mst_scale.flops.budgets import shortened
    from mst_scale.flops.ledger import forecast

    if args.ranks is not None and args.ranks < 1:
        raise UserError(f"--ranks must be at least 1, not {args.ranks}")
    named = {"mst.like": args.match_flops, "mst.grow_from": args.grow_from}
    overrides = [*args.set, *(f"{key}={json.dumps(value)}" for key, value in named.items() if value)]
    experiment = load(args.config, overrides, args.method)
    sizes = sizes_of(experiment.deepspeed)
    replicas = sizes.data(args.ranks or sizes.model)
    if args.ranks is not None:
        batch_shape(experiment.deepspeed, replicas)  # raises if they cannot share the batch
    experiment = shortened(experiment, replicas)
    if not _names_a_model(args, experiment):
        m = experiment.model
        default = f"GPT-2 small ({m.n_layer} layers of width {m.n_embd}, context {m.seq_length:,})"
        print(f"mst: {args.config} has no model block: this counts the default, {default}", file=sys.stderr)
    found = _report(experiment, forecast(experiment, ranks=replicas), replicas, args)
    print(json.dumps(found) if args.json else _table(found))
    return 0


def _names_a_model(args: argparse.Namespace, experiment: Experiment) -> bool:
    from mst_scale.config import read

    stated = bool(read(args.config)[1].get("model")) or any(each.startswith("model.") for each in args.set)
    return stated or experiment.mst.method == "tiny"


# --- one config ---


def _report(experiment: Experiment, run: Forecast, replicas: int, args: argparse.Namespace) -> dict[str, Any]:
    from mst_scale.config.deepspeed import global_batch
    from mst_scale.flops.formulas import head_name, optimizer_flops
    from mst_scale.flops.ledger import forecast, sparse_matrices, tiny_flops, topology_flops

    sequences = global_batch(experiment.deepspeed, replicas)
    experiment = experiment.with_batch(sequences)
    tiny = tiny_flops(experiment, replicas)
    found: dict[str, Any] = {
        "config": args.config,
        "method": experiment.mst.method,
        "steps": run.steps,
        "sequences": sequences,
        "context": experiment.model.seq_length,
        "phases": [
            {
                "phase": phase.name,
                "start": phase.start,
                "stop": phase.stop,
                "sparsity": phase.sparsity,
                "attention": [pattern.label for pattern in phase.patterns],
                **_both(phase.flops, run.dense),
            }
            for phase in run.phases
        ],
        "mean": _both(run.mean, run.dense),
        "dense": _both(run.dense, run.dense),
        "tiny": _both(tiny, run.dense),
        "against_tiny": {a: run.mean[a].total / tiny[a].total for a in tiny},
        "total_flops": {a: run.steps * sequences * run.mean[a].total for a in run.mean},
        "optimizer_flops": run.steps * optimizer_flops(experiment.model, experiment.deepspeed),
        "dense_steps": {a: run.dense_steps(a) for a in run.mean},
        "dense_head": None,
        "topology": None,
        "grown": _grown(experiment, sequences),
        "ignored": IGNORED,
    }
    if head_name(experiment.model) in {m.name for m in sparse_matrices(experiment)}:
        found["dense_head"] = _both(forecast(experiment, dense_head=True, ranks=replicas).mean, run.dense)
    if args.topology:
        count, extra = topology_flops(experiment)
        found["topology"] = {
            "steps": count,
            "gflops": extra.total / 1e9,
            "reduction": {a: run.dense[a].total / (run.mean[a].total + extra.total) for a in run.mean},
        }
    return found


def _grown(experiment: Experiment, sequences: int) -> dict[str, Any] | None:
    """Return the cost of a grown model before its first step; without figures if no smaller run is given."""
    from mst_scale.config.check import check_growth
    from mst_scale.flops.budgets import before

    mst = experiment.mst
    if mst.growth is None:
        return None
    if mst.grow_from is None:
        return {"from": None, "steps": mst.growth.steps}
    check_growth(experiment, begun=False)
    cost = before(experiment, sequences)
    flops = {"run": cost.run, "growth": cost.growth, "total": cost.total}
    return {"from": str(cost.checkpoint), "step": cost.step, "steps": mst.growth.steps, **flops}


def _both(flops: dict[str, Flops], dense: dict[str, Flops]) -> dict[str, Any]:
    return {
        "gflops": {a: value.total / 1e9 for a, value in flops.items()},
        "reduction": {a: dense[a].total / value.total for a, value in flops.items()},
        "components": {a: {k: v / 1e9 for k, v in asdict(value).items()} for a, value in flops.items()},
    }


COMPONENTS = ("qkv", "scores", "reduce", "proj", "ffw1", "ffw2", "head")
COLUMNS = (
    "Columns: qkv and proj are the matrices of attention, scores its products of queries and keys, and reduce those of "
    "attention weights and values; ffw1 and ffw2 are the matrices of the MLP."
)
OPTIMIZER = "optimizer"  # a column if it is counted


def _table(found: dict[str, Any]) -> str:
    shown = COMPONENTS + ((OPTIMIZER,) if found["optimizer_flops"] else ())
    lines = [["phase", "steps", "sparsity", "attention", *shown, "paper", "÷", "causal", "÷"]]
    for phase in found["phases"]:
        steps = f"{phase['start']:,}–{phase['stop']:,}"
        lines.append(
            [phase["phase"], steps, f"{phase['sparsity']:.1%}", ", ".join(phase["attention"]), *_figures(phase, shown)]
        )
    lines.append(["whole run", f"{found['steps']:,}", "", "", *_figures(found["mean"], shown)])
    lines.append(["dense", "", "", "", *_figures(found["dense"], shown)])
    has_tiny = found["tiny"]["gflops"]["paper"] < found["dense"]["gflops"]["paper"]  # else nothing is saved against it
    if has_tiny:
        lines.append(["tiny, dense", "", "", "", *_figures(found["tiny"], shown)])
    mean, tiny = found["mean"]["reduction"], found["against_tiny"]
    total, dense_steps = found["total_flops"], found["dense_steps"]
    text = [
        f"{found['config']}, method {found['method']}: GFLOPs of one sequence of {found['context']:,} tokens, "
        "forward and backward",
        "",
        *align(lines, left=(0, 3)),
        "",
        f"{mean['paper']:.2f}× fewer FLOPs than dense (causal: {mean['causal']:.2f}×)"
        + (f"; {tiny['paper']:.3g} times those of the tiny model (causal: {tiny['causal']:.3g})." if has_tiny else "."),
    ]
    if found["dense_head"]:
        head = found["dense_head"]["reduction"]
        text.append(f"With a dense LM head it would be {head['paper']:.2f}× (causal: {head['causal']:.2f}×).")
    text += [
        f"The whole run: {found['steps']:,} steps × {found['sequences']:,} sequences = {format_flops(total['paper'])} "
        f"(causal: {format_flops(total['causal'])}).",
        f"The same FLOPs buy {dense_steps['paper']:,.0f} dense steps (causal: {dense_steps['causal']:,.0f}); "
        "--method dense-short --match-flops C trains the first number.",
    ]
    if found["optimizer_flops"]:
        text.append(
            f"Of these, {format_flops(found['optimizer_flops'])} are Muon's Newton-Schulz, on whole matrices once per "
            f"step, as in a dense run: {found['optimizer_flops'] / total['paper']:.1%}."
        )
    if found["topology"]:
        t, then = found["topology"], found["topology"]["reduction"]
        text.append(
            f"Topology: {t['steps']:,} steps with a dense backward pass of the matrices add {t['gflops']:.3g} G to the "
            f"mean step; the reduction is then {then['paper']:.2f}× (causal: {then['causal']:.2f}×)."
        )
    if found["grown"]:
        text.append(_format_growth(found["grown"], total))
    return "\n".join([*text, COLUMNS, found["ignored"]])


def _format_growth(grown: dict[str, Any], total: dict[str, float]) -> str:
    steps = f"{grown['steps']:,} steps that train the growth"
    if grown["from"] is None:
        more = f" and of {steps}" if grown["steps"] else ""
        return f"Not included: the FLOPs of the smaller run{more}; count them with --from RUN."
    more = f" and {format_flops(grown['growth']['paper'])} for {steps}" if grown["steps"] else ""
    sums = {a: total[a] + grown["total"][a] for a in total}
    return (
        f"Spent before its first step: {format_flops(grown['run']['paper'])} of {grown['from']}{more}; the ledger of "
        f"a run starts with them. In total: {format_flops(sums['paper'])} (causal: {format_flops(sums['causal'])})."
    )


def _figures(cost: dict[str, Any], shown: Sequence[str]) -> list[str]:
    parts = cost["components"]["paper"]
    figures = [_three_digits(parts[name]) for name in shown]
    for accounting in ("paper", "causal"):
        figures += [_three_digits(cost["gflops"][accounting]), f"{cost['reduction'][accounting]:.2f}"]
    return figures


def _three_digits(gflops: float) -> str:
    """Format with two decimals, or three digits below 1."""
    return f"{gflops:,.2f}" if gflops >= 1 else f"{gflops:.3g}"


# --- the paper's tables ---


def _paper() -> dict[str, Any]:
    from mst_scale.flops import paper_table

    bert, ours = paper_table.bert(), paper_table.rows()
    dense = ours["dense"]
    return {
        "rows": [
            {"method": method, "paper_name": label, "paper_gflops": printed, **_row(ours[method], dense)}
            for method, (label, printed) in paper_table.PRINTED.items()
        ],
        "misprint": paper_table.MISPRINT,
        "related": [
            {
                **{key: getattr(one, key) for key in ("name", "quoted", "model", "method", "why")},
                "reduction": None if run is None else run.reduction("paper"),
                "reduction_causal": None if run is None else run.reduction("causal"),
                "reduction_gpt2": None if small is None else small.reduction("paper"),
            }
            for one, run, small in paper_table.related()
        ],
        "readings": [
            {
                "warmup": reading.warmup,
                "restore": reading.restore,
                "attention_dense_from": reading.dense_from,
                "preset": reading.preset,
                **_row(reading.forecast, dense),
            }
            for reading in paper_table.readings()
        ],
        "dense_head": _row(paper_table.dense_head(), dense),
        "bert_base": {"dense_gflops": bert.dense["paper"].total / 1e9, **_row(bert, bert)},
        "ignored": IGNORED,
    }


def _row(run: Forecast, baseline: Forecast) -> dict[str, float]:
    """Return the FLOPs of a run, and its reductions compared with the dense model of `baseline`."""
    paper, causal = (run.mean[a].total for a in ("paper", "causal"))
    return {
        "gflops": paper / 1e9,
        "causal_gflops": causal / 1e9,
        "reduction": baseline.dense["paper"].total / paper,
        "reduction_causal": baseline.dense["causal"].total / causal,
    }


def _paper_table(found: dict[str, Any]) -> str:
    from mst_scale.flops.paper_table import PRINTED

    lines = [["method", "in the paper", "ours", "÷", "causal", "÷"]]
    for row in found["rows"]:
        lines.append([PRINTED[row["method"]][0], f"{row['paper_gflops']:.1f}", *_cells(row)])
    readings = [["warm-up", "restoration", "attention dense from", "ours", "÷", "causal", "÷"]]
    for row in found["readings"]:
        mark = " (preset)" if row["preset"] else ""
        readings.append([row["warmup"], row["restore"], row["attention_dense_from"] + mark, *_cells(row)])
    others = [["table 1", "as quoted", "counted", "causal", "GPT-2 small", "counted for", ""]]
    for row in found["related"]:
        keys = ("reduction", "reduction_causal", "reduction_gpt2")
        counted = ["–"] * len(keys) if row["reduction"] is None else [f"{row[key]:.2f}" for key in keys]
        others.append([row["name"], f"{row['quoted']:.1f}", *counted, row["model"], row["why"]])
    head, bert = found["dense_head"], found["bert_base"]
    return "\n".join(
        [
            "GFLOPs of one 1024-token sequence, forward and backward, averaged over 140,000 steps",
            "",
            *align(lines, left=(0,)),
            "",
            found["misprint"],
            "",
            "Reductions over dense training that the paper quotes for other methods, and our count of their runs:",
            *align(others, left=(0, 5, 6)),
            "",
            "MST under other readings of the schedule:",
            *align(readings, left=(0, 1, 2)),
            "",
            f"With a dense LM head, MST needs {head['gflops']:.1f} G: {head['reduction']:.2f}× fewer than dense, not "
            f"{found['rows'][-1]['reduction']:.2f}× (causal: {head['reduction_causal']:.2f}×).",
            f"BERT-base under the same recipe: {bert['gflops']:.1f} of {bert['dense_gflops']:.1f} G per 512-token "
            f"sequence, {bert['reduction']:.2f}× fewer.",
            found["ignored"],
        ]
    )


def _cells(row: dict[str, float]) -> list[str]:
    keys = ("gflops", "reduction", "causal_gflops", "reduction_causal")
    return [f"{row[key]:.2f}" for key in keys]
