"""Says who shares which layers: the ranks of a slice or of all slices, and the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mst_scale import zero_shards
from mst_scale.dead_units import Tally
from mst_scale.mixed_growing.exchange import Exchange, Exchanges

T = TypeVar("T")


class Stages:
    """One rank of each stage, in their order; `group` None: there is no pipeline, and nothing is sent."""

    def __init__(self, group: Any):
        self.group, self.exchange = group, Exchange(group)

    def joined(self, mine: Mapping[str, T]) -> dict[str, T]:
        """What all stages know by name, in the order of the layers. A tied layer stands in two, with one value."""
        return {name: value for known in self.exchange.all(dict(mine)) for name, value in known.items()}

    def added(self, mine: Tally) -> Tally:
        """Counts by kind, over all stages."""
        total: Tally = {}
        for known in self.exchange.all(mine):
            for kind, (some, of) in known.items():
                before = total.get(kind, (0, 0))
                total[kind] = (before[0] + some, before[1] + of)
        return total

    def together(self, what: Callable[[], None], everyone: Exchange) -> None:
        """`what()` on all ranks; where it fails on those of one stage it fails on all."""
        if self.group is None:  # all ranks come to the same verdict
            what()
            return
        error = None
        try:
            what()
        except Exception as met:  # whatever it is: the other stages must not wait for this rank
            error = met
        everyone.raise_first(error)


def exchanges_of(
    shards: zero_shards.Shards, groups: zero_shards.Groups, device: torch.device, through: Any = dist
) -> Exchanges:
    """For each parameter the ranks that share its weights: those of one slice, or of all where its layer is cut."""
    of_slice, of_all = (Exchange(group, device, through) for group in (groups.zero, groups.slices))
    return Exchanges([of_all if zero_shards.is_cut(p) else of_slice for p in shards.parameters])
