"""`mst export`: writes a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from mst_scale.cli.data import _bytes
from mst_scale.comm import logger
from mst_scale.comm.parser import at_least, validate_folder
from mst_scale.dead_units import format_counts
from mst_scale.errors import UserError

ABOUT = """\
Write a folder that transformers.AutoModelForCausalLM.from_pretrained loads: config.json, model.safetensors (in parts
where it is large), tokenizer files, and a model card with the run's figures.

CHECKPOINT is a run's folder (its latest complete checkpoint) or a checkpoint's, of any ZeRO stage and number of ranks,
at any step. The folders of Trainer, Accelerate (save_state) and engine.save_checkpoint are read, too; a transformers
model keeps its architecture, configuration and tokenizer, and cannot be pruned.

Weights that are zero stay exactly zero. The weights are the fp32 masters and pass through memory one matrix at a time.

--prune S sets the smallest weights of each layer to zero until the share S of the weights that may be sparse
(mst.targets, spread by mst.sparsity.distribution) is zero, and reports the loss on the run's validation corpus before
and after; for that the model is loaded into memory. Weights that training left at zero count as pruned. Zeros are
stored like any other weight, so a pruned folder is as large as an unpruned one.

--method says which weights become zero:
  magnitude   the smallest (the default)
  wanda       in each row of a matrix, the fraction S with the smallest |weight| · norm of its input (arXiv 2306.11695)
  sparsegpt   in each block of 128 input columns, the fraction S whose removal is easiest to compensate; the remaining
              weights are updated accordingly (arXiv 2301.00774)
The last two look at the inputs of layers over 128 sequences of the run's own training corpus, or of --calibration, and
prune block by block. They skip a head tied to the token embedding, because no linear layer multiplies with it. If the
run's corpus is missing, the loss is measured on the validation split of --calibration.

--pattern N:M keeps at most N weights in every M consecutive inputs of an output; it works with every method.

Tokenizer files are written for `byte`, `gpt2` and .tiktoken rank files, if the vocabulary is available."""

EXAMPLES = """\
examples:
  mst export runs/demo exported/demo
  mst export runs/gpt2/checkpoints/step00100000 exported/ultra --dtype bfloat16
  mst export runs/trainer exported/llama          # Trainer's output folder: its latest checkpoint-N
  mst export runs/demo exported/demo-90 --prune 0.9 --json
  mst export runs/gpt2 exported/gpt2-half --prune 0.5 --method wanda
  mst export runs/gpt2 exported/gpt2-24 --pattern 2:4 --method sparsegpt --calibration corpora/openwebtext
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
    option("--prune", type=float, metavar="S", help="prune to the sparsity S, and report the loss")
    option("--method", metavar="M", help="prune by magnitude (the default), wanda or sparsegpt")
    option("--how", help=argparse.SUPPRESS)  # the name of --method before
    option("--pattern", metavar="N:M", help="prune to N of M consecutive inputs, as in 2:4, in place of --prune")
    option("--calibration", metavar="DIR", help="corpus for wanda and sparsegpt (default: the run's own)")
    option("--calibration-sequences", type=at_least(1), metavar="N", help="how many of its sequences (default: 128)")
    option("--dtype", default="float32", metavar="T", help="float32 (the default), bfloat16 or float16")
    option("--shard-size", type=_bytes, default=5 * 10**9, metavar="N", help="largest file of weights (default: 5G)")
    option("--tokenizer", metavar="NAME", help="byte, gpt2 or a .tiktoken file (default: what the run's corpus names)")
    option("--config", metavar="FILE", help="the experiment, if no config.json is next to the checkpoint")
    option("--json", action="store_true", help="print one JSON object")
    verb.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # only files are read: DeepSpeed, which unpickling imports, must not look for a GPU (and report it on stdout)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from mst_scale.hugging_face.export import export

    validate_folder("OUT", Path(args.out))
    if args.how is not None:
        if args.method is not None:
            raise UserError("--how is the old name of --method: give --method alone")
        logger.warning("--how is now called --method, and will be removed in the next release")
    done = export(
        Path(args.checkpoint),
        Path(args.out),
        prune=args.prune,
        method=args.how if args.method is None else args.method,
        pattern=args.pattern,
        calibration=args.calibration,
        calibration_sequences=args.calibration_sequences,
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
    size = f"{done.bytes / 1e6:,.1f} MB in {len(done.files)} file(s)"
    print(f"{done.out}: {done.parameters:,} parameters, {size}{step}{share}")
    if done.zeros:
        print(f"the {done.zeros:,} zeros are stored like any other weight: they make the file no smaller")
    if done.dead_units:
        print(f"dead units (all their weights are zero): {format_counts(done.dead_units)}")
    print(f"tokenizer: {done.tokenizer or 'no files; the model card says why'}")
    if left := done.pruning.get("left"):
        print(f"not pruned, for no linear layer multiplies with it: {', '.join(left)}")
    if done.losses:
        before, after = done.losses["before"], done.losses["after"]
        print(f"validation loss: {before:.4f} before pruning, {after:.4f} after ({after - before:+.4f})")
    return 0
