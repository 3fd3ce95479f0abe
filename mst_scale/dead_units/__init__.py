"""Dead units: neurons and channels with so many zero weights that the others receive no gradient.

units   finds the units of a model, and counts the dead ones from slices of the weights
live    counts the units of a model in training, revives them when masks are removed, or masks whole units (`Channels`)

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
