"""Errors that determine how a program ends: a usage error, a diverged run or a damaged file.

UserError        usage error: one line that says how to fix it, exit code 2, never restarted
DivergedError    the loss or a score is not finite: one line, exit code 3; restarted, unless it recurs at the same step
CorruptedError   a rank has computed or kept a wrong value: one line, exit code 4, restarted from a verified checkpoint
Damaged          a file is corrupt: one line, exit code 1
OSError          the machine failed (disk full, I/O error, network): one line, exit code 1, restarted
anything else    a crash: a traceback and exit code 1, restarted
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

SHOWN = 80  # characters of a value in a message
SIMILAR = 0.6  # of two names, from which on one may be meant by the other


class UserError(ValueError):
    """A mistake that the user can fix; the message says what is wrong and what to do.

    It is a `ValueError`, so programs that use the package as a library can catch it as one. The reverse does not hold:
    a `ValueError` raised by torch, numpy, json or DeepSpeed is a crash, not a usage error.
    """


class DivergedError(ArithmeticError):
    """The loss or a score is not finite, so training cannot continue."""


class CorruptedError(Exception):
    """A rank has computed or kept a wrong value, as faulty hardware does. All ranks raise it together.

    Attributes:
        kind: "computation", "memory" or "replicas": which comparison has found it.
        value: The name of a wrong value.
        ranks: The ranks that are wrong, or if `decided` is False, those of which some are.
        hosts: Their machines.
        step: The step at which it was found.
        verified: The last step before it that was verified.
        decided: Whether it is known which ranks are wrong.
    """

    def __init__(
        self, message: str, *, kind: str, value: str, ranks: Sequence[int], hosts: Sequence[str], step: int,
        verified: int, decided: bool,
    ):  # fmt: skip
        super().__init__(message)
        self.kind, self.value, self.ranks, self.hosts = kind, value, list(ranks), list(hosts)
        self.step, self.verified, self.decided = step, verified, decided
        self.details: dict[str, Any] = {
            "step": step, "kind": kind, "value": value, "ranks": self.ranks, "hosts": self.hosts, "decided": decided,
            "verified": verified,
        }  # fmt: skip
        """All of these, as an event of a run records them."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a rank send the error to others."""
        return functools.partial(type(self), **self.details), self.args


class Damaged(ValueError):
    """A file is corrupt, for example truncated or with a flipped bit. This is not a usage error."""


def format_value(value: Any) -> str:
    """Format a value for a message: on one line, and shortened.

    Args:
        value: of a config key or an argument.
    """
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**SHOWN:
        return f"a number of {math.floor(abs(value).bit_length() * math.log10(2)):,} digits"
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is the most similar to a mistyped one; None if none is similar.

    Args:
        name: what the user has typed.
        known: the valid names.
    """
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=SIMILAR)), None)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ": the nearest is 'gpt2_small'" for a message, or nothing if no known name is similar.

    Args:
        name: what the user has typed.
        known: the valid names.
    """
    near = nearest(name, known)
    return "" if near is None else f": the nearest is {near!r}"
