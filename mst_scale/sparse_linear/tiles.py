"""Lists the tiles among which the block kernels choose on a GPU: those that its registers and memory hold.

Each has been compiled for its GPU and spills no register (`mst bench compiled`). In the pipeline of the products, the
lists of where blocks are go ahead of the tiles that they point to, and each of the two takes half of the stages: with 3
or 4 there would be one buffer of tiles on an A100, and nothing would be copied while the matrix unit works.
"""

from __future__ import annotations

Sizes = list[tuple[int, ...]]

# inputs, tokens, warps, stages
PRODUCT: Sizes = [(64, 128, 4, 5), (32, 128, 4, 5), (64, 64, 4, 5), (128, 64, 4, 5), (64, 128, 8, 5), (64, 256, 8, 5)]
WIDE_PRODUCT: Sizes = [(64, 64, 4, 5), (64, 128, 8, 5), (128, 128, 8, 5), (32, 256, 8, 5)]
# tokens, warps, stages
GRADIENT: Sizes = [(32, 4, 4), (64, 4, 3), (64, 4, 4), (128, 4, 3), (64, 8, 4)]
WIDE_GRADIENT: Sizes = [(32, 8, 4), (64, 8, 3), (64, 8, 4), (128, 8, 3)]


def product_tiles(capability: int, side: int) -> Sizes:
    """`capability` is 80 for 8.0."""
    if side < 128:
        return PRODUCT
    return [*WIDE_PRODUCT, (64, 128, 4, 5), (64, 256, 8, 5)] if capability >= 90 else WIDE_PRODUCT


def gradient_tiles(capability: int, side: int) -> Sizes:
    if side < 128:
        spilled = [(64, 4, 3), (64, 4, 4)] if side == 64 and capability < 90 else []
        return [size for size in GRADIENT if size not in spilled]
    return [*WIDE_GRADIENT, (64, 4, 3), (64, 4, 4)] if capability >= 90 else WIDE_GRADIENT


def sum_warps(side: int) -> int:
    return 8 if side == 128 else 4
