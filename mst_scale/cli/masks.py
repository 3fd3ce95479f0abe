"""`mst masks`: writes masks into one safetensors file that any tool can read."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mst_scale.errors import UserError

ABOUT = """\
Write the masks of SOURCE into OUT, a safetensors file: a parameter's name → bool of its shape, true where it is kept.

SOURCE is a checkpoint or a run; a folder of transformers, whose zeros are the masks; or a file of masks, to convert.
--packed writes one bit a weight (uint8, in the order of numpy.packbits; the shapes stand in the file's metadata).
A run takes such a file with "mst": {"method": "fixed", "masks": OUT}; notebooks read it with safetensors' load_file.
--json prints {"out", "matrices", "weights", "kept"}."""

EXAMPLES = """\
examples:
  mst masks runs/demo masks.safetensors
  mst masks pruned-llama masks.safetensors --packed
"""


def add(subparsers: Any) -> None:
    verb = subparsers.add_parser(
        "masks",
        help="write masks for other tools, and for method fixed",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("source", metavar="SOURCE", type=Path, help="a checkpoint, a run, a model's folder, a mask file")
    verb.add_argument("out", metavar="OUT", type=Path, help="the file to write, NAME.safetensors")
    verb.add_argument("--packed", action="store_true", help="one bit a weight")
    verb.add_argument("--json", action="store_true", help="print one JSON object")
    verb.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from mst_scale.checkpoints import open_masks

    if args.out.exists():
        raise UserError(f"{args.out} is there already: remove it, or name another file")
    weights = kept = 0

    def counted(masks: open_masks.Named) -> Iterator[Any]:
        nonlocal weights, kept
        for name, mask in masks:
            weights, kept = weights + mask.numel(), kept + int(mask.sum())
            yield name, mask

    matrices = open_masks.write(args.out, counted(open_masks.of_source(args.source)), args.packed)
    if not matrices:
        args.out.unlink()
        raise UserError(f"{args.source} has no masks: it was trained without sparsity, or no weight of it is 0")
    found = {"out": str(args.out), "matrices": matrices, "weights": weights, "kept": kept}
    print(json.dumps(found) if args.json else f"{args.out}: {matrices} matrices, {1 - kept / weights:.2%} sparse")
    return 0
