"""Predicts which layers multiply only with what their masks keep, on a GPU, as `sparse_linear.dispatch` will choose.

dense    none: masked dense products
block    all that are sparse
auto     those of whole channels, whose products are dense ones of what lives; those of blocks, from the sparsity on
         that `mst bench linear --device cuda --tune` has measured as faster; without a measurement none
"""

from __future__ import annotations

import math

from mst_scale.config import Experiment
from mst_scale.errors import UserError
from mst_scale.mixed_growing.config import BlockGranularity
from mst_scale.sparse_linear.crossovers import SMALLEST, crossover

SIDES = (16, 32, 64, 128)  # of the block kernels, which a test holds these to
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def check_backend(experiment: Experiment) -> None:
    """Refuse what a run on GPUs refuses."""
    mst = experiment.mst
    if mst.stays_dense:
        return
    if mst.compute.backend == "cpu":
        raise UserError("mst.compute.backend = cpu multiplies CPU tensors: plan with --set mst.compute.backend=auto")
    if mst.compute.backend == "block" and side_of(experiment) not in SIDES:
        made = "single weights" if side_of(experiment) == 1 else f"blocks of {side_of(experiment)}"
        made = "whole channels" if in_channels(experiment) else made
        raise UserError(
            f"mst.compute.backend = block multiplies with blocks of {', '.join(map(str, SIDES))}, these masks are made "
            f"of {made}: --set mst.topology.granularity.block=16, or --set mst.compute.backend=auto"
        )


def skips(experiment: Experiment, precision: str, shape: tuple[int, ...], sparsity: float) -> bool:
    """Whether a layer of this shape skips what is masked at this sparsity."""
    backend, side = experiment.mst.compute.backend, side_of(experiment)
    if sparsity <= 0 or backend == "dense":
        return False
    if backend == "block" or in_channels(experiment):
        return True
    if side not in SIDES or math.prod(shape) < SMALLEST:
        return False
    least = crossover("block", DTYPES[precision], shape, block=side)
    return least is not None and sparsity >= least


def in_channels(experiment: Experiment) -> bool:
    """Whether masks are made of whole rows and columns."""
    return experiment.mst.topology.granularity == "channel"


def side_of(experiment: Experiment) -> int:
    """Of the blocks that masks are made of; 1: single weights."""
    granularity = experiment.mst.topology.granularity
    return granularity.block if isinstance(granularity, BlockGranularity) else 1
