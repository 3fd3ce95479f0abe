"""`mst plan`: says what memory, time and communication a run on N GPUs will take, before it is started."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mst_scale.plan.answer import Plan
    from mst_scale.plan.recommend import Choice

ABOUT = """\
Memory a GPU by part at every ZeRO stage, the time of a step and of every phase, what a topology step sends on 1 to
16,384 ranks, and the configuration to run with. All GPUs are data parallel.

Memory and bytes are compared with real DeepSpeed runs on 2 ranks in tests/plan/. Times are a roofline: peaks of data
sheets and assumed efficiencies, which small models fall short of; --efficiency replaces them by your own. Nothing that
has not been measured is promised: masked dense layers save FLOPs only, and bounds are called bounds. --json prints
everything."""

EXAMPLES = """\
examples:
  mst plan --config gpt3_13b --gpus 64 --gpu a100-80gb
  mst plan --config gpt3_175b --gpus 512 --gpu h100-80gb --tokens 300B --json
  mst plan --config gpt2_small --gpus 4 --gpu a100-40gb --efficiency matmul=0.5
"""
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
GB = 1e9


def add(subparsers: Any) -> None:
    verb = subparsers.add_parser(
        "plan",
        help="memory, time and configuration on any number of GPUs",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("--config", required=True, metavar="C", help="the experiment: a file, or a ready config by name")
    verb.add_argument("--gpus", required=True, type=int, metavar="N", help="how many")
    verb.add_argument(
        "--gpu", default="a100-80gb", metavar="NAME", help="a100-40gb, a100-80gb (default), h100-80gb, h200"
    )
    verb.add_argument("--nodes", type=int, metavar="N", help="that hold them (default: full nodes of 8)")
    verb.add_argument("--tokens", metavar="T", help="300B, 9e9: length of the run, instead of training.steps")
    verb.add_argument("--method", metavar="M", help="dense, mst, rigl, …: overrides mst.method")
    verb.add_argument("--set", action="append", default=[], metavar="K=V", help="override any key, repeatable")
    verb.add_argument(
        "--efficiency", action="append", default=[], metavar="K=V", help="of a peak: matmul=0.5, repeatable"
    )
    verb.add_argument("--json", action="store_true", help="print one JSON object")
    verb.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from mst_scale.config import load
    from mst_scale.config.check import check
    from mst_scale.costs.ledger import shortened
    from mst_scale.plan.answer import plan
    from mst_scale.plan.gpus import machine

    if args.gpus < 1:
        raise ValueError(f"--gpus must be at least 1, not {args.gpus}")
    experiment = shortened(load(args.config, args.set, args.method), args.gpus)
    check(experiment)
    tokens = None if args.tokens is None else count(args.tokens)
    answer = plan(experiment, args.gpus, machine(args.gpu, args.gpus, args.nodes, tuple(args.efficiency)), tokens)
    print(json.dumps(answer.to_dict()) if args.json else text(answer))
    return 0


def count(words: str) -> float:
    """300B, 1.5T, 9e9 or 1000000."""
    unit = UNITS.get(words[-1:].upper(), 1.0)
    try:
        value = float(words[:-1] if unit > 1 else words) * unit
    except ValueError:
        value = 0.0
    if not 1 <= value < 1e18:
        raise ValueError(f"--tokens {words}: write a number of tokens such as 300B, 1.5T or 9e9")
    return value


def text(answer: Plan) -> str:
    """A conclusion, then tables that fit 100 columns."""
    parts = [conclusion(answer), memory_table(answer), phase_table(answer), topology_table(answer), assumptions(answer)]
    return "\n\n".join(part for part in parts if part)


def conclusion(answer: Plan) -> str:
    from mst_scale.plan.answer import overrides, stated

    s, t, gpu = answer.setting, answer.seconds, answer.machine.gpu
    micros = f"{s.accumulation} micro-batch{'es' if s.accumulation > 1 else ''}"
    lines = [
        f"It fits: {answer.memory.needed / GB:.1f} of {gpu.memory / GB:.0f} GB a GPU; a dense step takes about "
        f"{duration(t.total)}, a dense run {answer.dense_hours:,.0f} GPU-hours.",
        f"{answer.parameters / 1e9:.3g} B parameters ({answer.sparse_parameters / 1e9:.3g} B sparse), "
        f"{answer.tokens / 1e9:,.4g} B tokens in {answer.steps:,} steps of {s.batch:,} sequences",
        f"{s.ranks:,} × {gpu.name}: {stated(s)}, {micros} a step, {s.precision}",
    ]
    if answer.given != s:
        lines.append(
            f"the config's micro-batch of {answer.given.micro} does not share {s.batch:,} sequences so: "
            f"{' '.join(overrides(s, answer.given))}"
        )
    best = answer.recommended
    if best.setting == s:
        lines.append("recommended: this configuration")
    else:
        needed = f"{best.memory.needed / GB:.1f} GB, {duration(best.seconds.total)} a step"
        lines.append(f"recommended: {stated(best.setting)} ({needed})")
        lines += [f"  {word}" for word in overrides(best.setting, answer.given)]
    return "\n".join(lines)


def memory_table(answer: Plan) -> str:
    rows = [
        [
            "GB at ZeRO-",
            "weights",
            "grads",
            "optim.",
            "masks",
            "activ.",
            "buffers",
            "needed",
            "host",
            "step",
            "fits",
        ],
        *(_memory_row(choice, answer) for choice in answer.stages),
    ]
    without, again = (
        f"{(part['kept'] + part['working']) / GB:.1f} ({part['kept'] / GB:.1f} kept)"
        for part in answer.activations.values()
    )
    lines = [
        *aligned(rows),
        f"* this configuration, {'with' if answer.setting.recompute else 'without'} activation checkpointing",
        f"GB of activations without checkpointing: {without}, with it: {again}",
    ]
    if answer.setting.separate_accumulation:
        lines.append(
            f"stages 0 and 1 add gradients up in {answer.setting.precision}: DeepSpeed or masks allow no other type"
        )
    return "\n".join(lines)


def _memory_row(choice: Choice, answer: Plan) -> list[str]:
    s, m = choice.setting, choice.memory
    where = {"none": "", "optimizer": " + host opt.", "optimizer + parameters": " + host all"}[s.offload]
    fits = "yes" if m.fits(answer.machine.gpu) else "no"
    sizes = (
        m.weights,
        m.gradients,
        m.optimizer,
        m.masks,
        m.activations.total,
        max(m.buffers, 0),
        m.needed,
        m.host + m.host_step,
    )
    this = " *" if s == answer.setting else ""
    return [f"{s.stage}{where}", *(f"{x / GB:.1f}" for x in sizes), duration(choice.seconds.total), fits + this]


def phase_table(answer: Plan) -> str:
    t = answer.seconds
    split = ", ".join(
        f"{name} {duration(value)}"
        for name, value in (
            ("products", t.products), ("attention", t.attention), ("element-wise", t.elementwise),
            ("optimizer", t.optimizer + t.host),
        )
        if value
    )  # fmt: skip
    hidden = t.communication - t.exposed
    lines = [
        f"a dense step: {split}",
        f"  communication {duration(t.communication)}, {duration(hidden)} of it hidden behind backward; "
        f"MFU {100 * answer.mfu:.0f} %",
    ]
    if not answer.sparse_parameters:
        return "\n".join(lines)
    rows = [["phase", "steps", "sparse", "FLOPs", "dense step", "GPU-hours", "not below", ""]]
    for p in answer.phases:
        hours = p.steps * answer.setting.ranks / 3600
        rows.append([
            p.name, f"{p.steps:,}", f"{100 * p.sparsity:.0f} %", f"{100 * p.flops:.0f} %", duration(p.dense_seconds),
            f"{hours * p.dense_seconds:,.0f}", f"{hours * p.best_seconds:,.0f}", "",
        ])  # fmt: skip
    rows.append([
        "run", f"{answer.steps:,}", "", f"{100 * answer.flops:.0f} %", "", f"{answer.dense_hours:,.0f}",
        f"{answer.best_hours:,.0f}", "",
    ])  # fmt: skip
    return "\n".join([
        *lines, *aligned(rows),
        f"FLOPs ÷{1 / answer.flops:.2f} in the causal accounting.",
        f"Wall clock: {answer.wall_clock}.",
        "not below: a bound, if attention took no more than its share of the pairs (not measured on GPUs).",
    ])  # fmt: skip


def topology_table(answer: Plan) -> str:
    t = answer.topology
    if t is None:
        return ""
    ranks, times = zip(*t.seconds.items(), strict=True)
    rows = [["ranks", *(f"{r:,}" for r in ranks), ""], ["time", *map(duration, times), ""]]
    masks = f" and {t.masks / 1e6:,.1f} MB of masks" if t.masks else ""
    gradients = f"{duration(t.dense_gradient_seconds)} or more for weight gradients of what is masked"
    return "\n".join([
        f"topology step {t.step:,} sends {t.payload / 1e3:,.0f} kB in {t.all_reduces} all-reduces{masks}: "
        f"{duration(t.here)} on {answer.setting.ranks:,} ranks",
        f"  {t.rounds} of them, an assumed number, depend on the weights; a drift check sends "
        f"{t.drift_payload / 1e3:,.1f} kB",
        f"  its compute, a bound, not measured: {duration(t.reads_seconds)} or more to read weights and gradients",
        *([f"  {gradients}"] if t.dense_gradient_seconds else []),
        *aligned(rows),
    ])  # fmt: skip


def assumptions(answer: Plan) -> str:
    e, a = answer.machine.efficiency, answer.machine.latency
    shares = f"matmul {e.matmul}, attention {e.attention}, memory {e.memory}, network {e.network}, host {e.host}"
    return (
        f"assumed of peaks: {shares} (--efficiency)\n"
        f"assumed latencies: {1e6 * a.inside:.0f} µs a hop in a node, {1e6 * a.between:.0f} µs between nodes, "
        f"{1e6 * a.launch:.0f} µs a call\n"
        + "\n".join(textwrap.wrap(f"peaks: {answer.machine.gpu.sources}", 98, subsequent_indent="  "))
    )


def duration(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.3g} ms"


def aligned(rows: list[list[str]]) -> list[str]:
    """The first column to the left, the last as it is, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([
            row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:-1], widths[1:-1], strict=True)), row[-1],
        ]).rstrip()
        for row in rows
    ]  # fmt: skip
