"""Says which weights of a matrix a compact parameter stores: all active ones, in the order of the flattened matrix.

A compact parameter is a vector of K values. Its index is not trained, is the same on every rank and changes only at
topology steps; K never changes, because DeepSpeed has laid out its shards for it. The vector ends with zeros up to a
multiple of 64, so that the parameters that follow it in DeepSpeed's flat buffers stay aligned: GPU kernels take another
path, with other rounding, where an address is not a multiple of 16 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mst_scale.errors import UserError
from mst_scale.shard import stored_length
from mst_scale.sparse_linear.kernel import CompiledProducts

WIDEST = 2**31
"""Positions in matrices of at least as many weights take 8 bytes."""


class CompactIndex:
    """The index of one compact parameter."""

    across = False
    """Whether the matrix is stored as (inputs, outputs), as transformers' Conv1D does."""
    backend = "dense"
    """How layers compute their products with it: "dense" expands the matrix, "cpu" reads only the values."""

    def __init__(self, name: str, shape: tuple[int, ...], positions: Tensor):
        self.name, self.shape, self.numel = name, shape, math.prod(shape)
        self.positions = self._narrow(positions)
        """Positions of the values in the flattened matrix, ascending; 4 bytes per value."""
        self.on_gradient: Callable[..., None] | None = None
        """Called in each backward pass while a topology step needs the gradient of the whole matrix: `(gradient)`, or
        `(gradient, rows)` with the gradient of some rows and their numbers, where all others are zero."""
        self.stores_values = False
        """Whether `state_dict` and `load_state_dict` of the model see the values and not the whole matrix."""
        self._products: CompiledProducts | None = None

    @property
    def products(self) -> CompiledProducts:
        """What the backend "cpu" multiplies by, built when it is first needed after the positions have changed."""
        if self._products is None:
            self._products = CompiledProducts(self.flags().cpu().view(self.shape), self.across)
        return self._products

    def flags(self) -> Tensor:
        """Return flags of the active weights in the flattened matrix."""
        active = torch.zeros(self.numel, dtype=torch.bool, device=self.positions.device)
        active[self.positions.long()] = True
        return active

    def between(self, start: int, end: int) -> tuple[int, int]:
        """Return which values [first, last) stand in the range [start, end) of the flattened matrix."""
        ends = torch.tensor([start, end], dtype=self.positions.dtype, device=self.positions.device)
        first, last = torch.searchsorted(self.positions, ends).tolist()
        return first, last

    @property
    def count(self) -> int:
        """The number of values."""
        return self.positions.numel()

    @property
    def stored(self) -> int:
        """The length of the parameter: the values and the zeros after them."""
        return stored_length(self.count)

    @property
    def outputs(self) -> int:
        """Outputs of the layer that multiplies by the matrix."""
        return self.shape[1] if self.across else self.shape[0]

    @property
    def inputs(self) -> int:
        """Inputs of the layer that multiplies by the matrix."""
        return self.shape[0] if self.across else self.shape[1]

    def replace(self, positions: Tensor) -> None:
        """Take other positions, as many as before."""
        assert positions.numel() == self.count, f"{self.name}: {positions.numel()} positions for {self.count} values"
        self.positions = self._narrow(positions).to(self.positions.device)
        self._products = None

    def on(self, device: torch.device) -> Tensor:
        """Return the positions on a device, where they stay: that of the forward pass."""
        if self.positions.device != device:
            self.positions = self.positions.to(device)
        return self.positions

    def expand(self, values: Tensor) -> Tensor:
        """Return the matrix with these values; all others are 0. Autograd gives the gradient of the values."""
        values = values[: self.count]
        positions, flat = self.on(values.device), values.new_zeros(self.numel)
        if torch.is_grad_enabled() and values.requires_grad:
            return flat.index_put((positions,), values).view(self.shape)
        return flat.scatter_(0, positions.long(), values).view(self.shape)

    def collect(self, matrix: Tensor) -> Tensor:
        """Return the values that a matrix, or a flattened one, has at the index."""
        return matrix.reshape(-1).index_select(0, self.positions.to(matrix.device))

    def in_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return which values are in rows of the matrix, and their positions in a matrix of these rows alone.

        Args:
            rows: distinct numbers of rows.
        """
        columns, positions = self.shape[1], self.on(rows.device)
        starts = rows * columns
        first = torch.searchsorted(positions, starts.to(positions.dtype))
        counts = torch.searchsorted(positions, (starts + columns).to(positions.dtype)) - first
        row = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), counts)
        before = counts.cumsum(0) - counts
        which = torch.arange(len(row), device=rows.device) + (first - before)[row]
        return which, positions[which] - starts[row] + row * columns

    def to_store(self, matrix: Tensor) -> Tensor:
        """Return what the parameter stores of a matrix, or of a flattened one."""
        return nn.functional.pad(self.collect(matrix), (0, self.stored - self.count))

    def __deepcopy__(self, memo: dict[int, Any]) -> CompactIndex:
        raise UserError(
            f"{self.name} stores only its active values, and a copy of the model would not follow topology steps: set "
            "mst.compute.compact to off to copy or average the model during training"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "on_gradient": None, "_products": None}  # of an engine; built again

    def _narrow(self, positions: Tensor) -> Tensor:
        return positions.to(torch.int32 if self.numel < WIDEST else torch.int64)
