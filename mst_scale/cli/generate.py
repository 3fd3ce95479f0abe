"""`mst generate`: continues a prompt with a trained model."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from mst_scale.cli import add_command, values_of
from mst_scale.errors import UserError

TEXT = """\
Continue a prompt with a trained GPT, on the CPU. Sparse matrices are multiplied from their nonzero values; the zeros
are neither in memory nor computed. A model without zeros, such as one that method mst has trained to the end, gains
nothing from this. Attention follows the pattern that the checkpoint was trained with.

MODEL is the folder of a run (its latest complete checkpoint) or of a checkpoint, a compact file or its folder
(mst export --compact), or a GPT-2 in a transformers folder (mst export).

The text ends after --tokens tokens, at an end of text, or when the model's context is full. The same arguments give the
same text. --json prints
{"model", "step", "prompt", "text", "prompt_tokens", "tokens", "finish", "prompt_s", "tokens_per_s", "weight_bytes",
"resident_bytes"}
where `text` is what follows the prompt, `tokens_per_s` does not include computing the prompt (`prompt_s`),
`weight_bytes` are those of the weights in memory, and `resident_bytes` the memory of the whole process.

examples:
  mst launch local demo --set recipe=mst-small --out runs/small    # a small model that stays sparse
  mst generate runs/small --prompt "def " --tokens 100
  mst generate runs/small --prompt "class " --temperature 0 --json
  mst export runs/small compact/small --compact
  mst generate compact/small --prompt "import" --top-p 0.9 --seed 3 --stream
"""
ENDS = {
    "length": "stopped after --tokens",
    "end of text": "the text ended",
    "context": "the model's context was full",
}


def add(subparsers: Any) -> None:
    """Add the command to the parser."""
    option = add_command(subparsers, "generate", run, "continue a prompt with a trained model", TEXT).add_argument
    option("model", metavar="MODEL", help="a run, a checkpoint, a compact file, or a folder with an exported GPT-2")
    option("--prompt", required=True, metavar="TEXT", help="the text to continue")
    option("--tokens", type=int, default=64, metavar="N", help="maximum number of new tokens (default: 64)")
    option("--temperature", type=float, default=0.8, metavar="T", help="0 takes the most likely token (default: 0.8)")
    option(
        "--top-p", type=float, default=1.0, metavar="P",
        help="sample only from the most likely tokens that together have probability P (default: 1.0)",
    )  # fmt: skip
    option("--seed", type=int, default=0, metavar="N", help="seed of the sampling (default: 0)")
    option("--dtype", metavar="T", help="float32 or bfloat16 (default: as the weights are stored)")
    option("--tokenizer", metavar="NAME", help="byte, gpt2 or a .tiktoken file (default: the model's own)")
    option("--config", type=Path, metavar="FILE", help="the experiment, for a checkpoint outside the folder of its run")
    option("--stream", action="store_true", help="print the text while it is generated")
    option("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Generate in this process."""
    if args.stream and args.json:
        raise UserError("--stream prints text while it is generated, and --json one object at the end: use one of them")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # unpickling imports DeepSpeed, which would look for a GPU
    if args.json:
        logging.getLogger("mst_scale").setLevel(logging.WARNING)
    from mst_scale.generation.generate import generate

    before = iter([args.prompt])  # what is printed before the first piece, when all arguments were found to be right

    def report(text: str) -> None:
        print(next(before, "") + text, end="", flush=True)

    done = generate(
        args.model,
        args.prompt,
        stream=report if args.stream else None,
        **values_of(args, "tokens", "temperature", "top_p", "seed", "dtype", "tokenizer", "config"),
    )
    if args.json:
        print(json.dumps(done.to_dict()))
        return 0
    print("" if args.stream else done.prompt + done.text)
    numbers = f"{done.tokens} tokens, {done.tokens_per_s:,.0f} per second, {done.weight_bytes / 1e6:,.1f} MB of weights"
    print(f"{numbers}; {ENDS[done.finish]}", file=sys.stderr)
    return 0
