"""Formats a plan as text: a conclusion, then tables that fit 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from mst_scale.cli import align
from mst_scale.plan.answer import Plan, describe_setting, overrides
from mst_scale.plan.by_phase import PhaseOptions
from mst_scale.plan.gpus import MEASURED
from mst_scale.plan.recommend import Choice, describe_layout

GB = 1e9
CLOSE = 0.03  # a phase must be slower than dense by this much to be called slower
SHOWN = 5  # ways to share a model


def format_plan(plan: Plan, remarks: Sequence[str] = ()) -> str:
    """Format the whole plan; `remarks` are sentences about the loss, which follow the conclusion."""
    before, after = (_headline, _conclusion), (_layouts, _memory, _phases, _sides, _topology, _assumptions)
    of_loss = "\n".join(_wrap(f"{remark[0].upper()}{remark[1:]}") for remark in remarks)
    texts = [*(part(plan) for part in before), of_loss, *(part(plan) for part in after)]
    return "\n\n".join(text for text in texts if text)


def format_phases(phases: Sequence[PhaseOptions], gpus: int, gpu: str) -> str:
    """Format the fewest GPUs of each phase, the number with the fewest GPU-hours, and all GPUs."""
    each = ["GB", "days", "GPU-h"]
    rows = [["phase", "steps", "storage", "fewest", *each, "best", *each, f"{gpus:,}:", "days", "GPU-h"]]
    totals = [0.0] * 6
    for phase in phases:
        row = [phase.name, f"{phase.steps:,}", "compact" if phase.compact else "dense"]
        for i, option in enumerate((phase.fewest, phase.best, phase.options[-1])):
            days, hours = option.hours / 24, option.gpu_hours
            where = [f"{option.gpus:,}", f"{option.choice.memory.needed / GB:.1f}"] if i < 2 else [""]
            row += [*where, f"{days:,.3g}", f"{hours:,.0f}"]
            totals[2 * i : 2 * i + 2] = totals[2 * i] + days, totals[2 * i + 1] + hours
        rows.append(row)
    run = ["run", f"{sum(phase.steps for phase in phases):,}", ""]
    for i in range(3):
        run += [*([""] * (2 if i < 2 else 1)), f"{totals[2 * i]:,.3g}", f"{totals[2 * i + 1]:,.0f}"]
    rows.append(run)
    about = (
        f"Each phase on up to {gpus:,} × {gpu}, at the same global batch and in the setting recommended for that many "
        "GPUs. fewest: the smallest number with enough memory; best: the largest number whose GPU-hours (GPU-h) are "
        "within 3 % of the minimum. Times are expected, not measured, and do not include saving and restarting between "
        "phases. --json prints the settings."
    )
    return "\n".join([*align(rows, [0, 2]), _wrap(about)])


def _headline(plan: Plan) -> str:
    """Describe the setting that saves the most time, or say that none does; empty for a dense run."""
    if not plan.sparse_parameters:
        return ""
    best, ranks = plan.best, plan.setting.ranks
    days, dense = (f"{seconds / 86400:,.3g}" for seconds in (best.run_seconds, best.dense_seconds))
    needed, now = (f"{memory.needed / GB:.1f}" for memory in (best.memory, plan.memory))
    memory = f"{needed} GB per GPU" + (f" instead of {now}" if needed != now else ", unchanged")
    on = f"on {ranks:,} GPU{'s' if ranks > 1 else ''}"
    run = f"{days} days instead of {dense} for a dense run ({_times(best.speedup)}) {on}"
    if not best.gains:
        return _wrap(
            f"No gain in time is expected from sparsity here: {run}; memory: {memory}. The FLOPs saved are below."
        )
    masks = "the masks of this config" if best.side is None else f"masks of {best.side} × {best.side} blocks"
    lines = [_wrap(f"Best setting: {masks}: {run}; memory: {memory}. Expected, not measured.")]
    lines += [f"  {word}" for word in (*overrides(best.setting, plan.given), *best.overrides)]
    if best.side is not None:
        own = _times(plan.dense_hours / plan.expected_hours)
        lines.append(f"  Blocks increase the loss a little (docs/does-it-work.md). The plan without them ({own}):")
    return "\n".join(lines)


def _conclusion(plan: Plan) -> str:
    s, best = plan.setting, plan.recommended
    lines = [
        f"It fits: {plan.memory.needed / GB:.1f} of {plan.machine.gpu.memory / GB:.0f} GB per GPU; a dense step takes "
        f"about {_duration(plan.seconds.total)}, a dense run {plan.dense_hours:,.0f} GPU-hours."
    ]
    if plan.sparse_parameters:
        sparse, hours = plan.sparsest, plan.expected_hours
        lines.append(
            f"Expected, not measured: {_duration(sparse.expected_seconds)} per step at {100 * sparse.sparsity:.0f} % "
            f"sparsity ({_times(sparse.dense_seconds / sparse.expected_seconds)}), "
            f"{hours / s.ranks / 24:,.3g} days for the run ({_times(plan.dense_hours / hours)})."
        )
    lines += [
        f"{plan.parameters / 1e9:.3g} B parameters ({plan.sparse_parameters / 1e9:.3g} B sparse), "
        f"{plan.tokens / 1e9:,.4g} B tokens in {plan.steps:,} steps of {s.batch:,} sequences",
        f"{s.ranks:,} × {plan.machine.gpu.name}: {describe_setting(s)}, "
        f"{s.accumulation} micro-batch{'es' if s.accumulation > 1 else ''} per step, {s.precision}",
    ]
    if more := plan.newton_schulz_flops:
        lines.append(
            "Memory and times assume Adam: Muon keeps 4 bytes less per weight of its matrices, and needs\n"
            f"  {more / 1e12:,.3g} TFLOPs more per step over all GPUs (Newton-Schulz)"
        )
    storage = plan.storage
    if storage["compact_phases"]:
        lines.append(
            _wrap(f"compact storage in the phases {', '.join(storage['compact_phases'])}, if pretrain runs it")
        )
    elif plan.experiment.mst.compute.compact == "auto" and plan.sparse_parameters:
        lines.append(f"dense storage of sparse layers: {storage['why_dense']}")
    elif plan.could_be_compact:
        lines.append(
            "dense storage of sparse layers; with --set mst.compute.compact=auto, pretrain stores only active\n"
            "  weights in long phases of one sparsity (docs/compact.md)"
        )
    if plan.given.sizes == s.sizes and plan.given != s:
        lines.append(
            f"the config's micro-batch of {plan.given.micro} does not divide {s.batch:,} sequences on these GPUs: "
            f"{' '.join(overrides(s, plan.given))}"
        )
    if best.setting == s:
        lines.append("recommended layout: this configuration")
        lines += [f"  {word}" for word in overrides(s, plan.given) if plan.given.sizes != s.sizes]
    else:
        needed = f"{best.memory.needed / GB:.1f} GB, {_duration(best.seconds.total)} per step"
        lines.append(f"recommended layout: {describe_setting(best.setting)} ({needed})")
        lines += [f"  {word}" for word in overrides(best.setting, plan.given)]
    return "\n".join(lines)


def _layouts(plan: Plan) -> str:
    """Format the fastest ways to share the model."""
    if plan.setting.ranks == 1:
        return ""
    rows = [["shared by", "ZeRO", "micro", "recompute", "GB", "sharing", "of ZeRO", "bubble", "step", ""]]
    for choice in plan.layouts[:SHOWN]:
        s, t = choice.setting, choice.seconds
        waits = [_duration(x) if x else "–" for x in (t.sharing, t.exposed - t.sharing, t.bubble)]
        recommended = "*" if s.sizes == plan.recommended.setting.sizes else ""
        rows.append([
            describe_layout(s), str(s.stage), f"{s.micro} × {s.accumulation}", "yes" if s.recompute else "no",
            f"{choice.memory.needed / GB:.1f}", *waits, _duration(t.total), recommended,
        ])  # fmt: skip
    more = len(plan.layouts) - SHOWN
    note = "* recommended; sharing: between GPUs that share the model; of ZeRO: not hidden behind backward"
    note += f"; {more} more in --json" if more > 0 else ""
    return "\n".join([*_table(rows), _wrap(note), *map(_wrap, plan.why)])


def _memory(plan: Plan) -> str:
    head = "GB at ZeRO-|weights|grads|optim.|masks|activ.|buffers|needed|host|step|fits"
    lines = [
        *_table([head.split("|"), *(_memory_row(choice, plan) for choice in plan.stages)]),
        f"* this configuration, {'with' if plan.setting.recompute else 'without'} activation checkpointing",
    ]
    if copied := plan.memory.snapshot:
        lines.append(f"up to {copied / GB:.1f} GB of host memory per GPU hold a checkpoint until it is written")
    if kept := plan.kept_copies:
        gpu = plan.machine.gpu
        there = min(plan.setting.ranks, gpu.per_node) * gpu.host_memory
        lines.append(
            f"up to {kept / GB:.1f} of {there / GB:.0f} GB of host memory per node hold copies (training.memory_every)"
        )
    if plan.setting.separate_accumulation:
        precision = plan.setting.precision
        lines.append(f"stages 0 and 1 accumulate gradients in {precision}: DeepSpeed or masks allow no other type")
    return "\n".join(lines)


def _memory_row(choice: Choice, plan: Plan) -> list[str]:
    s, m = choice.setting, choice.memory
    where = {"none": "", "optimizer": " + host opt.", "optimizer + parameters": " + host all"}[s.offload]
    fits = "yes" if m.fits(plan.machine.gpu) else "no"
    parts = (m.weights, m.gradients, m.optimizer, m.masks, m.activations.total, max(m.buffers, 0), m.needed)
    sizes = [f"{x / GB:.1f}" for x in (*parts, m.host + m.host_step)]
    return [f"{s.stage}{where}", *sizes, _duration(choice.seconds.total), fits + (" *" if s == plan.setting else "")]


def _phases(plan: Plan) -> str:
    t = plan.seconds
    parts = {"products": t.products, "attention": t.attention, "element-wise": t.elementwise}
    parts["optimizer"] = t.optimizer + t.host
    lines = [
        f"a dense step: {', '.join(f'{name} {_duration(value)}' for name, value in parts.items() if value)}",
        f"  communication {_duration(t.communication)}, {_duration(t.communication - t.exposed)} of it hidden behind "
        f"backward; MFU {100 * plan.mfu:.0f} %",
    ]
    if plan.sent:
        sent = ", ".join(f"{size / GB:,.1f} GB ({axis})" for axis, size in plan.sent.items())
        lines.append(f"  each GPU sends {sent}")
    if not plan.sparse_parameters:
        return "\n".join(lines)
    rows = [["phase", "steps", "sparse", "FLOPs", "dense step", "expected", "GPU-hours", "expected", "GB", "sends"]]
    for p in plan.phases:
        hours = p.steps * plan.setting.ranks / 3600
        rows.append([
            p.name, f"{p.steps:,}", f"{100 * p.sparsity:.0f} %", f"{100 * p.flops:.0f} %", _duration(p.dense_seconds),
            _duration(p.expected_seconds), f"{hours * p.dense_seconds:,.0f}", f"{hours * p.expected_seconds:,.0f}",
            f"{p.memory_bytes / GB:.1f}", f"{p.sent_bytes / GB:,.3g} GB",
        ])  # fmt: skip
    of_run = [f"{plan.steps:,}", "", f"{100 * plan.flops:.0f} %", "", ""]
    rows.append(["run", *of_run, f"{plan.dense_hours:,.0f}", f"{plan.expected_hours:,.0f}", "", ""])
    lines += align(rows, [0])
    speedup = _times(plan.dense_hours / plan.expected_hours)
    lines.append(f"expected, not measured: {speedup} of the dense run's time, by a roofline of the kernels;")
    lines.append(f"  FLOPs ÷{1 / plan.flops:.2f} in the causal accounting")
    if not plan.skips_products:
        lines.append("masked dense layers save FLOPs only: their products take as long as dense ones")
    slower = [p.name for p in plan.phases if p.expected_seconds > (1 + CLOSE) * p.dense_seconds]
    if slower:
        names = ", ".join(slower)
        if isinstance(plan.experiment.mst.topology.granularity, str):
            lines.append(f"{names}: expected to be slower than dense, because sparse attention is at this length")
        else:
            lines.append(f"{names}: blocks are expected to be slower than dense products there;")
            lines.append(
                "  mst.compute.backend=auto uses them where `mst bench linear --tune` has measured them faster"
            )
    return "\n".join(lines)


def _sides(plan: Plan) -> str:
    """Format what the sparsest phase would gain with blocks of each side."""
    if not plan.sides:
        return ""
    rows = [
        ["blocks of", *(str(x.side) if x.side > 1 else "single weights" for x in plan.sides)],
        ["a step", *(_times(x.speedup) for x in plan.sides)],
        ["its products", *(_times(x.products) for x in plan.sides)],
    ]
    title = f"expected, not measured: a dense step against one at {100 * plan.sparsest.sparsity:.0f} % sparsity"
    lines = [title, *align(rows, [0])]
    if plan.experiment.mst.topology.granularity != "channel":  # channels are chosen instead of blocks
        side = plan.best.side or 16
        lines.append(f"to choose: --set mst.compute.backend=block --set mst.topology.granularity.block={side}")
    return "\n".join(lines)


def _topology(plan: Plan) -> str:
    t = plan.topology
    if t is None:
        return "the traffic of topology steps is not planned for compact storage" if plan.sparsest.compact else ""
    rows = [
        ["ranks", *(f"{ranks:,}" for ranks in t.seconds)],
        ["time", *(_duration(seconds) for seconds in t.seconds.values())],
    ]
    storage = ", planned as if storage were dense," if plan.sparsest.compact else ","
    masks = f" and {t.masks / 1e6:,.1f} MB of masks" if t.masks else ""
    about = (
        f"topology step {t.step:,}{storage} in addition to the times above, sends {t.payload / 1e3:,.0f} kB in "
        f"{t.all_reduces} all-reduces{masks}: {_duration(t.here)} on {plan.setting.ranks:,} ranks; {t.rounds} of them "
        f"depend on the weights, and their number is assumed; {t.in_run:,} such steps in the run; a drift check sends "
        f"{t.drift_payload / 1e3:,.1f} kB"
    )
    return "\n".join([_wrap(about), *align(rows, [0])])


def _assumptions(plan: Plan) -> str:
    gpu, latency = plan.machine.gpu, plan.machine.latency
    shares = ", ".join(f"{name} {value}" for name, value in asdict(plan.machine.efficiency).items())
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
    return "\n".join(textwrap.wrap(sentence, 98, subsequent_indent="  ", break_on_hyphens=False))


def _table(rows: list[list[str]]) -> list[str]:
    """Align the first and the last column left, and the numbers between them right."""
    return align(rows, [0, len(rows[0]) - 1])
