"""The errors that decide how a program ends: a wrong use, a run that diverged, or a damaged file.

UserError        wrong use: one line that says how to fix it, exit code 2, never restarted
DivergedError    the loss or a score is not finite: exit code 3
anything else    a crash: a traceback and exit code 1, which launchers restart
"""

from __future__ import annotations


class UserError(ValueError):
    """The user can fix this: the message names what is wrong and what to do.

    It is a `ValueError`, so that programs which call the package as a library catch it as they always have. The
    reverse does not hold: a `ValueError` raised by torch, numpy, json or DeepSpeed is a crash, not wrong use.
    """


class DivergedError(ArithmeticError):
    """The loss or a score is not finite, so that training cannot continue from here."""
