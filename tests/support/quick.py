"""Chooses the cases of a parametrized test that the quick run keeps.

A test with three or more axes (one `parametrize` is one axis) keeps cases in which every pair of values of two axes
occurs, a test with two axes keeps cases in which every value occurs, and a test with one axis keeps all of its cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations


def cover(cases: Sequence[tuple[str, ...]]) -> list[int]:
    """Return the positions of a small subset of cases, by the greedy method: the next case covers most of what is left.

    Args:
        cases: One tuple of values for each case; all of them have the same length.
    """
    axes = len(cases[0]) if cases else 0
    if axes < 2:
        return list(range(len(cases)))
    size = min(2, axes - 1)
    parts = [
        {(which, *(case[i] for i in which)) for which in combinations(range(axes), size)} for case in cases
    ]  # what a case covers
    left = set().union(*parts)
    chosen: list[int] = []
    while left:
        best = max(range(len(cases)), key=lambda i: len(parts[i] & left))  # the first of several
        chosen.append(best)
        left -= parts[best]
    return sorted(chosen)
