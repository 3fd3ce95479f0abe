"""Computes linear layers whose masks are made of B × B blocks on a GPU, at the cost of the active blocks.

Active blocks are read directly from the dense weight, through lists of their positions; nothing is converted.

    Y  = X·Wᵀ   A program computes a tile of tokens × one block row of W. Its active blocks, side by side, form one
                matrix of B outputs and count·B gathered inputs, which the product walks through in steps of WIDTH
                inputs: several small blocks fill one step of the matrix unit, and the tile is narrow only in outputs.
    dX = dy·W   The same with rows and columns of W exchanged: block columns, and the blocks in each.
    dW          A program computes dYᵀX for a group of active blocks of one block row, WIDTH inputs wide, over a share
                of the tokens. With few blocks and many tokens most of the GPU would be idle, so tokens are split; the
                partial sums go to float32 scratch and are added in a fixed order, which gives the same bits each time.
                Everywhere else dW is zero.

Sums are in float32. A block row or column without active blocks gives zeros (or the bias, which is added before y is
stored). GELU is not fused: in the forward pass that would save one of three passes over its tensor, and the two passes
that backward could save lie across two modules, between which ZeRO-3 gathers and releases weights.

Tiles are tuned on the GPU, once per shape and block side; under Triton's interpreter (TRITON_INTERPRET=1, CPU tensors)
they are fixed. The tiles to choose from fit into the GPU's registers and memory: each has been compiled for its GPU and
spills no register (`mst bench compiled`). In the pipeline of the products, the lists of block positions run ahead of
the tiles that they point to, and each of the two takes half of the stages: with 3 or 4 stages an A100 would have a
single buffer of tiles, and would copy nothing while the matrix unit works.

Importing this file needs triton, so dispatch imports it only when blocks are asked for.
"""

# ruff: noqa: PLR0917  (kernels take their arguments by position)

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl

from mst_scale.errors import UserError
from mst_scale.sparse_linear.derivatives import InputGradient, WeightGradient
from mst_scale.tile_choice import among, capability_of

SIDES = (16, 32, 64, 128)  # the smallest tile of the matrix unit is 16 wide
SPLIT_TOKENS = 512  # least number of tokens per split
WAVES = 4  # programs per multiprocessor that splitting aims at
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


# ------------------------------------------------------------------------------------------------ kernels
@triton.jit
def _gathered(begin, others, block, position, size, SIDE: tl.constexpr):
    """Columns at these positions of a block row's active blocks, laid side by side, and which of them exist."""
    start = tl.load(begin + block)
    entry = start + position // SIDE
    there = entry < tl.load(begin + block + 1)
    column = tl.load(others + entry, mask=there, other=0) * SIDE + position % SIDE
    return column, there & (column < size)


@triton.jit
def _product(
    x, weight, bias, y, begin, others, tokens, outputs, inputs, weight_output, weight_input, blocks,
    SIDE: tl.constexpr, BIAS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) % blocks  # neighbours share a tile of x, which stays in the L2 cache
    token = (tl.program_id(0) // blocks).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    output = block * SIDE + tl.arange(0, SIDE)
    count = (tl.load(begin + block + 1) - tl.load(begin + block)) * SIDE
    sums = tl.zeros([TOKENS, SIDE], tl.float32)
    for position in range(0, count, WIDTH):
        column, there = _gathered(begin, others, block, position + tl.arange(0, WIDTH), inputs, SIDE)
        left = tl.load(
            x + token[:, None] * inputs + column[None, :], mask=(token < tokens)[:, None] & there[None, :], other=0.0
        )
        right = tl.load(
            weight + column[:, None] * weight_input + output[None, :] * weight_output,
            mask=there[:, None] & (output < outputs)[None, :],
            other=0.0,
        )
        sums += tl.dot(left, right, input_precision="ieee")
    if BIAS:
        sums += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(
        y + token[:, None] * outputs + output[None, :],
        sums.to(y.dtype.element_ty),
        mask=(token < tokens)[:, None] & (output < outputs)[None, :],
    )


@triton.jit
def _weight_gradient(
    x, dy, dw, parts, begin, others, group_row, group_number, tokens, per_split, outputs, inputs,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    row = tl.load(group_row + group)
    output = row * SIDE + tl.arange(0, SIDE)
    position = tl.load(group_number + group) * WIDTH + tl.arange(0, WIDTH)
    column, there = _gathered(begin, others, row, position, inputs, SIDE)
    first = tl.program_id(1) * per_split
    sums = tl.zeros([WIDTH, SIDE], tl.float32)  # transposed, so that the long side fills the 64 rows of the matrix unit
    for start in range(first, tl.minimum(first + per_split, tokens), TOKENS):
        at = start + tl.arange(0, TOKENS)
        token = at.to(tl.int64)
        mine = (at < tokens) & (at < first + per_split)
        left = tl.load(
            dy + token[:, None] * outputs + output[None, :], mask=mine[:, None] & (output < outputs)[None, :], other=0.0
        )
        right = tl.load(x + column[:, None] + token[None, :] * inputs, mask=there[:, None] & mine[None, :], other=0.0)
        sums += tl.dot(right, left, input_precision="ieee")
    if SPLIT:
        part = (tl.program_id(1) * tl.num_programs(0) + group).to(tl.int64) * (SIDE * WIDTH)
        offsets = tl.arange(0, WIDTH)[:, None] + tl.arange(0, SIDE)[None, :] * WIDTH
        tl.store(parts + part + offsets, sums)
    else:
        _put(dw, output, column, there, sums, outputs, inputs)


@triton.jit
def _add_parts(
    dw, parts, begin, others, group_row, group_number, splits, outputs, inputs,
    SIDE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    row = tl.load(group_row + group)
    position = tl.load(group_number + group) * WIDTH + tl.arange(0, WIDTH)
    column, there = _gathered(begin, others, row, position, inputs, SIDE)
    offsets = tl.arange(0, WIDTH)[:, None] + tl.arange(0, SIDE)[None, :] * WIDTH
    sums = tl.zeros([WIDTH, SIDE], tl.float32)
    for split in range(0, splits):
        part = (split * tl.num_programs(0) + group).to(tl.int64) * (SIDE * WIDTH)
        sums += tl.load(parts + part + offsets)
    _put(dw, row * SIDE + tl.arange(0, SIDE), column, there, sums, outputs, inputs)


@triton.jit
def _put(dw, output, column, there, sums, outputs, inputs):
    tl.store(
        dw + output[None, :] * inputs + column[:, None],
        sums.to(dw.dtype.element_ty),
        mask=(output < outputs)[None, :] & there[:, None],
    )


# ------------------------------------------------------------------------------------------------ tiles
Sizes = list[tuple[int, ...]]

# inputs, tokens, warps, stages
PRODUCT: Sizes = [
    (64, 128, 4, 5),
    (32, 128, 4, 5),
    (64, 64, 4, 5),
    (128, 64, 4, 5),
    (64, 128, 8, 5),
    (64, 256, 8, 5),
]
WIDE_PRODUCT: Sizes = [(64, 64, 4, 5), (64, 128, 8, 5), (128, 128, 8, 5), (32, 256, 8, 5)]
# tokens, warps, stages
GRADIENT: Sizes = [(32, 4, 4), (64, 4, 3), (64, 4, 4), (128, 4, 3), (64, 8, 4)]
WIDE_GRADIENT: Sizes = [(32, 8, 4), (64, 8, 3), (64, 8, 4), (128, 8, 3)]


def product_tiles(capability: int, side: int) -> Sizes:
    """Return the tiles to tune among for Y and dX; `capability` is 80 for compute capability 8.0."""
    if side < 128:
        return PRODUCT
    return [*WIDE_PRODUCT, (64, 128, 4, 5), (64, 256, 8, 5)] if capability >= 90 else WIDE_PRODUCT


def gradient_tiles(capability: int, side: int) -> Sizes:
    """Return the tiles to tune among for dW."""
    if side < 128:
        spilled = [(64, 4, 3), (64, 4, 4)] if side == 64 and capability < 90 else []
        return [size for size in GRADIENT if size not in spilled]
    return [*WIDE_GRADIENT, (64, 4, 3), (64, 4, 4)] if capability >= 90 else WIDE_GRADIENT


def sum_warps(side: int) -> int:
    """Return the number of warps that add the partial sums of dW."""
    return 8 if side == 128 else 4


FIXED_PRODUCT = {"WIDTH": 32, "TOKENS": 32}
FIXED_GRADIENT = {"TOKENS": 32}


def _configs(names: tuple[str, ...], sizes: Iterable[tuple[int, ...]]) -> list[Any]:
    return [
        triton.Config(dict(zip(names, size, strict=False)), num_warps=size[-2], num_stages=size[-1]) for size in sizes
    ]


@functools.cache
def _tuned_product(sizes: tuple[tuple[int, ...], ...]) -> Any:
    """Return the kernel that tunes its tiles at the first call with a shape; the plain kernel under the interpreter."""
    if INTERPRETED:
        return _product
    keys = ["SIDE", "outputs", "inputs", "weight_input"]
    return triton.autotune(_configs(("WIDTH", "TOKENS"), sizes), key=keys, cache_results=True)(_product)


@functools.cache
def _tuned_gradient(sizes: tuple[tuple[int, ...], ...]) -> Any:
    if INTERPRETED:
        return _weight_gradient
    keys = ["SIDE", "outputs", "inputs", "SPLIT"]
    return triton.autotune(_configs(("TOKENS",), sizes), key=keys, cache_results=True)(_weight_gradient)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


# ------------------------------------------------------------------------------------------------ index and launches
def unsupported_reason(device: str, dtype: torch.dtype, block: int) -> str | None:
    """Return why these kernels cannot run, or None if they can."""
    if block not in SIDES:
        return f"its kernels support blocks of {', '.join(map(str, SIDES))}, not of {block} (topology.granularity)"
    if device != "cuda" and not INTERPRETED:
        return f"it needs a CUDA device (weights are on {device})"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it does not support {dtype}"
    if dtype == torch.bfloat16 and INTERPRETED:
        return "Triton's interpreter computes bfloat16 products incorrectly: use float32 or float16"
    return None


class BlockIndex:
    """The active blocks by block row, by block column, and in groups for dW: about 12 bytes per block."""

    def __init__(self, active: torch.Tensor, side: int):
        self.shape, self.side = (int(active.shape[0]), int(active.shape[1])), side
        down, across = (-(-extent // side) for extent in self.shape)
        flags = _blocks_of(active, side)
        row, column = flags.nonzero(as_tuple=True)
        self.rows = _starts(row, down), column.to(torch.int32)
        order = torch.argsort(column, stable=True)
        self.columns = _starts(column[order], across), row[order].to(torch.int32)
        self.width = max(64, side)
        per_row = -(-flags.sum(1) * side // self.width)  # groups
        self.group_row = torch.arange(down, device=active.device).repeat_interleave(per_row).to(torch.int32)
        number = torch.arange(self.group_row.numel(), device=active.device)
        first = (per_row.cumsum(0) - per_row)[self.group_row.long()]
        self.group_number = (number - first).to(torch.int32)  # within its row

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dense_gradient: bool
    ) -> torch.Tensor:
        """See `definition.Index`."""
        y: torch.Tensor = _BlockLinear.apply(x, weight, bias, (self, dense_gradient))
        return y

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Map x of (tokens, inputs) to y of (tokens, outputs)."""
        outputs, inputs = self.shape
        return self._product(x, weight, bias, self.rows, outputs, inputs, weight.stride(0), weight.stride(1))

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ."""
        return self.forward(x, weight, None)

    def input_gradient(self, dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return dy W."""
        outputs, inputs = self.shape
        return self._product(dy, weight, None, self.columns, inputs, outputs, weight.stride(1), weight.stride(0))

    def weight_gradient(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """Return dyᵀ x in the active blocks."""
        outputs, inputs = self.shape
        dw = x.new_zeros(outputs, inputs)
        groups, tokens = self.group_row.numel(), len(x)
        if not groups or not tokens:
            return dw
        wanted = -(-WAVES * _multiprocessors(x.device) // groups)
        splits = max(1, min(wanted, -(-tokens // SPLIT_TOKENS)))
        per_split = -(-tokens // splits)
        parts = x.new_empty(splits if splits > 1 else 0, groups, self.side, self.width, dtype=torch.float32)
        where = (*self.rows, self.group_row, self.group_number)
        with torch.cuda.device_of(x):  # Triton launches on the current device
            _tuned_gradient(among(gradient_tiles(capability_of(x.device), self.side)))[(groups, splits)](
                x, dy, dw, parts, *where, tokens, per_split, outputs, inputs,
                SIDE=self.side, WIDTH=self.width, SPLIT=splits > 1, **(FIXED_GRADIENT if INTERPRETED else {}),
            )  # fmt: skip
            if splits > 1:
                _add_parts[(groups,)](
                    dw, parts, *where, splits, outputs, inputs,
                    SIDE=self.side, WIDTH=self.width, num_warps=sum_warps(self.side),
                )  # fmt: skip
        return dw

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
        where: tuple[torch.Tensor, torch.Tensor], outputs: int, inputs: int, weight_output: int, weight_input: int,
    ) -> torch.Tensor:  # fmt: skip
        y = x.new_empty(len(x), outputs)
        blocks = where[0].numel() - 1

        def grid(tiles: dict[str, int]) -> tuple[int]:
            return (blocks * triton.cdiv(len(x), tiles["TOKENS"]),)

        if y.numel():
            with torch.cuda.device_of(x):
                _tuned_product(among(product_tiles(capability_of(x.device), self.side)))[grid](
                    x, weight, x if bias is None else bias, y, *where, len(x), outputs, inputs,
                    weight_output, weight_input, blocks,
                    SIDE=self.side, BIAS=bias is not None, **(FIXED_PRODUCT if INTERPRETED else {}),
                )  # fmt: skip
        return y


def _blocks_of(active: torch.Tensor, side: int) -> torch.Tensor:
    """Return which blocks are active, as bool of (block rows, block columns); UserError if a block is partly active."""
    outputs, inputs = active.shape
    missing = -outputs % side, -inputs % side

    def tiles(flags: torch.Tensor, beyond: bool) -> torch.Tensor:
        padded = torch.nn.functional.pad(flags, (0, missing[1], 0, missing[0]), value=beyond)
        return padded.view(padded.shape[0] // side, side, padded.shape[1] // side, side)

    some = tiles(active, False).any(3).any(1)
    if not torch.equal(some, tiles(active, True).all(3).all(1)):
        raise UserError(
            f"this mask is not made of {side} × {side} blocks: set mst.topology.granularity as where it was trained"
        )
    return some


def _starts(sorted_blocks: torch.Tensor, count: int) -> torch.Tensor:
    counts = torch.bincount(sorted_blocks, minlength=count)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)


class _BlockLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: tuple[BlockIndex, bool]
    ) -> torch.Tensor:
        ctx.index, ctx.dense_gradient = how
        ctx.save_for_backward(x, weight)
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        return ctx.index.forward(flat, weight, bias).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        dy = grads[0].reshape(-1, grads[0].shape[-1]).contiguous()
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dx = dw = None
        if wants_x:
            # differentiated again, a dense dx gives masked weights their gradient too
            dense = ctx.dense_gradient and torch.is_grad_enabled()
            dx = (dy @ weight if dense else InputGradient.apply(dy, weight, ctx.index)).view(x.shape)
        if wants_weight:
            dw = dy.T @ flat if ctx.dense_gradient else WeightGradient.apply(flat, dy, ctx.index)
        return dx, dw, (dy.sum(0) if wants_bias else None), None
