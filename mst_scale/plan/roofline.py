"""Estimates the seconds of products with masks of blocks, and of attention over patterns, on one GPU.

Each takes as long as the slowest of its bounds. `sparse_linear.block` says how its kernels read. Of a linear layer with
T tokens, N active blocks of side B, W = max(64, B) and w bytes a value:

              y = x Wᵀ, and dx = dy W with rows and columns swapped    dW, in groups of B outputs and W gathered inputs
    multiply  2·T·N·B², in steps of 32 inputs                          2·T·groups·B·W
    L2 cache  w·(T·N·B + T/128·N·B² + T·outputs)                       w·(T·groups·B + T·N·B + N·B²)
    memory    w·(T·inputs + T·outputs + N·B²)                          the same, and zeros: w·outputs·inputs
    launch    a kernel                                                 two

A value of x that a block reads serves B multiply-adds, so that narrow blocks ask much of the cache. Multiply-adds run
at `matmul` of the peak; tiles of 16 columns at `narrow` of that, wider ones at as many times it, at most at all of it.
Active blocks are taken to be spread evenly. The last step or group of a row is partly empty. The splits of tokens for
dW, and their sums, are not counted.

A pattern of attention is two launches per pass (`hybrid_sparse_attention.triton_kernel`): the pairs of whole tiles of
64 × 64 at `sparse_attention` of the peak, 2 products of matrices forward, 3 for dq, 4 for dk and dv; and q, k, v, out
and their gradients, read and written by each launch. What a launch reads again comes from the cache and is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from mst_scale.hybrid_sparse_attention.pattern import Pattern
from mst_scale.plan.gpus import Machine

STEP, TOKENS = 32, 128  # a step's inputs and a tile's tokens, of those that the kernels are tuned over
GROUP, NARROWEST = 64, 16  # of the block kernels
TILE = 64  # rows of a tile of attention
# Products of matrices, and tensors of tokens × width moved by the first launch and by the second.
PASSES = {"forward": (2, 4, 5), "queries": (3, 6, 7), "keys": (4, 6, 8)}


class Bounds(NamedTuple):
    """Seconds, each by one resource alone."""

    multiply: float
    cache: float
    memory: float
    launch: float

    @property
    def seconds(self) -> float:
        return max(self)

    @property
    def decides(self) -> str:
        return max(self._fields, key=lambda name: float(getattr(self, name)))


@dataclass(frozen=True)
class Linear:
    """A layer's products of one micro-batch on one rank; `width` is the bytes of a value."""

    outputs: int
    inputs: int
    tokens: int
    side: int
    density: float
    precision: str
    width: int

    @property
    def rows(self) -> int:
        return -(-self.outputs // self.side)

    @property
    def columns(self) -> int:
        return -(-self.inputs // self.side)

    @property
    def blocks(self) -> float:
        return self.density * self.rows * self.columns

    @property
    def transposed(self) -> Linear:
        return Linear(self.inputs, self.outputs, self.tokens, self.side, self.density, self.precision, self.width)


@cache
def forward(layer: Linear, machine: Machine) -> Bounds:
    """y = x Wᵀ."""
    t, side, w = layer.tokens, layer.side, layer.width
    active = layer.blocks * side * side
    return _bounds(
        layer,
        machine,
        multiplied=t * side * _filled(layer, max(STEP, side)),
        cached=w * (t * active / side + t / TOKENS * active + t * layer.outputs),
        moved=w * (active + t * (layer.inputs + layer.outputs)),
        launches=1,
    )


def input_gradient(layer: Linear, machine: Machine) -> Bounds:
    """dx = dy W."""
    return forward(layer.transposed, machine)


@cache
def narrow(layer: Linear, machine: Machine) -> Bounds:
    """Any of the three in whole rows and columns: a dense product of what lives, and what it reads and writes besides
    it, gathered and placed among zeros."""
    moved = layer.width * (layer.tokens * (layer.inputs + layer.outputs) + layer.inputs * layer.outputs)
    return Bounds(
        multiply=layer.density * dense_product(layer, machine),
        cache=0.0,
        memory=moved / (machine.gpu.bandwidth * machine.efficiency.memory),
        launch=3 * machine.latency.launch,
    )


@cache
def weight_gradient(layer: Linear, machine: Machine) -> Bounds:
    """dW = dyᵀ x of the active blocks, zeros elsewhere."""
    t, side, w = layer.tokens, layer.side, layer.width
    active, wide = layer.blocks * side * side, max(GROUP, side)
    filled = _filled(layer, wide)
    return _bounds(
        layer,
        machine,
        multiplied=t * side * filled,
        cached=w * (t * (filled / wide * side + active / side) + active),
        moved=w * (t * (layer.inputs + layer.outputs) + layer.outputs * layer.inputs + active),
        launches=2,
    )


def dense_product(layer: Linear, machine: Machine) -> float:
    """Seconds of any of the three products, dense: as `clock` counts them."""
    flops = 2.0 * layer.tokens * layer.outputs * layer.inputs
    return flops / (machine.gpu.peak(layer.precision) * machine.efficiency.matmul)


def _filled(layer: Linear, wide: int) -> float:
    """Inputs that are multiplied with, of all block rows together, in steps so wide that are filled row by row."""
    each, blocks, rows = wide // layer.side, layer.blocks, layer.rows
    steps = blocks / each + rows * (each - 1) / (2 * each)
    most = rows * -(-layer.columns // each)
    return wide * min(blocks, most, max(rows, steps))


def _bounds(
    layer: Linear, machine: Machine, *, multiplied: float, cached: float, moved: float, launches: int
) -> Bounds:
    gpu, e = machine.gpu, machine.efficiency
    share = e.matmul * min(1.0, e.narrow * layer.side / NARROWEST)
    return Bounds(
        2 * multiplied / (gpu.peak(layer.precision) * share),
        cached / (gpu.l2 * e.l2),
        moved / (gpu.bandwidth * e.memory),
        launches * machine.latency.kernel,
    )


# --- attention ---


@dataclass(frozen=True)
class Attention:
    """One layer's of one micro-batch on one rank: `wide` is heads × head width."""

    sequences: int
    length: int
    wide: int
    causal: bool
    precision: str
    width: int


def attention_seconds(a: Attention, pattern: Pattern, machine: Machine, again: bool) -> float:
    """Forward (twice where it is recomputed) and backward."""
    names = ("forward", "forward", "queries", "keys") if again else tuple(PASSES)
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
    """Pairs of the tiles of a sparse pattern's two launches; the one with few pairs is the first."""
    n, l = length, pattern.stride  # noqa: E741  (the paper's letters)
    few = many = 0
    per = -(-n // l)
    for first in range(0, per * l if pattern.kind == "strided" else n, TILE):
        last = first + TILE - 1
        if pattern.kind == "strided":
            few += _tiles(first // per * per, min(per * l, (last + 1) if causal else (last // per + 1) * per))
            if first < n:
                many += _tiles(max(first - l + 1, 0), min(n, (last + 1) if causal else (last + l)))
        else:
            few += _tiles(0, min(n // l, (last // l) if causal else n))
            many += _tiles(first // l * l, min(n, (last + 1) if causal else (last // l + 1) * l))
    return TILE * few, TILE * many


def _tiles(low: int, high: int) -> int:
    """Keys of the tiles that cover so many."""
    return -(-max(0, high - low) // TILE) * TILE
