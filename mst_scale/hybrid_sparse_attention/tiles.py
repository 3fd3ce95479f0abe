"""Lists the tile sizes over which the GPU attention kernels are tuned: those that fit into registers and shared memory.

There is one list for each kernel, head size up to 128 and architecture. Each tile size has been compiled for it in
bfloat16, spills no register and fits into shared memory (`mst bench compiled`,
tests/unit/hybrid_sparse_attention/test_compiled.py).

There is only one tile size for float32 (whose products do not use tensor cores), for heads wider than 128, and for the
interpreter. It fits into the 99 KiB that a program has on GPUs of compute capability 8.6, 8.9 and 12.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

KERNELS = ("_forward", "_backward_queries", "_backward_keys")


@dataclass(frozen=True)
class Tile:
    """Rows of queries and keys, warps, and pipeline stages; `skip`: skip masking if all pairs of a tile are seen."""

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
    """Return the tile sizes of a kernel; `capability` is 80 for compute capability 8.0, and 0 without a GPU."""
    wide = max(64, width(head_dim))
    if dtype == torch.float32 and wide > 128:  # with 32 queries, `_backward_keys` spills registers
        return (Tile(16, 16 if kernel == "_backward_keys" else 32, 4, 2, skip=True),)
    if capability < 80 or dtype == torch.float32 or wide > 128:
        rows = 32 if dtype == torch.float32 or wide > 128 else 64
        return (Tile(rows, rows, 4, 2, skip=True),)
    # on Ampere, the scores of two chained products stay in registers, but not across a branch
    skip = capability >= 90
    sizes = (HOPPER if skip else AMPERE)[kernel, wide]
    return tuple(Tile(*size, skip=skip) for size in sizes)


def width(head_dim: int) -> int:
    """Return the columns of a tile: the next power of two, and at least 16 for the matrix unit."""
    return max(16, 1 << (head_dim - 1).bit_length())


def size_class(size: int) -> int:
    """Return the class of a size; sizes of one class differ by less than a factor of 4 and share tuning results."""
    return (max(size, 1) - 1).bit_length() // 2
