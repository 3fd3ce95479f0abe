"""Estimates the seconds of products with masks of blocks, and of attention over patterns, on one GPU.

Each takes as long as the slowest of its bounds. `sparse_linear.block` describes how its kernels read. Of a linear layer
with T tokens, N active blocks of side B, W = max(64, B) and w bytes per value:

              y = x Wᵀ, and dx = dy W with rows and columns swapped    dW, in groups of B outputs and W gathered inputs
    multiply  2·T·N·B², in steps of 32 inputs                          2·T·groups·B·W
    L2 cache  w·(T·N·B + T/128·N·B² + T·outputs)                       w·(T·groups·B + T·N·B + N·B²)
    memory    w·(T·inputs + T·outputs + N·B²)                          the same, and zeros: w·outputs·inputs
    launch    one kernel                                               two kernels

A value of x that a block reads serves B multiply-adds, so narrow blocks need much cache bandwidth. Multiply-adds run at
`matmul` of the peak; tiles of 16 columns at `narrow` of that, wider ones in proportion, at most at all of it. Active
blocks are assumed to be spread evenly. The last step or group of a row is partly empty. The splits of tokens for dW,
and their sums, are not counted.

A pattern of attention takes two launches per pass (`hybrid_sparse_attention.triton_kernel`): the pairs of whole tiles
of 64 × 64 at `sparse_attention` of the peak, 2 matrix products forward, 3 for dq, 4 for dk and dv; and q, k, v, out and
their gradients, read and written by each launch. Values that a launch reads again come from the cache and are not
counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from mst_scale.config import Experiment
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention.pattern import Pattern
from mst_scale.mixed_growing.config import BlockGranularity
from mst_scale.plan.gpus import Machine
from mst_scale.plan.setting import sparse_parameters
from mst_scale.sparse_linear.crossovers import SMALLEST, crossover

SIDES = (16, 32, 64, 128)  # of the block kernels; a test compares them
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
STEP, TOKENS = 32, 128  # a step's inputs and a tile's tokens, of those that the kernels are tuned over
GROUP, NARROWEST = 64, 16  # of the block kernels
TILE = 64  # rows of a tile of attention
# Matrix products, and tensors of tokens × width that the first launch moves and the second one.
PASSES = {"forward": (2, 4, 5), "queries": (3, 6, 7), "keys": (4, 6, 8)}


# --- which layers multiply only with active weights ---


def validate_backend(experiment: Experiment) -> None:
    """Raise the error that a run on GPUs would raise for its compute backend."""
    mst = experiment.mst
    if mst.stays_dense:
        return
    if mst.compute.backend == "cpu":
        raise UserError("mst.compute.backend = cpu multiplies CPU tensors: plan with --set mst.compute.backend=auto")
    if mst.compute.backend == "block" and side_of(experiment) not in SIDES:
        made = "single weights" if side_of(experiment) == 1 else f"blocks of {side_of(experiment)}"
        made = "whole channels" if in_channels(experiment) else made
        raise UserError(
            f"mst.compute.backend = block multiplies blocks of {', '.join(map(str, SIDES))}, but these masks are "
            f"made of {made}: --set mst.topology.granularity.block=16, or --set mst.compute.backend=auto"
        )


def skips(experiment: Experiment, precision: str, shape: tuple[int, ...], sparsity: float) -> bool:
    """Predict whether `sparse_linear.dispatch` multiplies a layer only with its active weights, on a GPU.

    Backend `dense` never does; `block` always. `auto` does so for whole channels, whose products are narrow dense ones,
    and for blocks above the sparsity from which `mst bench linear --device cuda --tune` has measured them faster.
    """
    backend, side = experiment.mst.compute.backend, side_of(experiment)
    if sparsity <= 0 or backend == "dense":
        return False
    if backend == "block" or in_channels(experiment):
        return True
    if side not in SIDES or math.prod(shape) < SMALLEST:
        return False
    least = crossover("block", DTYPES[precision], shape, block=side)
    return least is not None and sparsity >= least


def skips_anything(experiment: Experiment, precision: str) -> bool:
    """Return whether any of the matrix products skips inactive weights, in the sparsest phase."""
    if experiment.mst.stays_dense:
        return False
    found, most = sparse_parameters(experiment.model, experiment.mst.targets), experiment.schedule.max_sparsity
    return any(skips(experiment, precision, p.shape, most) for p in found)


def in_channels(experiment: Experiment) -> bool:
    """Return whether masks are made of whole rows and columns."""
    return experiment.mst.topology.granularity == "channel"


def side_of(experiment: Experiment) -> int:
    """Return the side of the blocks that masks are made of; 1 for single weights."""
    granularity = experiment.mst.topology.granularity
    return granularity.block if isinstance(granularity, BlockGranularity) else 1


# --- linear layers ---


@dataclass(frozen=True)
class Linear:
    """The products of a layer, for one micro-batch on one rank."""

    outputs: int
    inputs: int
    tokens: int
    side: int
    density: float
    precision: str
    width: int  # bytes of a value

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of blocks."""
        return -(-self.outputs // self.side), -(-self.inputs // self.side)

    @property
    def blocks(self) -> float:
        """Active blocks."""
        return self.density * math.prod(self.grid)


@cache
def forward(layer: Linear, machine: Machine) -> float:
    """Estimate the seconds of y = x Wᵀ."""
    t, side, w = layer.tokens, layer.side, layer.width
    active = layer.blocks * side * side
    multiplied = t * side * _filled(layer, max(STEP, side))
    cached = w * (t * active / side + t / TOKENS * active + t * layer.outputs)
    moved = w * (active + t * (layer.inputs + layer.outputs))
    return _slowest(layer, machine, multiplied, cached, moved, launches=1)


def input_gradient(layer: Linear, machine: Machine) -> float:
    """Estimate the seconds of dx = dy W."""
    return forward(replace(layer, outputs=layer.inputs, inputs=layer.outputs), machine)


@cache
def weight_gradient(layer: Linear, machine: Machine) -> float:
    """Estimate the seconds of dW = dyᵀ x of the active blocks, with zeros elsewhere."""
    t, side, w, group = layer.tokens, layer.side, layer.width, max(GROUP, layer.side)
    active, filled = layer.blocks * side * side, _filled(layer, group)
    cached = w * (t * (filled / group * side + active / side) + active)
    moved = w * (t * (layer.inputs + layer.outputs) + layer.outputs * layer.inputs + active)
    return _slowest(layer, machine, t * side * filled, cached, moved, launches=2)


def narrow(layer: Linear, machine: Machine) -> float:
    """Estimate the seconds of any of the three products for whole rows and columns.

    It is a dense product of the active part, which is gathered, and whose result is placed among zeros.
    """
    moved = layer.width * (layer.tokens * (layer.inputs + layer.outputs) + layer.inputs * layer.outputs)
    memory = moved / (machine.gpu.bandwidth * machine.efficiency.memory)
    return max(layer.density * dense_product(layer, machine), memory, 3 * machine.latency.kernel)


def dense_product(layer: Linear, machine: Machine) -> float:
    """Estimate the seconds of any of the three products, dense."""
    flops = 2.0 * layer.tokens * layer.outputs * layer.inputs
    return flops / (machine.gpu.peak(layer.precision) * machine.efficiency.matmul)


def _filled(layer: Linear, wide: int) -> float:
    """Return the inputs of all block rows that are multiplied, in steps of `wide` that are filled row by row."""
    (rows, columns), each = layer.grid, wide // layer.side
    steps = layer.blocks / each + rows * (each - 1) / (2 * each)
    return wide * min(layer.blocks, rows * -(-columns // each), max(rows, steps))


def _slowest(
    layer: Linear, machine: Machine, multiplied: float, cached: float, moved: float, *, launches: int
) -> float:
    gpu, e = machine.gpu, machine.efficiency
    matmul = e.matmul * min(1.0, e.narrow * layer.side / NARROWEST)
    return max(
        2 * multiplied / (gpu.peak(layer.precision) * matmul),
        cached / (gpu.l2 * e.l2),
        moved / (gpu.bandwidth * e.memory),
        launches * machine.latency.kernel,
    )


# --- attention ---


@dataclass(frozen=True)
class Attention:
    """The attention of a layer, for one micro-batch on one rank."""

    sequences: int
    length: int
    wide: int  # heads × head width
    causal: bool
    precision: str
    width: int  # bytes of a value


def attention_seconds(a: Attention, pattern: Pattern, machine: Machine, recompute: bool) -> float:
    """Estimate forward (twice with recomputation) and backward."""
    names = ("forward", "forward", "queries", "keys") if recompute else tuple(PASSES)
    return sum(_pass(a, pattern, machine, name) for name in names)


@cache
def _pass(a: Attention, pattern: Pattern, machine: Machine, name: str) -> float:
    gpu, e = machine.gpu, machine.efficiency
    products, *moves = PASSES[name]
    total = 0.0
    for pairs, tensors in zip(tile_pairs(pattern, a.length, a.causal), moves, strict=True):
        flops = products * 2.0 * a.sequences * pairs * a.wide
        moved = tensors * a.width * a.sequences * a.length * a.wide
        total += max(
            flops / (gpu.peak(a.precision) * e.sparse_attention),
            moved / (gpu.bandwidth * e.memory),
            machine.latency.kernel,
        )
    return total


@cache
def tile_pairs(pattern: Pattern, length: int, causal: bool) -> tuple[int, int]:
    """Return the pairs in the tiles of a sparse pattern's two launches; the launch with few pairs comes first."""
    n, l = length, pattern.stride  # noqa: E741  (the paper's letters)
    few = many = 0
    per = -(-n // l)
    for first in range(0, per * l if pattern.kind == "strided" else n, TILE):
        last = first + TILE - 1
        if pattern.kind == "strided":
            few += _keys(first // per * per, min(per * l, (last + 1) if causal else (last // per + 1) * per))
            if first < n:
                many += _keys(max(first - l + 1, 0), min(n, (last + 1) if causal else (last + l)))
        else:
            few += _keys(0, min(n // l, (last // l) if causal else n))
            many += _keys(first // l * l, min(n, (last + 1) if causal else (last // l + 1) * l))
    return TILE * few, TILE * many


def _keys(low: int, high: int) -> int:
    """Return the keys of the tiles that cover the range from low to high."""
    return -(-max(0, high - low) // TILE) * TILE
