"""`mst export`: writes a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from mst_scale.cli.data import _bytes
from mst_scale.dead_units.kinds import in_words
from mst_scale.distributed.parser import refuse_no_folder

ABOUT = """\
Write a folder that transformers.AutoModelForCausalLM.from_pretrained loads: config.json, model.safetensors (in parts
where it is large), tokenizer files, and a model card with the run's figures.

CHECKPOINT is a run's folder (its newest whole checkpoint) or a checkpoint's, of any ZeRO stage and number of ranks, in
the middle of sparse training or at its end. Weights that are zero stay exactly zero. The weights are the fp32 masters
and pass through memory one matrix at a time.

--prune S sets the smallest weights of each layer to zero until the share S of the weights that may be sparse
(mst.targets, spread by mst.sparsity.distribution) is zero, and reports the loss on the run's validation corpus before
and after; for that report the model is loaded into memory.

Tokenizer files are written for `byte`, `gpt2` and .tiktoken rank files, where the vocabulary is at hand."""

EXAMPLES = """\
examples:
  mst export runs/demo exported/demo
  mst export runs/gpt2/checkpoints/step00100000 exported/ultra --dtype bfloat16
  mst export runs/demo exported/demo-90 --prune 0.9 --json
"""


def add(subparsers: Any) -> None:
    verb = subparsers.add_parser(
        "export",
        help="write a checkpoint as a Hugging Face model",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = verb.add_argument
    option("checkpoint", metavar="CHECKPOINT", help="a run or a checkpoint")
    option("out", metavar="OUT", help="the folder to write; it must not exist")
    option("--prune", type=float, metavar="S", help="prune by magnitude to the sparsity S, and report the loss")
    option("--dtype", default="float32", metavar="T", help="float32 (the default), bfloat16 or float16")
    option("--shard-size", type=_bytes, default=5 * 10**9, metavar="N", help="largest file of weights (default: 5G)")
    option("--tokenizer", metavar="NAME", help="byte, gpt2 or a .tiktoken file (default: what the run's corpus names)")
    option("--config", metavar="FILE", help="the experiment, where no config.json lies beside the checkpoint")
    option("--json", action="store_true", help="print one JSON object")
    verb.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # only files are read: DeepSpeed, which unpickling imports, must not look for a GPU (and report it on stdout)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from mst_scale.hugging_face.export import export

    refuse_no_folder("OUT", Path(args.out))
    done = export(
        Path(args.checkpoint),
        Path(args.out),
        prune=args.prune,
        dtype=args.dtype,
        shard_bytes=args.shard_size,
        tokenizer=args.tokenizer,
        config=None if args.config is None else Path(args.config),
    )
    if args.json:
        print(json.dumps(done.to_dict()))
        return 0
    step = "" if done.step is None else f", step {done.step:,}"
    share = f", {done.zeros / done.matrices:.2%} zeros in its sparse matrices" if done.matrices else ""
    print(f"{done.out}: {done.parameters:,} parameters in {len(done.files)} file(s){step}{share}")
    if done.dead_units:
        print(f"dead units (all their weights are zero): {in_words(done.dead_units)}")
    print(f"tokenizer: {done.tokenizer or 'no files; the model card says why'}")
    if done.losses:
        before, after = done.losses["before"], done.losses["after"]
        print(f"validation loss: {before:.4f} before pruning, {after:.4f} after ({after - before:+.4f})")
    return 0
