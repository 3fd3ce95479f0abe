"""Puts the answer of `mst plan` into words: a conclusion, then tables that fit 100 columns."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mst_scale.plan.answer import Plan
    from mst_scale.plan.recommend import Choice

GB = 1e9
CLOSE = 0.03  # times so near are the same
SHOWN = 5  # ways to share a model


def text(answer: Plan) -> str:
    """A conclusion, then tables that fit 100 columns."""
    parts = [
        headline(answer),
        conclusion(answer),
        layout_table(answer),
        memory_table(answer),
        link_table(answer),
        phase_table(answer),
    ]
    parts += [side_table(answer), topology_table(answer), assumptions(answer)]
    return "\n\n".join(part for part in parts if part)


def headline(answer: Plan) -> str:
    """The setting that gains most and what it gains, or that nothing does; empty for a dense run."""
    from mst_scale.plan.answer import overrides

    if not answer.sparse_parameters:
        return ""
    best, ranks = answer.best, answer.setting.ranks
    days, dense = (f"{seconds / 86400:,.3g}" for seconds in (best.run_seconds, best.dense_seconds))
    needed, now = (f"{held.needed / GB:.1f}" for held in (best.memory, answer.memory))
    memory = f"{needed} GB per GPU" + (f" instead of {now}" if needed != now else ", unchanged")
    on = f"on {ranks:,} GPU{'s' if ranks > 1 else ''}"
    run = f"{days} days instead of {dense} for a dense run ({times(best.speedup)}) {on}"
    if not best.gains:
        said = f"No gain in time is expected from sparsity here: {run}; memory: {memory}. The FLOPs saved are below."
        return "\n".join(textwrap.wrap(said, 98, subsequent_indent="  "))
    masks = "the masks of this config" if best.side is None else f"masks of {best.side} × {best.side} blocks"
    lines = textwrap.wrap(
        f"Best setting: {masks}: {run}; memory: {memory}. Expected, not measured.", 98, subsequent_indent="  "
    )
    lines += [f"  {word}" for word in (*overrides(best.setting, answer.given), *best.overrides)]
    if best.side is not None:
        own = answer.dense_hours / answer.expected_hours
        lines.append(f"  Blocks cost some loss (docs/does-it-work.md). Without them the run takes {times(own)}:")
    return "\n".join(lines)


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
    if answer.sparse_parameters:
        sparse, hours = answer.sparsest, answer.expected_hours
        lines.insert(
            1,
            f"Expected, not measured: {duration(sparse.expected_seconds)} a step at {100 * sparse.sparsity:.0f} % "
            f"sparsity ({times(sparse.dense_seconds / sparse.expected_seconds)}), "
            f"{hours / s.ranks / 24:,.3g} days the run ({times(answer.dense_hours / hours)}).",
        )
    if more := answer.newton_schulz_flops:
        lines.append(
            "reckoned as Adam: Muon keeps 4 bytes less for each weight of its matrices, and takes\n"
            f"  {more / 1e12:,.3g} TFLOPs a step more over all GPUs (Newton-Schulz), not in the times"
        )
    best = answer.recommended
    if answer.given.sizes == s.sizes and answer.given != s:
        lines.append(
            f"the config's micro-batch of {answer.given.micro} does not share {s.batch:,} sequences so: "
            f"{' '.join(overrides(s, answer.given))}"
        )
    if best.setting == s:
        lines.append("recommended layout: this configuration")
        lines += [f"  {word}" for word in overrides(s, answer.given) if answer.given.sizes != s.sizes]
    else:
        needed = f"{best.memory.needed / GB:.1f} GB, {duration(best.seconds.total)} a step"
        lines.append(f"recommended layout: {stated(best.setting)} ({needed})")
        lines += [f"  {word}" for word in overrides(best.setting, answer.given)]
    return "\n".join(lines)


def layout_table(answer: Plan) -> str:
    """The fastest ways to share the model, and why the recommended one wins."""
    from mst_scale.plan.why import shape

    if answer.setting.ranks == 1:
        return ""
    head = ["shared by", "ZeRO", "micro", "again", "GB", "in layers", "of ZeRO", "bubble", "step", ""]
    rows = [head]
    for choice in answer.layouts[:SHOWN]:
        s, t = choice.setting, choice.seconds
        waits = (t.sharing, t.exposed - t.sharing, t.bubble)
        rows.append([
            shape(s), str(s.stage), f"{s.micro} × {s.accumulation}", "yes" if s.recompute else "no",
            f"{choice.memory.needed / GB:.1f}", *(duration(x) if x else "–" for x in waits), duration(t.total),
            " *" if s.sizes == answer.recommended.setting.sizes else "",
        ])  # fmt: skip
    more = len(answer.layouts) - SHOWN
    note = "* recommended; again: recomputation; of ZeRO: what does not hide behind backward"
    said = [line for why in answer.why for line in textwrap.wrap(why, 98, subsequent_indent="  ")]
    return "\n".join([*aligned(rows), note + (f"; --json has {more} more" if more > 0 else ""), *said])


def link_table(answer: Plan) -> str:
    """What a GPU sends."""
    if not answer.links:
        return ""
    rows = [["sent for", "GPUs", "over", "calls", "GB a GPU", "time", ""]]
    for link in answer.links:
        sent = f"{link.sent / GB:,.1f}"
        rows.append([link.shared, f"{link.ranks:,}", link.over, f"{link.calls:,}", sent, duration(link.seconds), ""])
    return "\n".join(aligned(rows))


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
    rows = [["phase", "steps", "sparse", "FLOPs", "dense step", "expected", "not below", "GPU-hours", "expected", ""]]
    for p in answer.phases:
        hours = p.steps * answer.setting.ranks / 3600
        rows.append([
            p.name, f"{p.steps:,}", f"{100 * p.sparsity:.0f} %", f"{100 * p.flops:.0f} %", duration(p.dense_seconds),
            duration(p.expected_seconds), duration(p.best_seconds), f"{hours * p.dense_seconds:,.0f}",
            f"{hours * p.expected_seconds:,.0f}", "",
        ])  # fmt: skip
    rows.append([
        "run", f"{answer.steps:,}", "", f"{100 * answer.flops:.0f} %", "", "", "", f"{answer.dense_hours:,.0f}",
        f"{answer.expected_hours:,.0f}", "",
    ])  # fmt: skip
    return "\n".join([
        *lines, *aligned(rows),
        f"expected, not measured: {times(answer.dense_hours / answer.expected_hours)} of the dense run's time, "
        "by a roofline of the kernels.",
        *_slower(answer),
        f"FLOPs ÷{1 / answer.flops:.2f} in the causal accounting.",
        f"Wall clock: {answer.wall_clock}.",
        "not below: a bound, if attention took no more than its share of the pairs (not measured on GPUs).",
    ])  # fmt: skip


def _slower(answer: Plan) -> list[str]:
    slower = [p.name for p in answer.phases if p.expected_seconds > (1 + CLOSE) * p.dense_seconds]
    if not slower:
        return []
    cure = "mst.compute.backend=auto takes them where `mst bench linear --tune` has measured them faster"
    return [f"{', '.join(slower)}: blocks are expected slower than dense products there;", f"  {cure}"]


def side_table(answer: Plan) -> str:
    """What the sparsest phase would gain by blocks of each side."""
    if not answer.sides:
        return ""
    found = answer.sides
    rows = [
        ["blocks of", *(str(x.side) if x.side > 1 else "single weights" for x in found), ""],
        ["a step", *(times(x.speedup) for x in found), ""],
        ["its products", *(times(x.products) for x in found), ""],
        ["bound by", *(next(iter(x.decides), "masked dense") for x in found), ""],
    ]
    title = f"expected, not measured: a dense step against one at {100 * answer.sparsest.sparsity:.0f} % sparsity"
    if answer.experiment.mst.topology.granularity == "channel":  # which is chosen instead of blocks
        return "\n".join([title, *aligned(rows)])
    side = answer.best.side or 16
    how = f"to choose: --set mst.compute.backend=block --set mst.topology.granularity.block={side}"
    return "\n".join([title, *aligned(rows), how])


def topology_table(answer: Plan) -> str:
    t = answer.topology
    if t is None:
        return ""
    ranks, times = zip(*t.seconds.items(), strict=True)
    rows = [["ranks", *(f"{r:,}" for r in ranks), ""], ["time", *map(duration, times), ""]]
    masks = f" and {t.masks / 1e6:,.1f} MB of masks" if t.masks else ""
    read = "weights and gradients" if t.reads_gradients else "weights"
    reads = f"its compute, a bound, not measured: {duration(t.reads_seconds)} or more to read {read}"
    gradients = f"{duration(t.dense_gradient_seconds)} or more for weight gradients of what is masked"
    return "\n".join([
        f"topology step {t.step:,} sends {t.payload / 1e3:,.0f} kB in {t.all_reduces} all-reduces{masks}: "
        f"{duration(t.here)} on {answer.setting.ranks:,} ranks",
        f"  {t.rounds} of them, an assumed number, depend on the weights; a drift check sends "
        f"{t.drift_payload / 1e3:,.1f} kB",
        f"  {reads if t.reads_seconds else 'nothing is ranked: no weight or gradient is read'}",
        *([f"  {gradients}"] if t.dense_gradient_seconds else []),
        f"  {t.in_run:,} in the run, {duration(t.run_seconds)} or more in all, on top of the times above",
        *aligned(rows),
    ])  # fmt: skip


def assumptions(answer: Plan) -> str:
    from mst_scale.plan.gpus import MEASURED

    e, a = answer.machine.efficiency, answer.machine.latency
    shares = ", ".join(f"{name} {value}" for name, value in asdict(e).items())
    cache = f"narrow is of matmul, for blocks of 16; the L2 cache reads {answer.machine.gpu.l2 / 1e12:.3g} TB/s"
    fitted = "fitted to measurements" if answer.machine.gpu.name in MEASURED else "assumed"
    efficiencies = textwrap.wrap(f"share of peaks, {fitted}: {shares} (--efficiency); {cache}", 98)
    return (
        "\n  ".join(efficiencies) + "\n"
        f"assumed latencies: {1e6 * a.inside:.0f} µs a hop in a node, {1e6 * a.between:.0f} µs between nodes, "
        f"{1e6 * a.launch:.0f} µs a call, {1e6 * a.kernel:.0f} µs a kernel\n"
        + "\n".join(textwrap.wrap(f"peaks: {answer.machine.gpu.sources}", 98, subsequent_indent="  "))
    )


def duration(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.3g} ms"


def times(speedup: float) -> str:
    return f"÷{speedup:.2f}"


def aligned(rows: list[list[str]]) -> list[str]:
    """The first column to the left, the last as it is, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([
            row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:-1], widths[1:-1], strict=True)), row[-1],
        ]).rstrip()
        for row in rows
    ]  # fmt: skip
