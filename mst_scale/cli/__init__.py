"""The `mst` command: what can be done with data, configs and runs outside of training.

Exit codes: 0 done, 1 it failed, 2 used wrongly. A user's mistake is one line; MST_TRACEBACK=1 shows where it arose.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from mst_scale import distributed
from mst_scale.distributed.parser import Parser

VERBS = ("data", "flops", "plan", "inspect", "report", "reshape", "export", "eval", "bench")


def parser() -> Parser:
    top = Parser(
        prog="mst", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog="mst VERB --help"
    )
    subparsers = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in VERBS:
        importlib.import_module(f"mst_scale.cli.{verb}").add(subparsers)
    return top


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
        if distributed.several():
            distributed.end(error)
        if not distributed.is_plain(error):
            raise
        return _say(distributed.one_line(error), distributed.exit_code(error))


def _say(message: str, code: int) -> int:
    print(f"mst: {message}", file=sys.stderr)
    return code
