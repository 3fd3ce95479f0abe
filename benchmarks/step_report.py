"""Formats the results of `benchmarks.step` as Markdown tables: steps, parts of a step, collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .page import Row, facts, grid

SIDES = {"ours": "MST", "baseline": "dense"}


def table(rows: Sequence[Row]) -> str:
    """One line a phase: MST against dense."""
    head = [
        "phase", "sparsity", "attention", "weights", "MST ms (middle half)", "dense ms (middle half)",
        "speed-up of medians (middle half of pairs)", "FLOPs ÷", "tokens/s MST / dense", "GFLOP/s", "MFU", "peak MB",
    ]  # fmt: skip
    lines = []
    for r in rows:
        if "ours_parts_ms" not in r:
            figures = [f"{r['ours_ms']:,}", f"{r['baseline_ms']:,}", f"{r['speedup']}× (computed)", r["flop_reduction"]]
            lines.append([r["phase"], "", "", "", *figures, "", "", "", ""])
            continue
        lines.append(
            [
                r["phase"],
                f"{r['sparsity']:.0%}",
                r["attention"],
                r["weights"],
                f"{r['ours_ms']:,} ({_span(r['ours_range'])})",
                f"{r['baseline_ms']:,} ({_span(r['baseline_range'])})",
                f"{r['speedup']}× ({_span(r['speedup_range'])})",
                r["flop_reduction"],
                f"{r['ours_tokens_per_s']:,} / {r['baseline_tokens_per_s']:,}",
                f"{r['ours_flops_per_s'] / 1e9:,.1f} / {r['baseline_flops_per_s'] / 1e9:,.1f}",
                f"{r['ours_mfu']:.0%} / {r['baseline_mfu']:.0%}",
                f"{_mb(r['ours_peak_bytes'])} / {_mb(r['baseline_peak_bytes'])}",
            ]
        )
    return grid(head, lines)


def parts(rows: Sequence[Row]) -> str:
    """Milliseconds of each part of an ordinary step, and what a topology step takes longer."""
    names = ("forward", "backward", "communication", "optimizer", "masking")
    lines = []
    for r in rows:
        for who, label in SIDES.items():
            if f"{who}_parts_ms" in r:
                measured = r[f"{who}_parts_ms"]
                topology = r["topology_ms"] if who == "ours" else None
                last = "–" if topology is None else f"{topology:+,.1f}"
                lines.append([r["phase"], label, *(f"{measured[name]:,.1f}" for name in names), last])
    return grid(["phase", "side", *(f"{name} ms" for name in names), "topology step ms"], lines)


def collectives(found: Sequence[Row]) -> str:
    """The collectives of one step and rank, by name: MST's own begin with `mst`."""
    lines = [
        [
            c["phase"],
            SIDES[c["side"]],
            c["step"],
            f"`{c['name']}`",
            f"{c['calls']:g}",
            f"{c['bytes']:,.0f}",
            f"{c['ms']:,.2f}",
        ]
        for c in found
    ]
    return grid(["phase", "side", "step", "collective", "calls", "bytes", "ms"], lines)


def markdown(found: dict[str, Any], command: str) -> str:
    """A section of a results file."""
    setting = found["setting"]
    shown = {**setting, "peak_flops_per_s": f"{setting['peak_flops_per_s'] / 1e9:,.1f} G"}
    said = facts({key.replace("_", " "): value for key, value in shown.items()})
    title = f"{setting['model']}, {setting['ranks']} rank(s), backend {setting['backend']}"
    sections = [
        f"## {title}",
        f"`{command}`",
        facts(found["machine"]),
        said,
        table(found["rows"]),
        parts(found["rows"]),
    ]
    if found["collectives"]:
        sections.append(collectives(found["collectives"]))
    return "\n\n".join(sections) + "\n"


def _span(ends: Sequence[float]) -> str:
    return "{:,}–{:,}".format(*ends)


def _mb(count: int | None) -> str:
    return "–" if count is None else f"{count / 1e6:,.0f}"
