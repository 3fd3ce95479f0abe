"""Formats a plan as text: a conclusion, then tables. Sentences are as wide as the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from mst_scale.cli import align
from mst_scale.plan.answer import Plan, describe_setting, overrides
from mst_scale.plan.by_phase import PhaseOptions
from mst_scale.plan.expected_gain import Advice, Expectation
from mst_scale.plan.gpus import MEASURED, Efficiency
from mst_scale.plan.recommend import MEASURED_SIDES, Choice, describe_layout
from mst_scale.units import format_bytes, format_count, format_time

CLOSE = 0.03  # a phase must be slower than dense by this much to be called slower
SHOWN = 5  # ways to share a model
SMALL = 0.01  # GPU-hours
WIDEST, NARROWEST = 120, 40  # columns of sentences
PHASES = {"warmup": "warm-up", "ultra": "ultra-sparse", "restore": "restoration"}
BLOCKS_PAGE = "docs/studies.md#where-the-gain-comes-from"
CAVEAT = "docs/blocks.md"


def format_plan(plan: Plan, expected: Expectation | None = None, advice: Advice | None = None) -> str:
    """Format the whole plan, with the expected gain and the recipe that fits a goal, which comes first."""
    texts = [_sentence(advice), _headline(plan, expected), _conclusion(plan), _sentence(expected)]
    texts += [part(plan) for part in (_layouts, _memory, _phases, _sides, _topology, _assumptions)]
    return "\n\n".join(text for text in texts if text)


def format_phases(phases: Sequence[PhaseOptions], gpus: int, gpu: str) -> str:
    """Format the fewest GPUs of each phase, the number with the fewest GPU-hours, and the most that share the batch."""
    each, most = ["memory", "time", "GPU-h"], max(phase.options[-1].gpus for phase in phases)
    rows = [["phase", "steps", "storage", "fewest", *each, "best", *each, f"{most:,}:", "time", "GPU-h"]]
    totals = [0.0] * 6
    for phase in phases:
        row = [phase.name, f"{phase.steps:,}", "compact" if phase.compact else "dense"]
        for i, option in enumerate((phase.fewest, phase.best, phase.options[-1])):
            seconds, hours = 3600 * option.hours, option.gpu_hours
            where = [f"{option.gpus:,}", format_bytes(option.choice.memory.needed)] if i < 2 else [""]
            row += [*where, format_time(seconds), _hours(hours)]
            totals[2 * i : 2 * i + 2] = totals[2 * i] + seconds, totals[2 * i + 1] + hours
        rows.append(row)
    run = ["run", f"{sum(phase.steps for phase in phases):,}", ""]
    for i in range(3):
        run += [*([""] * (2 if i < 2 else 1)), format_time(totals[2 * i]), _hours(totals[2 * i + 1])]
    rows.append(run)
    about = (
        f"Each phase on up to {gpus:,} × {gpu}, at the same global batch and in the setting recommended for that many "
        "GPUs. fewest: the smallest number with enough memory; best: the largest number whose GPU-hours (GPU-h) are "
        "within 3 % of the minimum. Times are expected, not measured, and do not include saving and restarting between "
        "phases. --json prints the settings."
    )
    if most < gpus:
        about = f"{gpus:,} GPUs cannot share the global batch evenly, so the last columns are for {most:,}. {about}"
    return "\n".join([*align(rows, [0, 2]), _wrap(about)])


def _headline(plan: Plan, expected: Expectation | None) -> str:
    """Describe the setting with the fastest run, or say that none saves time; empty for a dense run."""
    if not plan.sparse_parameters:
        return ""
    best, ranks = plan.best, plan.setting.ranks
    needed, now = format_bytes(best.memory.needed), format_bytes(plan.memory.needed)
    memory = f"{needed} per GPU" + (f" instead of {now}" if needed != now else ", unchanged")
    on = f"on {ranks:,} GPU{'s' if ranks > 1 else ''}"
    times = f"{format_time(best.run_seconds)} instead of {format_time(best.dense_seconds)}"
    run = f"{times} for a dense run of as many steps ({_speed(best.speedup)}) {on}"
    if not best.gains:
        return _wrap(
            f"No gain in time is expected from sparsity here: {run}; memory: {memory}. The FLOPs saved are below."
        )
    masks = "the masks of this config" if best.side is None else f"masks of {best.side} × {best.side} blocks"
    lines = [_wrap(f"Fastest for the same number of steps: {masks}: {run}; memory: {memory}. {_estimate(plan)}")]
    loss = "The same number of steps does not mean the same loss"
    if expected is not None and (expected.gain is None or not expected.gain.is_established):
        loss += "; no gain over dense training at equal loss is known at this size and length"
    lines.append(_wrap(f"{loss}."))
    lines += [f"  {word}" for word in (*overrides(best.setting, plan.given), *best.overrides)]
    if best.side is not None:
        own = _speed(plan.dense_hours / plan.expected_hours)
        lines.append(_wrap(f"Blocks increase the loss a little ({BLOCKS_PAGE}). The plan without them ({own}):"))
    return "\n".join(lines)


def _estimate(plan: Plan) -> str:
    """Say how far the expected times can be trusted."""
    if plan.machine.gpu.name in MEASURED:
        return "Expected, not measured."
    gpu = plan.machine.gpu.name
    return (
        f"Expected, not measured: the efficiencies of {gpu} are assumed, and the gain is probably too high ({CAVEAT})."
    )


def _conclusion(plan: Plan) -> str:
    s, best = plan.setting, plan.recommended
    lines = [
        _wrap(
            f"As configured, it fits: {format_bytes(plan.memory.needed)} of {format_bytes(plan.machine.gpu.memory)} "
            f"per GPU; a dense step takes about {format_time(plan.seconds.total)}, a dense run "
            f"{format_time(plan.dense_hours / s.ranks * 3600)} ({_gpu_hours(plan.dense_hours)})."
        )
    ]
    if plan.sparse_parameters:
        sparse, hours = plan.sparsest, plan.expected_hours
        lines.append(
            _wrap(
                f"As configured, expected, not measured: {format_time(sparse.expected_seconds)} per step at "
                f"{100 * sparse.sparsity:.0f} % sparsity ({_speed(sparse.dense_seconds / sparse.expected_seconds)}), "
                f"{format_time(hours / s.ranks * 3600)} for the run ({_speed(plan.dense_hours / hours)})."
            )
        )
    lines += [
        f"{format_count(plan.parameters)} parameters ({format_count(plan.sparse_parameters)} sparse), "
        f"{format_count(plan.tokens)} tokens in {plan.steps:,} steps of {s.batch:,} sequences",
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
        names = " and ".join(PHASES.get(name, name) for name in storage["compact_phases"])
        plural = "s" if len(storage["compact_phases"]) > 1 else ""
        lines.append(_wrap(f"compact storage in the {names} phase{plural} (only with `mst_scale.pretrain`)"))
    elif plan.experiment.mst.compute.compact == "auto" and plan.sparse_parameters:
        lines.append(_wrap(f"dense storage of sparse layers: {storage['why_dense']}"))
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
    layout = "recommended layout" if plan.best.side is None else "recommended layout for these masks"
    if best.setting == s:
        lines.append(f"{layout}: this configuration")
        lines += [f"  {word}" for word in overrides(s, plan.given) if plan.given.sizes != s.sizes]
    else:
        needed = f"{format_bytes(best.memory.needed)}, {format_time(best.dense_step)} per dense step"
        lines.append(_wrap(f"{layout}: {describe_setting(best.setting)} ({needed})"))
        lines += [f"  {word}" for word in overrides(best.setting, plan.given)]
    return "\n".join(lines)


def _layouts(plan: Plan) -> str:
    """Format the fastest ways to share the model."""
    if plan.setting.ranks == 1:
        return ""
    rows = [["shared by", "ZeRO", "micro", "recompute", "memory", "sharing", "of ZeRO", "bubble", "dense", "run", ""]]
    for choice in plan.layouts[:SHOWN]:
        s, t = choice.setting, choice.seconds
        waits = [_duration(x) if x else "–" for x in (t.sharing, t.exposed - t.sharing, t.bubble)]
        recommended = "*" if s.sizes == plan.recommended.setting.sizes else ""
        rows.append([
            describe_layout(s), str(s.stage), f"{s.micro} × {s.accumulation}", "yes" if s.recompute else "no",
            format_bytes(choice.memory.needed), *waits, _duration(t.total), _duration(choice.run_step), recommended,
        ])  # fmt: skip
    more = len(plan.layouts) - SHOWN
    note = "* recommended; dense: a dense step; run: an average step of the run; "
    note += "sharing: between GPUs that share the model; of ZeRO: not hidden behind backward"
    note += f"; {more} more in --json" if more > 0 else ""
    return "\n".join([*_table(rows), _wrap(note), *map(_wrap, plan.why)])


def _memory(plan: Plan) -> str:
    head = "ZeRO|weights|grads|optim.|masks|activ.|buffers|needed|host|step|fits"
    lines = [
        *_table([head.split("|"), *(_memory_row(choice, plan) for choice in plan.stages)]),
        f"* this configuration, {'with' if plan.setting.recompute else 'without'} activation checkpointing",
    ]
    if copied := plan.memory.snapshot:
        lines.append(f"up to {format_bytes(copied)} of host memory per GPU hold a checkpoint until it is written")
    if kept := plan.kept_copies:
        gpu = plan.machine.gpu
        there = min(plan.setting.ranks, gpu.per_node) * gpu.host_memory
        lines.append(
            f"up to {format_bytes(kept)} of {format_bytes(there)} of host memory per node hold copies "
            "(training.memory_every)"
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
    sizes = [format_bytes(x) for x in (*parts, m.host + m.host_step)]
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
        sent = ", ".join(f"{format_bytes(size)} ({axis})" for axis, size in plan.sent.items())
        lines.append(f"  each GPU sends {sent}")
    if not plan.sparse_parameters:
        return "\n".join(lines)
    rows = [["phase", "steps", "sparse", "FLOPs", "dense step", "expected", "GPU-hours", "expected", "memory", "sends"]]
    for p in plan.phases:
        hours = p.steps * plan.setting.ranks / 3600
        rows.append([
            p.name, f"{p.steps:,}", f"{100 * p.sparsity:.0f} %", f"{100 * p.flops:.0f} %", _duration(p.dense_seconds),
            _duration(p.expected_seconds), _hours(hours * p.dense_seconds), _hours(hours * p.expected_seconds),
            format_bytes(p.memory_bytes), format_bytes(p.sent_bytes),
        ])  # fmt: skip
    of_run = [f"{plan.steps:,}", "", f"{100 * plan.flops:.0f} %", "", ""]
    rows.append(["run", *of_run, _hours(plan.dense_hours), _hours(plan.expected_hours), "", ""])
    lines += align(rows, [0])
    speed = _speed(plan.dense_hours / plan.expected_hours)
    lines.append(
        _wrap(
            f"expected, not measured: the run is {speed}, by a roofline of the kernels; FLOPs ÷{1 / plan.flops:.2f} in "
            "the causal accounting"
        )
    )
    if not plan.skips_products:
        lines.append("masked dense layers save FLOPs only: their products take as long as dense ones")
    slower = [p.name for p in plan.phases if p.expected_seconds > (1 + CLOSE) * p.dense_seconds]
    if slower:
        names = ", ".join(slower)
        mst = plan.experiment.mst
        if isinstance(mst.topology.granularity, str):
            narrow = mst.topology.granularity == "channel"
            because = "narrow products are at this width" if narrow else "compact layers are expanded first"
            if mst.attention.pattern != "dense":
                because = "sparse attention is at this length"
            lines.append(f"{names}: expected to be slower than dense, because {because}")
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
        ["a step", *(_speed(x.speedup) for x in plan.sides)],
        ["its products", *(_speed(x.products) for x in plan.sides)],
    ]
    title = f"expected, not measured: a dense step against one at {100 * plan.sparsest.sparsity:.0f} % sparsity"
    lines = [title, *align(rows, [0])]
    if plan.experiment.mst.topology.granularity != "channel":  # channels are chosen instead of blocks
        measured = [x for x in plan.sides if x.side in MEASURED_SIDES]
        side = plan.best.side or 16
        if plan.best.side and max(measured, key=lambda x: x.speedup).side != side:
            lines.append(
                _wrap(f"over the whole run, whose other phases are less sparse, blocks of {side} are the fastest")
            )
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
    masks = f" and {format_bytes(t.masks)} of masks" if t.masks else ""
    about = (
        f"topology step {t.step:,}{storage} in addition to the times above, sends {format_bytes(t.payload)} in "
        f"{t.all_reduces} all-reduces{masks}: {_duration(t.here)} on {plan.setting.ranks:,} ranks; {t.rounds} of them "
        f"depend on the weights, and their number is assumed; {t.in_run:,} such steps in the run; a drift check sends "
        f"{format_bytes(t.drift_payload)}"
    )
    return "\n".join([_wrap(about), *align(rows, [0])])


def _assumptions(plan: Plan) -> str:
    gpu, latency = plan.machine.gpu, plan.machine.latency
    return "\n".join([
        _wrap(
            f"fraction of peaks, {_efficiencies(plan)} (--efficiency); narrow is of matmul, for blocks of 16; the L2 "
            f"cache reads {gpu.l2 / 1e12:.3g} TB/s"
        ),
        f"assumed latencies: {1e6 * latency.inside:.0f} µs per hop in a node, {1e6 * latency.between:.0f} µs between "
        f"nodes, {1e6 * latency.launch:.0f} µs per call, {1e6 * latency.kernel:.0f} µs per kernel",
        _wrap(f"peaks: {gpu.sources}"),
    ])  # fmt: skip


def _efficiencies(plan: Plan) -> str:
    """List the fractions of peaks by where they come from."""
    assumed, fitted = asdict(Efficiency()), asdict(MEASURED.get(plan.machine.gpu.name, Efficiency()))
    found: dict[str, list[str]] = {"fitted to measurements": [], "given": [], "assumed": []}
    for name, value in asdict(plan.machine.efficiency).items():
        fits = "fitted to measurements" if fitted[name] != assumed[name] else "assumed"
        found[fits if value == fitted[name] else "given"].append(f"{name} {value}")
    return "; ".join(f"{origin}: {', '.join(shares)}" for origin, shares in found.items() if shares)


def _sentence(remark: Expectation | Advice | None) -> str:
    text = str(remark or "")
    return _wrap(f"{text[:1].upper()}{text[1:]}")


def _duration(seconds: float) -> str:
    """Format the time of a step, in seconds or milliseconds."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _hours(hours: float) -> str:
    """Format GPU-hours for a table."""
    if 0 < hours < SMALL:
        return f"< {SMALL}"
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


def _gpu_hours(hours: float) -> str:
    return f"under {SMALL} GPU-hours" if hours < SMALL else f"{_hours(hours)} GPU-hours"


def _speed(speedup: float) -> str:
    """Compare with a dense step or run, such as "1.69× faster"."""
    if 0.995 < speedup < 1.005:
        return "as fast"
    return f"{speedup:.2f}× faster" if speedup > 1 else f"{1 / speedup:.2f}× slower"


def _wrap(sentence: str) -> str:
    width = min(shutil.get_terminal_size((100, 24)).columns, WIDEST)
    return "\n".join(textwrap.wrap(sentence, max(width - 2, NARROWEST), subsequent_indent="  ", break_on_hyphens=False))


def _table(rows: list[list[str]]) -> list[str]:
    """Align the first and the last column left, and the numbers between them right."""
    return align(rows, [0, len(rows[0]) - 1])
