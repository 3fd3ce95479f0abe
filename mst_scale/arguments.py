"""What does a wrong option cost? One line that names the way out, exit code 2, and no page of usage."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

from mst_scale import distributed


def at_least(least: int | float) -> Callable[[str], int | float]:
    """The type of an option that takes such numbers; whole ones where `least` is whole."""
    kind = type(least)

    def number(text: str) -> int | float:
        value = kind(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {text}")
        return value

    number.__name__ = kind.__name__  # argparse: "invalid int value"
    return number


class Parser(argparse.ArgumentParser):
    """argparse, except that a mistake is one line, and that of several ranks only the first says it."""

    def error(self, message: str) -> NoReturn:
        told = f"{message} ({self.prog} --help lists what there is)"
        if distributed.several():
            distributed.end(ValueError(told))
        self.exit(2, f"{self.prog}: {told}\n")
