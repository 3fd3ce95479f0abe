"""Lists the tiles among which the attention kernels choose on a GPU: those that its registers and memory hold.

One list for each kernel, head size and architecture. Each tile has been compiled for it: no register is spilled, and
shared memory suffices (`mst bench compiled`, tests/hybrid_sparse_attention/test_compiled.py). Elsewhere there is one
tile, which is not chosen: float32, whose products are not made by tensor cores; heads wider than 128; the interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

KERNELS = ("_forward", "_backward_queries", "_backward_keys")


@dataclass(frozen=True)
class Tile:
    """Rows of queries and keys, warps, stages of the pipeline; `skip`: go around the mask where all pairs are seen."""

    queries: int
    keys: int
    warps: int
    stages: int
    skip: bool


AMPERE: dict[tuple[str, int], list[tuple[int, int, int, int]]] = {
    ("_forward", 64): [(64, 32, 4, 3), (64, 64, 4, 3), (128, 32, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3)],
    ("_forward", 128): [(64, 64, 4, 3), (64, 64, 8, 3), (128, 32, 8, 3)],
    ("_backward_queries", 64): [(64, 32, 4, 3), (64, 64, 8, 3), (128, 32, 8, 3), (128, 64, 8, 3)],
    ("_backward_queries", 128): [(64, 32, 4, 3), (64, 32, 8, 3), (64, 64, 8, 3)],
    ("_backward_keys", 64): [(32, 64, 4, 3), (32, 128, 8, 3)],
    ("_backward_keys", 128): [(32, 64, 8, 3)],
}
HOPPER: dict[tuple[str, int], list[tuple[int, int, int, int]]] = {
    ("_forward", 64): [(64, 32, 4, 4), (64, 64, 4, 3), (64, 128, 4, 3), (128, 64, 8, 3), (128, 128, 8, 3)],
    ("_forward", 128): [(64, 64, 4, 3), (128, 64, 8, 3)],
    ("_backward_queries", 64): [(64, 32, 4, 3), (64, 64, 4, 3), (128, 64, 8, 3)],
    ("_backward_queries", 128): [(64, 32, 4, 3), (64, 64, 4, 3), (128, 64, 8, 3)],
    ("_backward_keys", 64): [(32, 64, 4, 3), (64, 64, 4, 3), (64, 128, 8, 3)],
    ("_backward_keys", 128): [(32, 64, 8, 3), (64, 64, 8, 3)],
}


def tiles_of(kernel: str, capability: int, dtype: torch.dtype, head_dim: int) -> tuple[Tile, ...]:
    """`capability` is 80 for 8.0, and 0 for none."""
    wide = max(64, width(head_dim))
    if capability < 80 or dtype == torch.float32 or wide > 128:
        rows = 32 if dtype == torch.float32 or wide > 128 else 64
        return (Tile(rows, rows, 4, 2, skip=True),)
    # mma of Ampere keeps the scores of two chained products in registers, but not across a branch
    skip = capability >= 90
    sizes = (HOPPER if skip else AMPERE)[kernel, wide]
    return tuple(Tile(*size, skip=skip) for size in sizes)


def width(head_dim: int) -> int:
    """Columns of a tile: the next power of two, and at least the matrix unit's 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def size_class(size: int) -> int:
    """Sizes within a factor of 4 share a choice, so that sequences of any length do not each measure their own."""
    return (max(size, 1) - 1).bit_length() // 2
