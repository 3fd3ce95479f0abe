"""Parses command lines; an invalid option is one line that says what is valid, on one rank, and exit code 2."""

from __future__ import annotations

import argparse
import errno
import os
import re
import stat
import sys
import tempfile
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from mst_scale import _deprecated
from mst_scale.comm.exits import end
from mst_scale.comm.launch import launched_rank, several
from mst_scale.comm.messages import logger
from mst_scale.errors import UserError, format_value, suggestion


def at_least(least: int | float) -> Callable[[str], int | float]:
    """Return the `type` of an option whose value is at least `least`: an integer if `least` is one."""
    kind = type(least)

    def number(text: str) -> int | float:
        value = kind(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {text}")
        return value

    number.__name__ = kind.__name__  # argparse: "invalid int value"
    return number


def validate_printable(what: str, text: str) -> None:
    """Check that a text has no line breaks, other control characters or invalid Unicode.

    Raises:
        UserError: if it has one.
    """
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
            name = "a line break" if character in "\n\r" else f"the character {character!a}"
            raise UserError(f"{what} must not contain {name}: {format_value(text)}")


def validate_folder(option: str, path: Path) -> None:
    """Check that a folder can be created at `path`.

    Raises:
        UserError: if a parent is a file or a broken link, or the name is invalid.
    """
    for place in (path, *path.parents):
        try:
            if stat.S_ISDIR(os.stat(place).st_mode):
                return
        except (FileNotFoundError, NotADirectoryError):
            if not os.path.lexists(place):
                continue
        except PermissionError:
            return  # reported when the folder is created
        except OSError as error:
            raise UserError(f"{option} {format_value(str(path))}: {error.strerror}; choose another folder") from None
        raise UserError(
            f"{option} {format_value(str(path))}: {format_value(str(place))} is not a folder; choose another path"
        )


def validate_new_folder(option: str, path: Path) -> None:
    """Check that a folder exists at `path` or can be created there, by creating and removing one next to it.

    Raises:
        UserError: if it cannot.
    """
    validate_folder(option, path)
    if path.is_dir():
        return
    there = next(folder for folder in path.absolute().parents if folder.is_dir())
    try:
        tempfile.TemporaryDirectory(dir=there).cleanup()
    except OSError as error:
        if error.errno in FULL:
            return  # space may be made until it is needed
        raise UserError(f"{option} {path} cannot be created: {error.strerror}; choose another folder") from None


FULL = (errno.ENOSPC, errno.EDQUOT)
CHECKED_ELSEWHERE = ("set", "prompt")  # by the config, and by the tokenizer; a prompt may have several lines


class Parser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` whose errors are one line, printed by the first of several ranks.

    Line breaks of descriptions, which are docstrings, are kept.
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**options, allow_abbrev=False)  # an abbreviation would escape the launchers' checks

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but replace deprecated option names and reject unprintable values."""
        given = list(sys.argv[1:] if args is None else args)
        found, rest = super().parse_known_args([self._renamed(word, given) for word in given], namespace)
        for option, value in vars(found).items():
            for text in value if isinstance(value, list) else [value]:
                if option not in CHECKED_ELSEWHERE and isinstance(text, str | Path):
                    try:
                        validate_printable(f"argument {option}", str(text))
                    except UserError as error:
                        self.error(str(error))
        return found, rest

    def _renamed(self, word: str, given: list[str]) -> str:
        """Return an argument with a deprecated option name replaced, and log a warning."""
        old, equals, value = word.partition("=")
        new = _deprecated.FLAGS.get(old)
        if new not in self._option_string_actions or old in self._option_string_actions:
            return word
        if new in given:
            self.error(f"{old} is the old name of {new}: use only {new}")
        logger.warning("%s is now called %s; the old name will be removed in mst_scale 0.3", old, new)
        return f"{new}{equals}{value}"

    def print_help(self, file: Any = None) -> None:
        """Print the help on rank 0 only."""
        if launched_rank() == 0:
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        """Print an error as one line, on one rank, and exit with code 2."""
        if found := re.match(r"unrecognized arguments: (--[^\s=]+)", message):
            message += suggestion(found[1], self._option_string_actions)
        elif found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            message += suggestion(found[1], re.findall("'([^']*)'", found[2]))
        printable = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)  # it quotes the arguments
        text = f"{printable} (see {self.prog} --help)"
        if several():
            end(UserError(text))
        self.exit(2, f"{self.prog}: {text}\n")
