"""The `mst` command: what can be done with data, configs and runs.

One file a verb; plan_text is how `mst plan` speaks.

Exit codes: 0 success, 1 failure, 2 usage error, 3 diverged. Usage errors print one line; set MST_TRACEBACK=1 for a full
traceback.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any

import mst_scale
from mst_scale import comm
from mst_scale.comm.parser import Parser

VERBS = (
    "doctor",
    "data",
    "flops",
    "plan",
    "launch",
    "inspect",
    "masks",
    "report",
    "reshape",
    "export",
    "eval",
    "bench",
)


def parser() -> Parser:
    top = Parser(
        prog="mst", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog="mst VERB --help"
    )
    top.add_argument("--version", action=Version, nargs=0, help="mst_scale, and what it runs on")
    subparsers = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in VERBS:
        importlib.import_module(f"mst_scale.cli.{verb}").add(subparsers)
    return top


class Version(argparse.Action):
    """Says what is installed, as its metadata tells it: nothing of it is imported."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"mst_scale {mst_scale.__version__} (torch {_installed('torch')}, DeepSpeed {_installed('deepspeed')})")
        parser.exit()


def _installed(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "is not installed"


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return _say("stopped", 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader (head, less) has left
        return 1
    except Exception as error:
        if comm.several():
            comm.end(error)
        if not comm.is_plain(error):
            raise
        return _say(comm.one_line(error), comm.exit_code(error))


def _say(message: str, code: int) -> int:
    print(f"mst: {message}", file=sys.stderr)
    return code
