"""Loads the compiled CPU kernel and calls it with the structure of a mask.

cpp_kernel/*.h, kernel.cpp → one shared library (`mst_scale.compiled`) → ctypes

The kernel reads the values of the active weights, in the order of the flattened matrix. Its scratch memory is, for each
thread, a tile of 64 tokens of the input and of the output; for the weight's gradient 1024 tokens of x; for a head, for
each thread the logits of a tile and one float per active weight, on as many threads as fit into 1 GiB. Of bfloat16
tensors, tiles keep two tokens in a word, which takes half of the memory and of the time of the cache.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mst_scale import compiled
from mst_scale.sparse_linear.definition import wide

SOURCES = Path(__file__).parent / "cpp_kernel"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # kernel.cpp's codes 0, 1, 2, 3
# Multiply-adds per thread, at least: about 20 µs of work.
PER_THREAD = 1 << 20


class _Matrix(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("begin", "column", "row_entries")),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        ("matrix", _Matrix),
        ("transpose", _Matrix),
        *((name, ctypes.c_void_p) for name in ("flat", "flat_transpose", "x", "weight", "bias", "dy")),
        *((name, ctypes.c_void_p) for name in ("values", "y", "dx", "dw", "gathered")),
        *((name, ctypes.c_int64) for name in ("tokens", "dtype", "threads")),
        *((name, ctypes.c_void_p) for name in ("targets", "weights", "losses", "gradient")),
        ("scale", ctypes.c_double),
    ]


@functools.cache
def library() -> ctypes.CDLL | str:
    """Return the loaded library, or the reason why there is none. Loading is tried once per process."""
    loaded = compiled.load("sparse_linear", SOURCES)
    if isinstance(loaded, ctypes.CDLL):
        declare(loaded)
    return loaded


def declare(loaded: ctypes.CDLL) -> None:
    """Declare the argument types of the library's functions."""
    for name in ("sl_gather", "sl_scatter", "sl_forward", "sl_backward", "sl_head"):
        function = getattr(loaded, name)
        function.argtypes, function.restype = [ctypes.POINTER(_Call)], ctypes.c_int
    loaded.sl_build.argtypes, loaded.sl_build.restype = [ctypes.c_void_p, ctypes.POINTER(_Call)], ctypes.c_int
    loaded.sl_panels.argtypes, loaded.sl_panels.restype = [ctypes.c_int64], ctypes.c_int64


def not_compiled_reason() -> str | None:
    """Return why there is no compiled kernel, or None if there is one (it is compiled now if it never was)."""
    loaded = library()
    return loaded if isinstance(loaded, str) else None


class _Half:
    """One matrix of the structure: the mask, or its transpose."""

    def __init__(self, rows: int, columns: int, entries: int, panels: int):
        self.begin = torch.empty(panels * rows + 1, dtype=torch.int64)
        self.column = torch.empty(entries, dtype=torch.uint16)
        self.row_entries = torch.empty(rows + 1, dtype=torch.int64)
        arrays = (t.data_ptr() for t in (self.begin, self.column, self.row_entries))
        self.struct = _Matrix(rows, columns, *arrays)


class CompiledProducts:
    """The products of one mask.

    It keeps the mask and its transpose as rows of column numbers: 8 bytes per active weight (12 with more than 1536
    columns) and 16 per row and panel. Tensors of tokens are (tokens, …) and contiguous, values float32 (float64 for
    float64).

    Args:
        active: the mask as bool, of the shape in which the matrix is flattened.
        across: the matrix is stored as (inputs, outputs).
    """

    def __init__(self, active: Tensor, across: bool = False):
        """Build the structure, which takes milliseconds."""
        loaded = library()
        assert isinstance(loaded, ctypes.CDLL), loaded
        self.library, self.across = loaded, across
        flags = active.contiguous().view(torch.uint8)
        self.stored = rows, columns = int(active.shape[0]), int(active.shape[1])
        self.entries = int(flags.count_nonzero())
        panels = loaded.sl_panels(columns)
        self._matrix = _Half(rows, columns, self.entries, panels)
        self._transpose = _Half(columns, rows, self.entries, loaded.sl_panels(rows))
        self._flat = torch.empty(self.entries, dtype=torch.int32) if panels > 1 else None
        self._flat_transpose = torch.empty(self.entries, dtype=torch.int32)
        call = self._call(False, threads=torch.get_num_threads())
        status = loaded.sl_build(flags.data_ptr(), ctypes.byref(call))
        assert status == 0, f"sl_build returned {status}"

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.stored[::-1] if self.across else self.stored

    @functools.cached_property
    def where(self) -> Tensor:
        """The position of each value in the flattened matrix."""
        ones = torch.ones(self.entries, dtype=torch.float32, device="cpu")
        return self.scatter(ones, torch.float32).view(-1).nonzero().view(-1)

    def gather(self, weight: Tensor) -> Tensor:
        """Return the values of a dense matrix, of the shape in which it is stored."""
        values = weight.new_empty(self.entries, dtype=wide(weight.dtype))
        self.run("sl_gather", 1, weight.dtype, {"weight": weight.contiguous(), "gathered": values}, stored=True)
        return values

    def scatter(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the dense matrix that has these values where the mask keeps a weight, and zeros."""
        dw = torch.empty(self.stored, dtype=dtype)
        self.run("sl_scatter", 1, dtype, {"gradient": gradient.contiguous(), "dw": dw}, stored=True)
        return dw

    def forward(self, x: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x Sᵀ + b in the dtype of x."""
        y = x.new_empty(len(x), self.shape[0])
        bias = None if bias is None else bias.contiguous()
        self.run("sl_forward", len(x), x.dtype, {"x": x, "values": values.contiguous(), "bias": bias, "y": y})
        return y

    def backward(
        self, x: Tensor, dy: Tensor, values: Tensor, dx: bool, ds: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return dx in the dtype of x, and the gradient of the values in theirs, as far as asked for."""
        found = torch.empty_like(x) if dx else None, torch.empty_like(values) if ds else None
        given = {"x": x, "dy": dy, "values": values.contiguous()}
        self.run("sl_backward", len(x), x.dtype, {**given, "dx": found[0], "gradient": found[1]})
        return found

    # for higher derivatives, all in the dtype of the values

    def product(self, x: Tensor, values: Tensor) -> Tensor:
        """Return x Sᵀ."""
        return self.forward(x, values)

    def input_gradient(self, dy: Tensor, values: Tensor) -> Tensor:
        """Return dy S."""
        dx = dy.new_empty(len(dy), self.shape[1])
        self.run("sl_backward", len(dy), dy.dtype, {"dy": dy, "values": values.contiguous(), "dx": dx})
        return dx

    def weight_gradient(self, x: Tensor, dy: Tensor) -> Tensor:
        """Return dyᵀ x at the active weights."""
        gradient = x.new_empty(self.entries)
        self.run("sl_backward", len(x), x.dtype, {"x": x, "dy": dy, "gradient": gradient})
        return gradient

    def run(
        self,
        function: str,
        tokens: int,
        dtype: torch.dtype,
        tensors: Mapping[str, Tensor | None],
        *,
        most_threads: int | None = None,
        stored: bool = False,
    ) -> None:
        """Call a function of the library on these tensors, by the names of `_Call`'s fields."""
        addresses = {name: t.data_ptr() for name, t in tensors.items() if t is not None}
        work = tokens * max(self.entries, sum(self.shape))
        threads = max(1, min(most_threads or torch.get_num_threads(), torch.get_num_threads(), work // PER_THREAD))
        swapped = self.across and not stored
        call = self._call(swapped, tokens=tokens, dtype=DTYPES.index(dtype), threads=threads, scale=1.0, **addresses)
        status = getattr(self.library, function)(ctypes.byref(call))
        assert status == 0, f"{function} returned {status}"

    def _call(self, swapped: bool, **others: int | float) -> _Call:
        """Return a call whose matrix is the stored one, or its transpose."""
        halves = (self._matrix.struct, self._flat), (self._transpose.struct, self._flat_transpose)
        (matrix, flat), (transpose, flat_transpose) = halves[::-1] if swapped else halves
        addresses = {"flat": flat, "flat_transpose": flat_transpose}
        places = {name: t.data_ptr() for name, t in addresses.items() if t is not None}
        return _Call(matrix=matrix, transpose=transpose, **places, **others)
