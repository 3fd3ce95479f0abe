"""The `mst` command prepares data, plans and launches runs, and inspects, exports and evaluates the results.

Exit codes: 0 success, 1 failure, 2 usage error, 3 diverged, 4 corrupted. Usage errors print one line; set
MST_TRACEBACK=1 for a full traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import mst_scale
from mst_scale import comm
from mst_scale.comm.parser import Parser

VERBS = {  # command -> module of this package
    "doctor": "doctor",
    "data": "data",
    "flops": "flops",
    "plan": "plan",
    "launch": "launch",
    "inspect": "checkpoints",
    "masks": "checkpoints",
    "reshape": "checkpoints",
    "export": "checkpoints",
    "report": "report",
    "eval": "eval",
    "generate": "generate",
    "bench": "bench",
}


def parser() -> Parser:
    """Return the parser of `mst` with all its commands."""
    top = Parser(
        prog="mst",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="mst COMMAND --help describes a command and shows examples.",
    )
    top.add_argument("--version", action=_Version, nargs=0, help="print the versions of mst_scale, torch and DeepSpeed")
    subparsers = top.add_subparsers(dest="verb", metavar="COMMAND", parser_class=_Command)
    for name in dict.fromkeys(VERBS.values()):
        importlib.import_module(f"mst_scale.cli.{name}").add(subparsers)
    return top


def add_command(
    subparsers: Any, name: str, run: Callable[[argparse.Namespace], int], help: str, text: str
) -> argparse.ArgumentParser:
    """Add a command and return its parser.

    Args:
        subparsers: The subparsers of `mst`.
        name: The name of the command.
        run: The function that runs it and returns the exit code.
        help: One line for `mst --help`.
        text: The help of the command: a description and, after a line "examples:", examples.
    """
    about, _, examples = text.partition("\nexamples:\n")
    command: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=help,
        description=about,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    return command


def values_of(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the values of these options by name, as arguments of a function with the same names."""
    return {name: getattr(args, name) for name in names}


def align(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Format rows as lines with aligned columns: those in `left` are left-aligned, all others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if k in left else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


class _Command(Parser):
    """The parser of one command, which reports unknown options itself, since it knows similar ones."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as `Parser` does; an unknown option is an error."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest


class _Version(argparse.Action):
    """Prints the installed versions from the packages' metadata, without importing them."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from mst_scale.machine import installed

        torch, deepspeed = (installed(package) or "is not installed" for package in ("torch", "deepspeed"))
        print(f"mst_scale {mst_scale.__version__} (torch {torch}, DeepSpeed {deepspeed})")
        parser.exit()


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    try:
        try:
            args = parser().parse_args(argv)
            if args.verb is None:
                parser().print_help()
                return 2
            code = int(args.run(args))
        except SystemExit:  # after --help
            _flush()
            raise
        _flush()
        return code
    except KeyboardInterrupt:
        return _fail("stopped", 1)
    except BrokenPipeError:  # the reader (head, less) has exited
        _discard_output()
        return 1
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            _discard_output()
        if comm.several():
            comm.end(error)
        code = comm.exit_code(error)
        if comm.is_plain(error):
            return _fail(comm.one_line(error), code)
        if code == 1:
            raise
        traceback.print_exception(error)  # MST_TRACEBACK=1
        return code


def _flush() -> None:
    if sys.stdout is not None:  # None if the command was started with a closed stdout
        sys.stdout.flush()


def _discard_output() -> None:
    """Write what is left of stdout nowhere: Python would try again at its end, and exit with code 120."""
    with contextlib.suppress(OSError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> int:
    print(f"mst: {message}", file=sys.stderr)
    return code
