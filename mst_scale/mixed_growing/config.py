"""What a user can say of Mixed-Growing: the block `mst.topology`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from mst_scale.errors import UserError
from mst_scale.mixed_growing.policies import POLICIES, Policy, policy

BLOCK_SIDES = (4, 8, 16, 32, 64, 128)  # the GPU's kernels take 16 and more; 4 and 8 are there to compare with


@dataclass(frozen=True)
class BlockGranularity:
    """Whole blocks of `block` × `block` weights live and die together."""

    block: int = 16
    min_blocks: int = 2  # alive in every block row and column; 0: no such bound

    def __post_init__(self) -> None:
        if self.block not in BLOCK_SIDES:
            raise UserError(
                f"mst.topology.granularity.block must be one of {', '.join(map(str, BLOCK_SIDES))}, not {self.block}"
            )
        if self.min_blocks < 0:
            raise UserError(f"mst.topology.granularity.min_blocks must be at least 0, not {self.min_blocks}")


@dataclass(frozen=True)
class TopologyConfig:
    """Mixed-Growing: how often the topology moves, how far, and by which scores."""

    interval: int | None = None  # None: a fifth of the shortest gradual phase, but 25 to 100 steps
    policy: str = "mst"  # mst, rigl, set, mest, snfs, static, gmp, or one that was registered
    granularity: Literal["element", "channel"] | BlockGranularity = "element"  # channel: dead_units/channels.py
    update_fraction: float = 0.3
    update_schedule: Literal["constant", "1-cosine", "2-cosine", "n-cosine", "decay-n-cosine"] = "decay-n-cosine"
    update_decay: float = 0.5
    random_ratio: float | None = None  # R: the share of growth drawn at random; None: the policy's own (mst: 0.25)
    mest_lambda: float = 1.0
    replaces_update: bool = False  # a topology step takes no optimizer update, as in RigL's and the authors' code
    regrow: bool = True  # a weight pruned in this very step may grow back, with its value
    grown_moments: Literal["seeded", "living", "zero"] = "seeded"  # Adam's v of a grown weight (engine.second_moments)
    fresh_momentum: bool = False  # where masks go, all first moments of their matrices begin at 0, as in AC/DC
    wake_dead_units: bool = True  # where masks go: random incoming weights for units whose weights are all zero
    # ITOP: a second bit per weight in runs that start sparse, none in the others
    track_coverage: bool = field(default=True, metadata={"changes_result": False})
    check_every: int = field(default=1_000, metadata={"changes_result": False})  # steps between drift checks; 0: never
    rezero: bool = False  # zero inactive weights and their states after every update: for optimizers that move them

    @property
    def chosen(self) -> Policy:
        """What is pruned and grown, with the shares that are stated here."""
        return policy(
            self.policy,
            random_share=self.random_ratio,
            mest_share=self.mest_lambda if self.policy == "mest" else None,
        )

    @property
    def grows_by_dense_gradients(self) -> bool:
        """Whether a topology step that grows needs gradients of weights that are masked."""
        return self.chosen.grows_by_gradient or self.grown_moments == "seeded"

    def reads_dense_gradients(self, update_fraction: float, denser: bool) -> bool:
        """Whether a topology step with this share of swaps does; `denser`: its target is above what is alive."""
        grows = denser or (self.chosen.swaps and update_fraction > 0)
        return grows and self.grows_by_dense_gradients

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            near = difflib.get_close_matches(self.policy, POLICIES, n=1, cutoff=0.0)[0]
            known = ", ".join(POLICIES)
            raise UserError(f"mst.topology.policy = {self.policy!r}: the nearest is {near!r} (there are {known})")
        if self.interval is not None and self.interval < 1:
            raise UserError(f"mst.topology.interval must be at least 1, not {self.interval}")
        for name in ("mest_lambda", "check_every"):
            if getattr(self, name) < 0:
                raise UserError(f"mst.topology.{name} must be at least 0, not {getattr(self, name)}")
        for name in ("update_fraction", "random_ratio", "update_decay"):
            if not 0.0 <= (getattr(self, name) or 0.0) <= 1.0:
                raise UserError(f"mst.topology.{name} must lie in [0, 1], not {getattr(self, name)}")


def grid_shape(shape: Sequence[int], side: int) -> tuple[int, int]:
    """Block rows and columns of a matrix; those at its edges may be narrower."""
    return -(-shape[0] // side), -(-math.prod(shape[1:]) // side)


def fewest(grid: tuple[int, int], min_blocks: int) -> int:
    """The fewest blocks that give every block row and column its least."""
    down, across = grid
    return max(down * min(min_blocks, across), across * min(min_blocks, down))
