"""Dead units: neurons and channels of which so many weights are zero that the rest get no gradient.

units   which lines of which matrices make up a unit, when a unit is dead, and how many are, from slices of the weights
live    units of a model in training: counted, revived when their masks are removed, or masked as a whole (`Channels`)

This file does not import torch, for code that only reads counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

KINDS = {"mlp": "MLP neurons", "value": "value channels", "query_key": "query-key channels"}
Tally = dict[str, tuple[int, int]]
"""(dead, all) units by kind."""


def total(counts: Tally) -> tuple[int, int]:
    """Return the (dead, all) units of all kinds together."""
    return sum(dead for dead, _ in counts.values()), sum(count for _, count in counts.values())


def format_counts(counts: Mapping[str, Iterable[int]]) -> str:
    """Format counts by kind, as in `17 of 512 MLP neurons, 14 of 128 value channels`."""
    return ", ".join(f"{dead:,} of {count:,} {KINDS.get(kind, kind)}" for kind, (dead, count) in counts.items())
