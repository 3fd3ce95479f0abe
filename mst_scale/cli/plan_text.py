"""Prints a plan as text: a conclusion, then tables that fit 100 columns."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mst_scale.plan.answer import Plan
    from mst_scale.plan.recommend import Choice

GB = 1e9
CLOSE = 0.03  # a phase must be slower than dense by this much to be called slower
SHOWN = 5  # ways to share a model


def format_plan(answer: Plan) -> str:
    """Format the whole plan."""
    parts = (_headline, _conclusion, _layouts, _memory, _links, _phases, _sides, _topology, _assumptions)
    return "\n\n".join(text for part in parts if (text := part(answer)))


def _headline(answer: Plan) -> str:
    """The setting that saves the most time, or that none does; empty for a dense run."""
    from mst_scale.plan.answer import overrides

    if not answer.sparse_parameters:
        return ""
    best, ranks = answer.best, answer.setting.ranks
    days, dense = (f"{seconds / 86400:,.3g}" for seconds in (best.run_seconds, best.dense_seconds))
    needed, now = (f"{held.needed / GB:.1f}" for held in (best.memory, answer.memory))
    memory = f"{needed} GB per GPU" + (f" instead of {now}" if needed != now else ", unchanged")
    on = f"on {ranks:,} GPU{'s' if ranks > 1 else ''}"
    run = f"{days} days instead of {dense} for a dense run ({_times(best.speedup)}) {on}"
    if not best.gains:
        return _wrap(
            f"No gain in time is expected from sparsity here: {run}; memory: {memory}. The FLOPs saved are below."
        )
    masks = "the masks of this config" if best.side is None else f"masks of {best.side} × {best.side} blocks"
    lines = [_wrap(f"Best setting: {masks}: {run}; memory: {memory}. Expected, not measured.")]
    lines += [f"  {word}" for word in (*overrides(best.setting, answer.given), *best.overrides)]
    if best.side is not None:
        own = _times(answer.dense_hours / answer.expected_hours)
        lines.append(f"  Blocks increase the loss a little (docs/does-it-work.md). The plan without them ({own}):")
    return "\n".join(lines)


def _conclusion(answer: Plan) -> str:
    from mst_scale.plan.answer import describe_setting, overrides

    s, t, gpu, best = answer.setting, answer.seconds, answer.machine.gpu, answer.recommended
    micros = f"{s.accumulation} micro-batch{'es' if s.accumulation > 1 else ''}"
    lines = [
        f"It fits: {answer.memory.needed / GB:.1f} of {gpu.memory / GB:.0f} GB per GPU; a dense step takes about "
        f"{_duration(t.total)}, a dense run {answer.dense_hours:,.0f} GPU-hours."
    ]
    if answer.sparse_parameters:
        sparse, hours = answer.sparsest, answer.expected_hours
        lines.append(
            f"Expected, not measured: {_duration(sparse.expected_seconds)} per step at {100 * sparse.sparsity:.0f} % "
            f"sparsity ({_times(sparse.dense_seconds / sparse.expected_seconds)}), "
            f"{hours / s.ranks / 24:,.3g} days for the run ({_times(answer.dense_hours / hours)})."
        )
    lines += [
        f"{answer.parameters / 1e9:.3g} B parameters ({answer.sparse_parameters / 1e9:.3g} B sparse), "
        f"{answer.tokens / 1e9:,.4g} B tokens in {answer.steps:,} steps of {s.batch:,} sequences",
        f"{s.ranks:,} × {gpu.name}: {describe_setting(s)}, {micros} per step, {s.precision}",
    ]
    if more := answer.newton_schulz_flops:
        lines.append(
            "Memory and times assume Adam: Muon keeps 4 bytes less per weight of its matrices, and needs\n"
            f"  {more / 1e12:,.3g} TFLOPs more per step over all GPUs (Newton-Schulz)"
        )
    if answer.given.sizes == s.sizes and answer.given != s:
        lines.append(
            f"the config's micro-batch of {answer.given.micro} does not divide {s.batch:,} sequences on these GPUs: "
            f"{' '.join(overrides(s, answer.given))}"
        )
    if best.setting == s:
        lines.append("recommended layout: this configuration")
        lines += [f"  {word}" for word in overrides(s, answer.given) if answer.given.sizes != s.sizes]
    else:
        needed = f"{best.memory.needed / GB:.1f} GB, {_duration(best.seconds.total)} per step"
        lines.append(f"recommended layout: {describe_setting(best.setting)} ({needed})")
        lines += [f"  {word}" for word in overrides(best.setting, answer.given)]
    return "\n".join(lines)


def _layouts(answer: Plan) -> str:
    """The fastest ways to share the model, and the reasons for the recommended one."""
    from mst_scale.plan.recommend import describe_layout

    if answer.setting.ranks == 1:
        return ""
    rows = [["shared by", "ZeRO", "micro", "recompute", "GB", "sharing", "of ZeRO", "bubble", "step", ""]]
    for choice in answer.layouts[:SHOWN]:
        s, t = choice.setting, choice.seconds
        waits = (t.sharing, t.exposed - t.sharing, t.bubble)
        rows.append([
            describe_layout(s), str(s.stage), f"{s.micro} × {s.accumulation}", "yes" if s.recompute else "no",
            f"{choice.memory.needed / GB:.1f}", *(_duration(x) if x else "–" for x in waits), _duration(t.total),
            "*" if s.sizes == answer.recommended.setting.sizes else "",
        ])  # fmt: skip
    more = len(answer.layouts) - SHOWN
    note = "* recommended; sharing: between GPUs that share the model; of ZeRO: not hidden behind backward"
    note += f"; {more} more in --json" if more > 0 else ""
    return "\n".join([*_aligned(rows), _wrap(note), *map(_wrap, answer.why)])


def _memory(answer: Plan) -> str:
    head = "GB at ZeRO-|weights|grads|optim.|masks|activ.|buffers|needed|host|step|fits"
    rows = [head.split("|"), *(_memory_row(choice, answer) for choice in answer.stages)]
    without, with_it = (f"{part.total / GB:.1f} ({part.kept / GB:.1f} kept)" for part in answer.activations.values())
    lines = [
        *_aligned(rows),
        f"* this configuration, {'with' if answer.setting.recompute else 'without'} activation checkpointing",
        f"GB of activations without checkpointing: {without}, with it: {with_it}",
    ]
    if answer.setting.separate_accumulation:
        precision = answer.setting.precision
        lines.append(f"stages 0 and 1 accumulate gradients in {precision}: DeepSpeed or masks allow no other type")
    return "\n".join(lines)


def _memory_row(choice: Choice, answer: Plan) -> list[str]:
    s, m = choice.setting, choice.memory
    where = {"none": "", "optimizer": " + host opt.", "optimizer + parameters": " + host all"}[s.offload]
    fits = "yes" if m.fits(answer.machine.gpu) else "no"
    parts = (m.weights, m.gradients, m.optimizer, m.masks, m.activations.total, max(m.buffers, 0), m.needed)
    sizes = [f"{x / GB:.1f}" for x in (*parts, m.host + m.host_step)]
    return [f"{s.stage}{where}", *sizes, _duration(choice.seconds.total), fits + (" *" if s == answer.setting else "")]


def _links(answer: Plan) -> str:
    """What a GPU sends."""
    if not answer.links:
        return ""
    rows = [["sent for", "GPUs", "over", "calls", "GB per GPU", "time", ""]]
    for x in answer.links:
        rows.append([x.shared, f"{x.ranks:,}", x.over, f"{x.calls:,}", f"{x.sent / GB:,.1f}", _duration(x.seconds), ""])
    return "\n".join(_aligned(rows))


def _phases(answer: Plan) -> str:
    t = answer.seconds
    parts = {"products": t.products, "attention": t.attention, "element-wise": t.elementwise}
    parts["optimizer"] = t.optimizer + t.host
    lines = [
        f"a dense step: {', '.join(f'{name} {_duration(value)}' for name, value in parts.items() if value)}",
        f"  communication {_duration(t.communication)}, {_duration(t.communication - t.exposed)} of it hidden behind "
        f"backward; MFU {100 * answer.mfu:.0f} %",
    ]
    if not answer.sparse_parameters:
        return "\n".join(lines)
    rows = [["phase", "steps", "sparse", "FLOPs", "dense step", "expected", "not below", "GPU-hours", "expected", ""]]
    for p in answer.phases:
        hours = p.steps * answer.setting.ranks / 3600
        rows.append([
            p.name, f"{p.steps:,}", f"{100 * p.sparsity:.0f} %", f"{100 * p.flops:.0f} %", _duration(p.dense_seconds),
            _duration(p.expected_seconds), _duration(p.best_seconds), f"{hours * p.dense_seconds:,.0f}",
            f"{hours * p.expected_seconds:,.0f}", "",
        ])  # fmt: skip
    rows.append([
        "run", f"{answer.steps:,}", "", f"{100 * answer.flops:.0f} %", "", "", "", f"{answer.dense_hours:,.0f}",
        f"{answer.expected_hours:,.0f}", "",
    ])  # fmt: skip
    lines += _aligned(rows)
    speedup = _times(answer.dense_hours / answer.expected_hours)
    lines.append(f"expected, not measured: {speedup} of the dense run's time, by a roofline of the kernels.")
    slower = [p.name for p in answer.phases if p.expected_seconds > (1 + CLOSE) * p.dense_seconds]
    if slower:
        lines.append(f"{', '.join(slower)}: blocks are expected to be slower than dense products there;")
        lines.append("  mst.compute.backend=auto uses them where `mst bench linear --tune` has measured them faster")
    return "\n".join([
        *lines,
        f"FLOPs ÷{1 / answer.flops:.2f} in the causal accounting.",
        f"Wall clock: {answer.wall_clock}.",
        "not below: a lower bound, if attention took only its share of the pairs (not measured on GPUs).",
    ])  # fmt: skip


def _sides(answer: Plan) -> str:
    """What the sparsest phase would gain with blocks of each side."""
    found = answer.sides
    if not found:
        return ""
    rows = [
        ["blocks of", *(str(x.side) if x.side > 1 else "single weights" for x in found), ""],
        ["a step", *(_times(x.speedup) for x in found), ""],
        ["its products", *(_times(x.products) for x in found), ""],
        ["bound by", *(next(iter(x.decides), "masked dense") for x in found), ""],
    ]
    title = f"expected, not measured: a dense step against one at {100 * answer.sparsest.sparsity:.0f} % sparsity"
    lines = [title, *_aligned(rows)]
    if answer.experiment.mst.topology.granularity != "channel":  # channels are chosen instead of blocks
        side = answer.best.side or 16
        lines.append(f"to choose: --set mst.compute.backend=block --set mst.topology.granularity.block={side}")
    return "\n".join(lines)


def _topology(answer: Plan) -> str:
    t = answer.topology
    if t is None:
        return ""
    rows = [
        ["ranks", *(f"{ranks:,}" for ranks in t.seconds), ""],
        ["time", *(_duration(seconds) for seconds in t.seconds.values()), ""],
    ]
    masks = f" and {t.masks / 1e6:,.1f} MB of masks" if t.masks else ""
    lines = [
        f"topology step {t.step:,} sends {t.payload / 1e3:,.0f} kB in {t.all_reduces} all-reduces{masks}: "
        f"{_duration(t.here)} on {answer.setting.ranks:,} ranks",
        f"  {t.rounds} of them depend on the weights, and their number is assumed; a drift check sends "
        f"{t.drift_payload / 1e3:,.1f} kB",
    ]
    if t.reads_seconds:
        read = "weights and gradients" if t.reads_gradients else "weights"
        lines.append(f"  its compute, not measured: at least {_duration(t.reads_seconds)} to read {read}")
    else:
        lines.append("  nothing is ranked: no weight or gradient is read")
    if t.dense_gradient_seconds:
        lines.append(f"  at least {_duration(t.dense_gradient_seconds)} for the weight gradients of inactive weights")
    lines.append(
        f"  {t.in_run:,} in the run, at least {_duration(t.run_seconds)} in all, in addition to the times above"
    )
    return "\n".join([*lines, *_aligned(rows)])


def _assumptions(answer: Plan) -> str:
    from mst_scale.plan.gpus import MEASURED

    gpu, latency = answer.machine.gpu, answer.machine.latency
    shares = ", ".join(f"{name} {value}" for name, value in asdict(answer.machine.efficiency).items())
    origin = "fitted to measurements" if gpu.name in MEASURED else "assumed"
    return "\n".join([
        _wrap(
            f"share of peaks, {origin}: {shares} (--efficiency); narrow is of matmul, for blocks of 16; the L2 cache "
            f"reads {gpu.l2 / 1e12:.3g} TB/s"
        ),
        f"assumed latencies: {1e6 * latency.inside:.0f} µs per hop in a node, {1e6 * latency.between:.0f} µs between "
        f"nodes, {1e6 * latency.launch:.0f} µs per call, {1e6 * latency.kernel:.0f} µs per kernel",
        _wrap(f"peaks: {gpu.sources}"),
    ])  # fmt: skip


def _duration(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _times(speedup: float) -> str:
    return f"÷{speedup:.2f}"


def _wrap(sentence: str) -> str:
    return "\n".join(textwrap.wrap(sentence, 98, subsequent_indent="  "))


def _aligned(rows: list[list[str]]) -> list[str]:
    """Align the first column left, numbers right, and leave the last column as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([
            row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:-1], widths[1:-1], strict=True)), row[-1],
        ]).rstrip()
        for row in rows
    ]  # fmt: skip
