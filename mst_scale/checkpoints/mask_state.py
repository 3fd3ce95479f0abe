"""Holds the masks of a run on this rank, and everything that a checkpoint stores about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from mst_scale.comm.exchange import Exchange, Exchanges, Stages
from mst_scale.mixed_growing.blocks import count_active
from mst_scale.mixed_growing.config import grid_shape
from mst_scale.mixed_growing.evolve import Change
from mst_scale.mixed_growing.masks import MaskSet
from mst_scale.sparsity_variation import Schedule


@dataclass
class MaskState:
    """The masks of this rank's slices, and the facts about the whole model that are derived from them.

    Methods that say "collective" are called on all ranks together.
    """

    masks: MaskSet
    exchange: Exchanges
    """For each mask, the ranks that hold the other parts of its parameter."""
    everyone: Exchange
    """All ranks that save and load together, including replicas."""
    stages: Stages
    writes: bool
    """Whether this rank's shards are written into a checkpoint: at ZeRO-0, only those of one replica are."""
    schedule: Schedule
    seed: int
    granularity: dict[str, int] | str
    """"element", "channel" or {"block": B, "min_blocks": m}."""
    given: bool = False
    """Whether the masks are given and kept (method "fixed"), so that no schedule says how sparse they are."""
    numels: dict[str, int] = field(default_factory=dict)
    """Weights of every masked parameter of the model, in the order of layers."""
    settled: int = 0
    """The last step whose topology work is done."""
    digests: list[int] = field(default_factory=list)
    """Digests of the whole masks of this rank's parameters."""
    active: dict[str, int] = field(default_factory=dict)
    """Active weights of every masked parameter of the model."""
    shares: dict[str, float] = field(default_factory=dict)
    """The fraction of each of them that products compute with: of its weights, or of its blocks."""
    changes: Sequence[Change] = ()
    """What the last topology step did to each parameter of the model …"""
    changed_at: int = 0
    """… and the step that it ended; 0 if there was none."""

    @classmethod
    def none(cls, schedule: Schedule) -> MaskState:
        """Return the state of a run without masks."""
        alone = Exchange()
        return cls(MaskSet([]), Exchanges([]), alone, Stages(None), alone.rank == 0, schedule, 0, "element")

    def refresh(self) -> None:
        """Recompute digests and counts after masks have changed (collective)."""
        self.digests = self.masks.digests(self.exchange)
        self.active = self.stages.joined({mask.name: mask.active for mask in self.masks})
        self.shares = self.stages.joined(dict(zip(self.masks.names, self._shares(), strict=True)))

    def _shares(self) -> list[float]:
        if isinstance(self.granularity, str):
            return [mask.active / mask.numel for mask in self.masks]
        side = self.granularity["block"]
        blocks = [prod(grid_shape(mask.shape, side)) for mask in self.masks]
        active = [count_active(mask, side, self.exchange.of[i]) for i, mask in enumerate(self.masks)]
        return [count / of for count, of in zip(active, blocks, strict=True)]

    @property
    def sparsity(self) -> float:
        """Share of the masked parameters' weights that are inactive, over the whole model."""
        total = sum(self.numels.values())
        return 1 - sum(self.active.values()) / total if total else 0.0

    @property
    def dense(self) -> bool:
        """Whether no weight of the model is inactive."""
        return self.active == self.numels

    def densities(self) -> dict[str, float]:
        """Return the density of every masked parameter of the model as its products count: of weights, or of blocks."""
        return {name: self.shares[name] for name in self.numels}

    def gather_digests(self) -> dict[str, int]:
        """Return the digest of every mask of the model, in the order of layers (collective)."""
        return self.stages.joined(dict(zip(self.masks.names, self.digests, strict=True)))

    def differing_ties(self) -> list[str]:
        """Return the names of tied matrices whose masks differ between stages of a pipeline (collective)."""
        return self.stages.differing(dict(zip(self.masks.names, self.digests, strict=True)))

    def number_files(self) -> tuple[int, int | None]:
        """Return how many ranks write a mask file, and this rank's number among them or None (collective)."""
        writes = self.everyone.all(self.writes)
        return sum(writes), sum(writes[: self.everyone.rank]) if self.writes else None
