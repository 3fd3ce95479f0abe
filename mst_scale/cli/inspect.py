"""`mst inspect`: shows a checkpoint's masks: how many weights of each layer are active."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mst_scale.dead_units import format_counts

if TYPE_CHECKING:
    from mst_scale.checkpoints.mask_report import Report

ABOUT = """\
Step, phase, sparsity and the mask of every sparse parameter of a checkpoint.

PATH is a checkpoint's folder, or a run's: then its newest complete checkpoint. Folders that Trainer, Accelerate or
engine.save_checkpoint have written are read too. The sha256 of a mask does not depend on how
many ranks saved it, nor on the ZeRO stage. --json prints
{"checkpoint", "step", "phase", "sparsity", "target_sparsity", "granularity",
"layers": [{"name", "shape", "active", "density", "ever_active", "sha256"} …],
"dead_units": {kind: [dead, all]}}
where dead units (neurons of an MLP, channels of a head) are those whose weights are all zero. A run trained without
sparsity has phase "dense" and no layers."""

EXAMPLES = """\
examples:
  mst inspect runs/demo
  mst inspect runs/demo/checkpoints/step00000012 --json
"""


def add(subparsers: Any) -> None:
    verb = subparsers.add_parser(
        "inspect",
        help="show the masks of a checkpoint",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("path", metavar="PATH", help="a checkpoint or a run")
    verb.add_argument("--json", action="store_true", help="print one JSON object")
    verb.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from mst_scale.checkpoints.mask_report import inspect

    report = inspect(Path(args.path))
    print(json.dumps(report.to_dict()) if args.json else table(report))
    return 0


def table(report: Report) -> str:
    """Aligned columns: names to the left, numbers to the right."""

    head = f"{report.checkpoint}: step {report.step:,}, phase {report.phase}"
    if not report.layers:
        return f"{head}, trained without sparsity: no masks"
    counted = any(layer.ever_active is not None for layer in report.layers)
    rows = [["parameter", "shape", "active", "density", *(["ever active"] if counted else []), "sha256"]]
    for layer in report.layers:
        ever = "–" if layer.ever_active is None else f"{layer.ever_active:.2%}"
        shape = "×".join(map(str, layer.shape))
        numbers = [f"{layer.active:,}", f"{layer.density:.2%}", *([ever] if counted else [])]
        rows.append([layer.name, shape, *numbers, layer.sha256[:12]])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers, digest in rows:
        middle = [cell.rjust(width) for cell, width in zip(numbers, widths[1:-1], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *middle, digest]))
    sparsity = f"{report.sparsity:.2%} sparse (target {report.target_sparsity:.2%})"
    blocks = report.granularity if isinstance(report.granularity, dict) else None
    granularity = f", in blocks of {blocks['block']} × {blocks['block']}" if blocks else ""
    granularity = ", in whole channels" if report.granularity == "channel" else granularity
    dead = [f"dead units: {format_counts(report.dead_units)}"] if report.dead_units else []
    return "\n".join([f"{head}, {sparsity}{granularity}", *dead, "", *lines])
