"""Multiplies a few tokens with a matrix of which only the nonzero values, and their places, are in memory.

    y = x Wᵀ + bias,   W = values at (row, column), 0 elsewhere

`SparseMatrix` holds the values in the order of the flattened matrix, one byte per value (its column within a chunk of
64 or 256) and a 16-bit count per row and chunk: 5 bytes per weight in float32 and 3 in bfloat16, where a dense matrix
has 4 and 2 for zeros too. The compiled kernel (cpp_kernel/kernel.cpp) reads them as they are; `SparseMatrix.definition`
computes the same in plain torch, a few rows at a time. Activations are float32 for either dtype of the values.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from mst_scale import compiled
from mst_scale.mixed_growing import packed_bits

SOURCES = Path(__file__).parent / "cpp_kernel"
DTYPES = (torch.float32, torch.bfloat16)  # kernel.cpp's codes 0, 1
CHUNK = 256  # columns that a byte can number
NARROW = 64  # columns of a chunk that an AVX-512 processor looks up in registers
NARROW_FROM = 4  # average number of values in NARROW columns of a row from which narrow chunks are used
SLACK = 64  # the kernel decodes columns 16 at a time
BUILD_SPAN = 1 << 20  # weights whose places are numbered at once: 8 MiB of int64 at most
DEFINITION_SPAN = 1 << 20  # weights that `definition` writes out at once: 4 MiB
PER_THREAD = 1 << 13  # values per thread, at least: some 5 µs of work, about what starting a thread costs
DENSE_FROM = 0.6
"""Share of nonzero values from which a matrix is stored dense: at 0.8 it would take as many bytes as a sparse one, and
from 0.6 on the dense product is as fast."""
log = logging.getLogger("mst_scale")


class Call(ctypes.Structure):
    """A product, as the kernel takes it."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("values", "column", "count", "begin", "x", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "chunk", "tokens", "dtype", "threads")),
    ]


@functools.cache
def library() -> ctypes.CDLL | str:
    """Return the loaded kernel, or the reason why there is none. Loading is tried once per process."""
    loaded = compiled.load("decode", SOURCES)
    if isinstance(loaded, ctypes.CDLL):
        loaded.sm_multiply.argtypes, loaded.sm_multiply.restype = [ctypes.POINTER(Call)], ctypes.c_int
        log.info("sparse matrices are multiplied by the compiled kernel, from values and column numbers")
    else:
        log.warning(
            "sparse matrices are written out a few rows at a time, which is slow: no compiled kernel (%s)", loaded
        )
    return loaded


def _has_narrow() -> bool:
    loaded = library()
    return isinstance(loaded, ctypes.CDLL) and bool(loaded.sm_has_narrow())


class DenseMatrix:
    """A matrix with few zeros; torch multiplies it."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.shape = (int(weight.shape[0]), int(weight.shape[1]))

    @property
    def n_bytes(self) -> int:
        """Bytes in memory."""
        return self.weight.nbytes

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x Wᵀ + bias in float32, for x (tokens, columns) in float32."""
        if self.weight.dtype == torch.float32:
            return F.linear(x, self.weight, bias)
        # activations are not rounded: some rows at a time become float32
        step = max(1, DEFINITION_SPAN // self.shape[1])
        y = torch.cat([F.linear(x, part.float()) for part in self.weight.split(step)], dim=1)
        return y if bias is None else y + bias

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return these rows in float32."""
        return self.weight[numbers].float()


class SparseMatrix:
    """The nonzero values of a matrix and their places, given by bits in the order of `numpy.packbits`."""

    def __init__(self, values: torch.Tensor, bits: torch.Tensor, shape: tuple[int, int]) -> None:
        assert values.dtype in DTYPES and values.dim() == 1, (values.dtype, values.shape)
        self.values, self.shape, self.entries = values.contiguous(), shape, len(values)
        rows, columns = shape
        self.chunk = NARROW if _has_narrow() and len(values) * NARROW >= NARROW_FROM * rows * columns else CHUNK
        self.chunks = -(-columns // self.chunk)
        self.columns = torch.zeros(len(values) + SLACK, dtype=torch.uint8)
        counts = torch.zeros(rows * self.chunks, dtype=torch.int32)
        done = 0
        for begin in range(0, rows * columns, BUILD_SPAN):
            end = min(begin + BUILD_SPAN, rows * columns)
            places = packed_bits.unpack_span(bits, begin, end).nonzero().view(-1) + begin
            column = places % columns
            self.columns[done : done + len(places)] = (column % self.chunk).to(torch.uint8)
            counts += torch.bincount(
                places // columns * self.chunks + column // self.chunk, minlength=len(counts)
            ).int()
            done += len(places)
        assert done == len(values), (done, len(values))
        self.counts = counts.to(torch.int16)  # at most 256
        per_row = counts.view(rows, self.chunks).sum(1, dtype=torch.int64)
        self.begin = F.pad(per_row.cumsum(0), (1, 0))
        arrays = {"values": self.values, "column": self.columns, "count": self.counts, "begin": self.begin}
        addresses = {name: tensor.data_ptr() for name, tensor in arrays.items()}
        self._call = Call(**addresses, rows=rows, columns=columns, chunk=self.chunk, dtype=DTYPES.index(values.dtype))

    @property
    def n_bytes(self) -> int:
        """Bytes in memory."""
        return sum(t.nbytes for t in (self.values, self.columns, self.counts, self.begin))

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x Wᵀ + bias in float32, for x (tokens, columns) in float32."""
        tokens, columns = x.shape
        assert x.dtype == torch.float32 and columns == self.shape[1], (x.dtype, x.shape, self.shape)
        loaded = library()
        if isinstance(loaded, str) or not tokens:
            return self.definition(x, bias)
        x = x.contiguous()
        y = x.new_empty(tokens, self.shape[0])
        call = self.call(bias)
        call.x, call.y, call.tokens = x.data_ptr(), y.data_ptr(), tokens
        call.threads = max(1, min(torch.get_num_threads(), tokens * self.entries // PER_THREAD))
        status = loaded.sm_multiply(ctypes.byref(call))
        assert status == 0, f"sm_multiply returned {status}"
        return y

    def call(self, bias: torch.Tensor | None) -> Call:
        """Return the product for the kernel, without x, y, tokens and threads."""
        call = Call.from_buffer_copy(self._call)
        if bias is not None:
            call.bias = bias.data_ptr()
        return call

    def definition(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return the same by writing out a few rows of W at a time, in the dtype of x."""
        y = torch.cat([F.linear(x, part.to(x.dtype)) for part in self._parts()], dim=1)
        return y if bias is None else y + bias

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return these rows in float32."""
        flat = numbers.reshape(-1)
        found = torch.cat([self._dense(int(r), int(r) + 1) for r in flat]) if len(flat) else self._dense(0, 0)
        return found.view(*numbers.shape, self.shape[1])

    def _parts(self) -> Iterator[torch.Tensor]:
        step = max(1, DEFINITION_SPAN // self.shape[1])
        for first in range(0, self.shape[0], step):
            yield self._dense(first, min(first + step, self.shape[0]))

    def _dense(self, first: int, last: int) -> torch.Tensor:
        """Rows `first` to `last`, written out in float32."""
        begin, end = int(self.begin[first]), int(self.begin[last])
        counts = self.counts[first * self.chunks : last * self.chunks].long()
        chunk = torch.arange(len(counts)).repeat_interleave(counts)
        row, column = chunk // self.chunks, chunk % self.chunks * self.chunk + self.columns[begin:end].long()
        dense = torch.zeros(last - first, self.shape[1], dtype=torch.float32)
        dense[row, column] = self.values[begin:end].float()
        return dense


Matrix = DenseMatrix | SparseMatrix


def matrix_of(weight: torch.Tensor) -> Matrix:
    """Return the form of a dense matrix that takes less time: sparse, unless `DENSE_FROM` of its values are not 0."""
    nonzero = weight != 0
    if nonzero.sum() >= DENSE_FROM * weight.numel():
        return DenseMatrix(weight.contiguous())
    return SparseMatrix(weight[nonzero], packed_bits.pack(nonzero.view(-1)), (len(weight), weight.shape[1]))
