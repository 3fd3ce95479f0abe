"""The errors that decide how a program ends: a wrong use, a run that diverged, or a damaged file.

UserError        wrong use: one line that says how to fix it, exit code 2, never restarted
DivergedError    the loss or a score is not finite: one line, exit code 3; restarted, unless it recurs at the same step
Damaged          a file is not what was written: one line, exit code 1
OSError          the machine failed (disk full, I/O error, network): one line, exit code 1, restarted
anything else    a crash: a traceback and exit code 1, restarted
"""

from __future__ import annotations

import math
from typing import Any

SHOWN = 80  # characters of a value in a message


class UserError(ValueError):
    """The user can fix this: the message names what is wrong and what to do.

    It is a `ValueError`, so that programs which call the package as a library catch it as they always have. The
    reverse does not hold: a `ValueError` raised by torch, numpy, json or DeepSpeed is a crash, not wrong use.
    """


class DivergedError(ArithmeticError):
    """The loss or a score is not finite, so that training cannot continue from here."""


class Damaged(ValueError):
    """A file does not hold what was written to it (cut short, a flipped bit). Nobody has used anything wrongly."""


def format_value(value: Any) -> str:
    """Return a value for a message: on one line, and shortened."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**SHOWN:
        return f"a number of {math.floor(abs(value).bit_length() * math.log10(2)):,} digits"
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
