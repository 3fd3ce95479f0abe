"""Defines the block `mst.topology`: how often Mixed-Growing updates the topology, how much, and by which scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from mst_scale.errors import UserError, suggestion
from mst_scale.mixed_growing.policies import POLICIES, Policy, policy
from mst_scale.validation import (
    MAX_SEED,
    MAX_STEPS,
    MILLION,
    NO_EFFECT,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    ZeroOr,
    block,
)

if TYPE_CHECKING:
    _Side = int
else:  # GPU kernels support 16 and more; 4 and 8 are for comparison
    _Side = Literal[4, 8, 16, 32, 64, 128]


@block("mst.topology.granularity")
class BlockGranularity:
    """Masks of square blocks, whose weights are active or inactive together."""

    block: _Side = Field(default=16, description="Side of a block, in weights.")
    min_blocks: StrictInt = Field(
        default=2,
        ge=0,
        le=MILLION,
        description="Fewest active blocks in each block row and block column; 0 sets no minimum.",
    )


@block("mst.topology")
class TopologyConfig:
    """Mixed-Growing: how often the topology is updated, how much, and by which scores."""

    interval: StrictInt | None = Field(
        default=None,
        ge=1,
        le=MAX_STEPS,
        description="Steps between topology steps. `null`: a fifth of the shortest gradual phase, but at least 25 and "
        "at most 100 steps.",
    )
    policy: str = Field(
        default="mst",
        description="Scores for pruning and growth; each method sets its own ([methods.md](methods.md)). `snfs` "
        "grows by dense momentum, so clipping then uses the norm of the dense gradient.",
    )
    granularity: Literal["element", "channel"] | BlockGranularity = Field(
        default="element",
        description="The units that masks keep or drop as a whole: single weights (`element`), whole neurons and "
        'channels of heads (`channel`, see [blocks.md](blocks.md#whole-channels)), or square blocks (`{"block": 16, '
        '"min_blocks": 2}`).',
    )
    update_fraction: StrictFloat = Field(
        default=0.3,
        ge=0,
        le=1,
        description="ζ: fraction of the active weights that a topology step exchanges (drop fraction).",
    )
    update_schedule: Literal["constant", "1-cosine", "2-cosine", "n-cosine", "decay-n-cosine"] = Field(
        default="decay-n-cosine", description="How ζ decreases during the sparse phases: along one or several cosines."
    )
    update_decay: StrictFloat = Field(
        default=0.5, ge=0, le=1, description="`decay-n-cosine`: factor by which ζ shrinks from one cosine to the next."
    )
    random_ratio: StrictFloat | None = Field(
        default=None,
        ge=0,
        le=1,
        description="R: fraction of the growth that is drawn at random. `null`: the policy's own fraction (0.25 for "
        "`mst`).",
    )
    mest_lambda: Annotated[StrictFloat, ZeroOr(1e-12, 1e12, "the gradient has no part in the score")] = Field(
        default=1.0, description="`mest`: weight of the gradient in the pruning score."
    )
    replaces_update: StrictBool = Field(
        default=False,
        description="A topology step replaces the optimizer update of its step, as in the code of RigL and of the "
        "paper. With `snfs`, the first update is always made, because growth uses the momentum that it creates.",
    )
    regrow: StrictBool = Field(
        default=True,
        description="A weight pruned in a topology step may grow back in the same step; it then keeps its value.",
    )
    grown_moments: Literal["seeded", "active_mean", "zero"] = Field(
        default="seeded",
        description="Adam's second moment of grown weights: `seeded` estimates it from their gradients and those of "
        "the layer; `active_mean` copies the mean of the layer's active weights and needs no dense gradients; `zero` "
        "starts at 0.",
    )
    reset_momentum: StrictBool = Field(
        default=False, description="Set all first moments of a matrix to 0 when its mask is removed, as AC/DC does."
    )
    revive_dead_units: StrictBool = Field(
        default=True,
        description="When masks are removed, give random incoming weights to dead units, which no gradient would "
        "ever reach otherwise.",
    )
    track_coverage: StrictBool = Field(
        default=True,
        description="Record which weights were ever active (ITOP). Runs that start sparse keep a second bit per weight "
        "for it.",
        json_schema_extra=NO_EFFECT,
    )
    check_every: StrictInt = Field(
        default=1_000,
        ge=0,
        le=MAX_SEED,
        description="Steps between checks that all ranks hold the same masks and that inactive weights are 0; `0`: "
        "no regular checks. The first updates and every topology step are always checked.",
        json_schema_extra=NO_EFFECT,
    )
    rezero: StrictBool = Field(
        default=False,
        description="Set inactive weights and their optimizer states to 0 after every update. Needed with "
        "optimizers that move weights without a gradient, which otherwise stop the run.",
    )

    @property
    def chosen(self) -> Policy:
        """The policy, with the random share and λ of this config."""
        return policy(
            self.policy,
            random_share=self.random_ratio,
            mest_share=self.mest_lambda if self.policy == "mest" else None,
        )

    @property
    def grows_by_dense_gradients(self) -> bool:
        """Whether a topology step that grows needs the gradients of inactive weights."""
        return self.chosen.grows_by_gradient or self.grown_moments == "seeded"

    def reads_dense_gradients(self, update_fraction: float, denser: bool) -> bool:
        """Return whether a topology step needs the gradients of inactive weights.

        Args:
            update_fraction: the update fraction of the step.
            denser: whether the number of active weights increases.
        """
        grows = denser or (self.chosen.swaps and update_fraction > 0)
        return grows and self.grows_by_dense_gradients

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            near, known = suggestion(self.policy, POLICIES), ", ".join(POLICIES)
            raise UserError(f"mst.topology.policy = {self.policy!r} is unknown{near} (of {known})")


def grid_shape(shape: Sequence[int], side: int) -> tuple[int, int]:
    """Return the numbers of block rows and columns of a matrix; the last ones may be narrower."""
    return -(-shape[0] // side), -(-math.prod(shape[1:]) // side)


def fewest(grid: tuple[int, int], min_blocks: int) -> int:
    """Return the smallest number of blocks with `min_blocks` in every block row and column."""
    down, across = grid
    return max(down * min(min_blocks, across), across * min(min_blocks, down))
