"""Describes an error in one line and maps its class to an exit code: 2 wrong use, 3 divergence, 1 any other failure."""

from __future__ import annotations

import errno
import math
import os
import unicodedata
from typing import Any

from mst_scale.errors import Damaged, DivergedError, UserError

# A path that cannot be right, whatever the machine does.
WRONG_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
SHOWN = 80  # characters of a value in a message
LONGEST = 300  # characters of a library's message


class SharedMistake(UserError):
    """A user's mistake that every rank raises at the same place: rank 0 alone says it."""


class FailedElsewhere(Exception):
    """Another rank has failed and says why; this one ends with the same exit code, in silence."""


def exit_code(error: BaseException) -> int:
    """Return 2 for wrong use, 3 for a run that diverged, and 1 for every other failure, which may be retried."""
    if isinstance(error, FailedElsewhere):
        return int(error.args[0])
    if isinstance(error, OSError):
        return 2 if error.errno in WRONG_PATHS else 1
    if isinstance(error, DivergedError):
        return 3
    return 2 if isinstance(error, UserError) else 1


def is_plain(error: BaseException) -> bool:
    """Whether one line says it all, because the class of the error says that it was raised for a person to read.

    Everything else is a crash, and its traceback is wanted. `MST_TRACEBACK=1` asks for tracebacks of all errors.
    """
    if os.environ.get("MST_TRACEBACK", "").lower() not in ("", "0", "false", "no", "off"):
        return False
    plain = (UserError, DivergedError, Damaged, OSError, MemoryError)
    return isinstance(error, plain) or _is_out_of_memory(error)


def _is_out_of_memory(error: BaseException) -> bool:
    """torch says it of a GPU by a class of its own, and of the CPU in words alone."""
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def one_line(error: BaseException) -> str:
    """What an error says; of several lines, which only libraries write, as much as can be read at once."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    said = lines[0] if len(lines) == 1 else " ".join(lines)[:LONGEST]
    if _is_out_of_memory(error):
        said = f"out of memory: lower train_micro_batch_size_per_gpu or the model, or offload ({said[:LONGEST]})"
    return said or type(error).__name__


def shown(value: Any) -> str:
    """A value in a message: on one line, and not without end."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**SHOWN:
        return f"a number of {math.floor(abs(value).bit_length() * math.log10(2)):,} digits"
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def refuse_unprintable(what: str, text: str) -> None:
    """Line breaks, other control characters, and what is not valid Unicode: no message and no file could hold them."""
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
            name = "a line break" if character in "\n\r" else f"the character {character!a}"
            raise UserError(f"{what} must not hold {name}: {shown(text)}")
