"""Counts the dead units of each kind and puts the counts into words; without torch, for code that only reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

KINDS = {"mlp": "MLP neurons", "value": "value channels", "query_key": "query-key channels"}
Tally = dict[str, tuple[int, int]]
"""(dead, all) units by kind."""


def total(counts: Tally) -> tuple[int, int]:
    """(dead, all) over kinds."""
    return sum(dead for dead, _ in counts.values()), sum(count for _, count in counts.values())


def in_words(counts: Mapping[str, Iterable[int]]) -> str:
    """`17 of 512 MLP neurons, 14 of 128 value channels`."""
    return ", ".join(f"{dead:,} of {count:,} {KINDS.get(kind, kind)}" for kind, (dead, count) in counts.items())
