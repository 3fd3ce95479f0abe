"""Says of a sparse run in one line what has been chosen, and warns of blocks that are too few for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mst_scale import zero_shards
from mst_scale.distributed import logger
from mst_scale.mixed_growing.blocks import Blocks
from mst_scale.sparsity_variation import Schedule

if TYPE_CHECKING:
    from mst_scale.engine.sparse import SparseController


def phases_in_words(schedule: Schedule) -> str:
    phases = ", ".join(f"{phase.name} from step {phase.start}" for phase in schedule.phases)
    return f"{phases}, of {schedule.total_steps}"


def sparsity_in_words(mst: SparseController) -> str:
    """All ranks ask together."""
    named = zero_shards.named_parameters(mst.engine.module)
    trained = sum(mst.stages.joined({name: math.prod(zero_shards.shape_of(p)) for name, p in named}).values())
    weights, bits = sum(mst.numels.values()), 1 + mst.counts_coverage
    if mst.given is not None:
        last, total = mst.schedule.sparse_until, mst.schedule.total_steps
        until = f"for {total} steps" if last == total else f"until step {last} of {total}"
        still = sum(mst.shards.frozen(i) for i in range(len(mst.masks)))
        frozen = f" ({still} of them masked and not trained)" if still else ""
        return (
            f"{len(mst.numels)} matrices{frozen} with {weights:,} of {trained:,} parameters keep "
            f"{mst.given.in_words()}: {100 * mst.sparsity:.3g} % sparse, {until}"
        )
    return (
        f"{len(mst.numels)} matrices with {weights:,} of {trained:,} parameters become up to "
        f"{100 * mst.schedule.max_sparsity:.3g} % sparse{mst.elements.words} by policy {mst.policy.name}; "
        f"{phases_in_words(mst.schedule)}{_first_masks_in_words(mst)}; "
        f"masks take {sum(m.length for m in mst.masks) * bits // 8:,} bytes a rank"
    )


def _first_masks_in_words(mst: SparseController) -> str:
    """Of runs that start sparse. Whether their weights are trained already, nobody here can tell."""
    if not mst.schedule.at(0).sparsity:
        return ""
    if mst.initial == "magnitude":
        return "; the first masks keep the largest weights"
    return "; the first masks are random (for weights that are trained already: mst.sparsity.initial = magnitude)"


def warn_of_few_blocks(mst: SparseController, counts: list[int]) -> None:
    """Layers that `min_blocks` keeps denser than the sparsity asked for; `counts` are the blocks it asks for."""
    if not isinstance(mst.elements, Blocks):
        return
    least = [mst.elements.at_least(mask.shape) for mask in mst.masks]
    short = [i for i in range(len(counts)) if least[i] > counts[i]]
    if short:
        logger.warning(
            "min_blocks = %d keeps %d of %d parameters denser than %.0f %% sparsity asks for: %s has %d × %d "
            "blocks and keeps %d or more of them instead of %d; smaller blocks or fewer min_blocks would reach it",
            mst.elements.least,
            len(short),
            len(counts),
            100 * mst.schedule.max_sparsity,
            mst.masks.names[short[0]],
            *mst.shapes[mst.masks.names[short[0]]],
            least[short[0]],
            counts[short[0]],
        )
