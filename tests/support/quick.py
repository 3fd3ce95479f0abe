"""Chooses the cases of a parametrized test that the quick run keeps, and CI of tests with several processes.

A test with three or more axes (one `parametrize` is one axis) keeps cases in which every pair of values of two axes
occurs; a test with one or two keeps cases in which every value of every argument occurs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from itertools import combinations
from typing import Any

import pytest

QUICK = "QUICK_TESTS"


def is_quick() -> bool:
    """Whether this is the quick run, also in processes that tests start."""
    return QUICK in os.environ


def cover(cases: Sequence[tuple[Hashable, ...]], size: int) -> list[int]:
    """Return the positions of a small subset of cases, by the greedy method: the next case covers most of what is left.

    Args:
        cases: One tuple of values for each case; all of them have the same length.
        size: How many values together have to occur: 1 for every value, 2 for every pair of values.
    """
    if not cases or not cases[0]:
        return list(range(len(cases)))
    which = list(combinations(range(len(cases[0])), min(size, len(cases[0]))))
    parts = [{(places, *(case[i] for i in places)) for places in which} for case in cases]  # what a case covers
    left = set().union(*parts)
    chosen: list[int] = []
    while left:
        best = max(range(len(cases)), key=lambda i: len(parts[i] & left))  # the first of several
        chosen.append(best)
        left -= parts[best]
    return sorted(chosen)


def quick_cases(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of one test that represent all of them."""
    calls = [getattr(item, "callspec", None) for item in items]
    if any(call is None for call in calls):
        return list(items)
    axes = len(calls[0]._idlist)
    values = [tuple(call._idlist) if axes > 2 else tuple(map(_key, call.params.values())) for call in calls]
    return [items[i] for i in cover(values, 2 if axes > 2 else 1)]


def _key(value: Any) -> Hashable:
    """Equal for equal values; True is not 1, and 1.0 is not either."""
    if isinstance(value, str | int | float | None):
        return type(value), value
    try:
        return type(value), repr(value)
    except ValueError:  # it holds an integer of more digits than Python writes
        return type(value), id(value)


def selected(request: pytest.FixtureRequest, test: Callable[..., Any]) -> bool:
    """Whether a test of the requesting module runs, in any of its cases: what no test reads need not be computed."""
    return any(getattr(item, "function", None) is test for item in request.session.items)
