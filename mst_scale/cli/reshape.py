"""`mst reshape`: writes a copy of a checkpoint that any number of ranks can load."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from mst_scale.comm.parser import validate_folder

ABOUT = """\
Make a copy of a checkpoint that any number of ranks and any ZeRO stage can load: DeepSpeed's universal layout, with the
masks. Weights, optimizer states, step and masks are the same to the bit.

PATH is a checkpoint's folder, or a run's: then its newest whole checkpoint. The copy is the folder `universal` in it,
where `mst_scale.pretrain --out RUN` finds it by itself, or else OUT: a new run if PATH is a run, a checkpoint if PATH
is one. A training loop of your own loads it with {"checkpoint": {"load_universal": true}} in its DeepSpeed config and
engine.load_checkpoint(FOLDER, tag=NAME), FOLDER/NAME being the copy. It needs 12 bytes for each parameter.

It carries the states of Adam and its like. For other optimizers, or with frozen parameters, a training loop of your own
calls mst_scale.warm_start(engine, FOLDER): weights, masks and step go on, and the optimizer begins anew."""

EXAMPLES = """\
examples:
  mst reshape runs/demo                                   # then start runs/demo on as many ranks as there are
  mst reshape runs/demo runs/demo-1-rank
  mst reshape out/global_step400 out/universal400 --json
"""


def add(subparsers: Any) -> None:
    verb = subparsers.add_parser(
        "reshape",
        help="let a checkpoint continue on another number of ranks or at another ZeRO stage",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("path", metavar="PATH", help="a checkpoint or a run")
    verb.add_argument("out", metavar="OUT", nargs="?", help="where the copy goes (default: inside the checkpoint)")
    verb.add_argument("--json", action="store_true", help="print one JSON object")
    verb.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # only files are read: DeepSpeed, which unpickling imports, must not look for a GPU (and report it on stdout)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from mst_scale.checkpoints.reshape import reshape

    if args.out is not None:
        validate_folder("OUT", Path(args.out))
    done = reshape(Path(args.path), None if args.out is None else Path(args.out))
    if args.json:
        print(json.dumps(done.to_dict()))
        return 0
    what = f"{done.parameters} parameters, {done.masks} masks, {done.bytes / 1e6:,.1f} MB"
    print(f"{done.universal}: {what}, {f'made in {done.seconds:.1f} s' if done.seconds else 'was there already'}")
    print("any number of ranks at any ZeRO stage continues from it")
    return 0
