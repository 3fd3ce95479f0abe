"""`mst data`: tokenizes text into a corpus that a run can read."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from mst_scale.cli import add_command, values_of
from mst_scale.comm.parser import validate_folder
from mst_scale.errors import UserError, format_value

TEXT = """\
Tokenize text into a corpus folder: train.bin and val.bin (nanoGPT's layout) and meta.json.

SOURCE is one of
  stdlib          the source code of the running Python: real text that every machine has (the default)
  package:NAME    the source code of an installed package: the same text on every machine with the same version
  openwebtext     the paper's data set, with nanoGPT's train/validation split; 40 GB of text
  NAME            any other data set on the Hugging Face hub (--subset, --split, --revision, --stream)
  PATH...         files, globs and folders: .txt, .jsonl, .parquet, also .json, .csv, .arrow, .jsonl.gz/.zst/.xz/.bz2;
                  or a folder that `datasets` has written with save_to_disk

TOKENIZER is `byte` (256 bytes and an end-of-text token), `gpt2` or another encoding of tiktoken, or the path of a
.tiktoken rank file, which is split by GPT-2's pattern: r50k_base.tiktoken gives the ids of gpt2 without a network. BERT
can use any of these ([MASK] is then the last id of the model), or word pieces: `bert-base-uncased`, `bert-base-cased`
or the path of a vocab.txt. Masks are drawn during training, so the corpus is the same for GPT and BERT.

If the command is killed, run it again to complete the corpus. A complete corpus is used as it is; if the names or sizes
of the source's files have changed, this is an error. Changed text of equal size is not noticed: --force builds again.

examples:
  mst data                                              # corpora/stdlib-byte, in seconds
  mst data package:sympy                                # corpora/sympy-byte, which the demo trains on
  mst data openwebtext --out corpora/owt                # the paper's corpus; takes hours on a few cores
  mst data 'books/*.txt' --tokenizer gpt2 --out corpora/books --val-fraction 0.02
  mst data 'books/*.txt' --tokenizer vocab.txt --out corpora/books-bert
  mst data crawl.jsonl.zst --text-key content --out corpora/crawl
  mst data HuggingFaceFW/fineweb-edu --subset sample-10BT --out corpora/fineweb
  mst data HuggingFaceFW/fineweb-edu --stream --max-bytes 2G --out corpora/sample
  mst data roneneldan/TinyStories --val-split validation --out corpora/stories
  mst data --verify corpora/owt                         # compare the files with the checksums in meta.json
"""

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def add(subparsers: Any) -> None:
    """Add the command to the parser."""
    option = add_command(subparsers, "data", run, "tokenize text into a corpus", TEXT).add_argument
    option("source", nargs="*", metavar="SOURCE", help="text to read (default: stdlib)")
    option("--out", metavar="DIR", help="the corpus folder (default: corpora/SOURCE-TOKENIZER)")
    option("--tokenizer", metavar="TOKENIZER", help="default: byte for stdlib and packages, else gpt2")
    option("--text-key", default="text", metavar="KEY", help="JSON key or column that holds the text (default: text)")
    option(
        "--val-fraction",
        type=float,
        metavar="F",
        help="fraction for validation (default: 0.0005 for openwebtext, 0.02 for stdlib and packages, else 0.01)",
    )
    option("--max-bytes", type=parse_bytes, metavar="N", help="stop reading after N bytes: 500K, 20M, 3G")
    option(
        "--seed",
        type=int,
        default=2357,
        metavar="N",
        help="seed of the split, for text and the hub's tables (default: 2357, as in nanoGPT)",
    )
    option("--subset", metavar="NAME", help="hub: the configuration of the data set")
    option("--split", default="train", metavar="NAME", help="hub: the split to read (default: train)")
    option("--val-split", metavar="NAME", help="hub: the validation split; its part of --max-bytes is --val-fraction")
    option("--revision", metavar="REV", help="hub: a commit, tag or branch")
    option("--stream", action="store_true", help="hub: read while downloading, without keeping a copy")
    option("--workers", type=int, metavar="N", help="processes (default: all cores); the result does not depend on it")
    option("--force", action="store_true", help="build the corpus again, whatever is in the folder")
    option("--verify", metavar="DIR", help="check a corpus against its checksums, and do nothing else")
    option("--json", action="store_true", help="print meta.json on one line")


def run(args: argparse.Namespace) -> int:
    """Build or verify a corpus."""
    if args.verify is not None:
        return _verify(args)
    from mst_scale.data.prepare import prepare
    from mst_scale.data.recipe import PACKAGE, STDLIB, Recipe

    options = [field.name for field in fields(Recipe) if field.name != "source"]
    recipe = Recipe(args.source or STDLIB, **values_of(args, *options))
    source = recipe.paths[0].removeprefix(PACKAGE)
    out = Path(args.out or Path("corpora", f"{_plain(source)}-{_plain(recipe.tokenizer_name)}"))
    validate_folder("--out", out)
    meta = prepare(recipe, out, workers=args.workers, force=args.force)
    print(json.dumps(meta) if args.json else _summary(out, meta))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from mst_scale.data.corpus import verify
    from mst_scale.data.recipe import Recipe

    stated = [one.name for one in fields(Recipe) if one.name != "source" and getattr(args, one.name) != one.default]
    if args.source or args.out or args.force or args.workers or stated:
        raise UserError("--verify takes a corpus folder and nothing else: mst data --verify DIR")
    folder = Path(args.verify)
    meta = verify(folder)
    print(json.dumps(meta) if args.json else f"{_summary(folder, meta)}\nall checksums match")
    return 0


def parse_bytes(text: str) -> int:
    """Return the number of bytes that 500K, 20M or 3G stands for; the type of an option."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    try:
        value = int(float(number) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        value = 0
    if not 1 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{format_value(text)} is not a number of bytes like 500K, 20M or 3G")
    return value


def _plain(name: str) -> str:
    """Return the last part of a path or hub name, with "-" for characters that do not belong in a folder's name."""
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in Path(name).stem).strip("-") or "corpus"


def _summary(out: Path, meta: dict[str, Any]) -> str:
    lines = [f"{out}: tokenizer {meta['tokenizer']}, {meta['vocab_size']:,} ids, {meta['dtype']}"]
    for name, split in meta["splits"].items():
        lines.append(f"  {name:5}  {split['tokens']:>14,} tokens  {split['documents']:>11,} documents  {split['file']}")
    return "\n".join(lines)
