"""Computes sparse linear layers on CPUs, weight by weight: with the compiled kernel, or without a compiler with MKL.

    CompiledIndex   cpp_kernel/*.h, kernel.cpp → one shared library (`mst_scale.compiled`) → ctypes
    MKLIndex        torch.sparse, which calls MKL: Yᵀ = W Xᵀ and dXᵀ = Wᵀ dYᵀ as CSR × dense, dW by `sampled_addmm`;
                    about half as fast. MKL takes float32 and float64 only, so other dtypes are computed in float32

Saved for backward: x and the values of the active weights (float32; float64 for float64), not the weight, which under
ZeRO-3 may be released by then. Scratch memory of the compiled kernel: per thread a tile of 64 tokens of the input and
of the output; for the weight's gradient 1024 tokens of x in float32 and one float per active weight; for a head, per
thread the logits of a tile and one float per active weight, on as many threads as fit into 1 GiB.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mst_scale import compiled
from mst_scale.errors import UserError
from mst_scale.sparse_linear import derivatives
from mst_scale.transforms import check_first_derivative, leave_graph

SOURCES = Path(__file__).parent / "cpp_kernel"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # kernel.cpp's codes 0, 1, 2, 3
# Multiply-adds per thread, at least: about 20 µs of work.
PER_THREAD = 1 << 20
# Bytes of scratch of all threads of a head together: each has the logits of a tile and its own gradient.
HEAD_SCRATCH = 1 << 30
HEAD_TILE = 64  # tokens, at most
log = logging.getLogger("mst_scale")


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
        *((name, ctypes.c_void_p) for name in ("order", "x", "weight", "bias", "dy", "values", "y", "dx", "dw")),
        *((name, ctypes.c_int64) for name in ("tokens", "dtype", "threads")),
        *((name, ctypes.c_void_p) for name in ("targets", "weights", "losses", "gradient")),
        ("scale", ctypes.c_double),
    ]


def build(folder: Path) -> Path:
    """Return the path of the library in `folder`, compiled if it is missing.

    Raises:
        RuntimeError: if it cannot be compiled.
    """
    return compiled.build("sparse_linear", SOURCES, folder)


@functools.cache
def library() -> ctypes.CDLL | str:
    """Return the loaded library, or the reason why there is none. Loading is tried once per process."""
    loaded = compiled.load("sparse_linear", SOURCES)
    if isinstance(loaded, ctypes.CDLL):
        declare(loaded)
    return loaded


def declare(loaded: ctypes.CDLL) -> None:
    """Declare the argument types of the library's functions."""
    for function in (loaded.sl_forward, loaded.sl_backward, loaded.sl_head, loaded.sl_head_backward):
        function.argtypes, function.restype = [ctypes.POINTER(_Call)], ctypes.c_int
    loaded.sl_build.argtypes, loaded.sl_build.restype = [ctypes.c_void_p, ctypes.POINTER(_Call)], ctypes.c_int
    loaded.sl_panels.argtypes, loaded.sl_panels.restype = [ctypes.c_int64], ctypes.c_int64


def why_not_compiled() -> str | None:
    """Return why there is no compiled kernel, or None if there is one (it is compiled now if it never was)."""
    loaded = library()
    return loaded if isinstance(loaded, str) else None


def why_not(device: str, dtype: torch.dtype) -> str | None:
    """Return why single weights cannot be multiplied on this device in this dtype, or None if they can."""
    if device != "cpu":
        return f"it runs on CPU tensors, not {device}"
    if dtype not in DTYPES:
        return f"it does not support {dtype}"
    if (reason := why_not_compiled()) is None:
        return None
    if not torch.backends.mkl.is_available():
        return f"there is neither a compiled kernel ({reason}) nor MKL in this build of torch"
    _log_mkl(reason)
    return None


@functools.cache  # once per process
def _log_mkl(reason: str) -> None:
    log.warning("sparse layers: MKL through torch.sparse, about half as fast as the compiled kernel (%s)", reason)


def build_index(active: torch.Tensor) -> CompiledIndex | MKLIndex:
    """Return the index of a mask for the best kernel here."""
    return MKLIndex(active) if why_not_compiled() else CompiledIndex(active)


# --- the compiled kernel ---


class _Half:
    """One matrix of the index: the mask, or its transpose."""

    def __init__(self, rows: int, columns: int, entries: int, panels: int):
        self.begin = torch.empty(panels * rows + 1, dtype=torch.int64)
        self.column = torch.empty(entries, dtype=torch.uint16)
        self.row_entries = torch.empty(rows + 1, dtype=torch.int64)
        arrays = (t.data_ptr() for t in (self.begin, self.column, self.row_entries))
        self.struct = _Matrix(rows, columns, *arrays)


class CompiledIndex:
    """The mask and its transpose as rows of column numbers: 8 bytes per active weight, 16 bytes per row and panel."""

    def __init__(self, active: torch.Tensor):
        loaded = library()
        assert isinstance(loaded, ctypes.CDLL), loaded
        self.library = loaded
        flags = active.contiguous().view(torch.uint8)
        self.shape = (int(active.shape[0]), int(active.shape[1]))
        outputs, inputs = self.shape
        self.entries = int(flags.count_nonzero())
        self.matrix = _Half(outputs, inputs, self.entries, loaded.sl_panels(inputs))
        self.transpose = _Half(inputs, outputs, self.entries, loaded.sl_panels(outputs))
        self.order = torch.empty(self.entries, dtype=torch.int32)
        status = loaded.sl_build(flags.data_ptr(), ctypes.byref(self._call(threads=torch.get_num_threads())))
        assert status == 0, f"sl_build returned {status}"

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dense_gradient: bool
    ) -> torch.Tensor:
        """See `definition.Index`."""
        return derivatives.linear(x, weight, bias, self, dense_gradient)

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return y and the values of the active weights."""
        values = x.new_empty(self.entries, dtype=torch.promote_types(x.dtype, torch.float32))
        y = x.new_empty(len(x), self.shape[0])
        given = {"x": x, "weight": weight.contiguous(), "bias": None if bias is None else bias.contiguous()}
        self.run("sl_forward", len(x), x.dtype, {**given, "values": values, "y": y})
        return y, values

    def backward(
        self, x: torch.Tensor, dy: torch.Tensor, values: torch.Tensor, dx: bool, dw: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return dx and dW as far as asked for."""
        found = torch.empty_like(x) if dx else None, x.new_empty(self.shape) if dw else None
        given = {"x": x, "dy": dy, "values": values}
        self.run("sl_backward", len(x), x.dtype, {**given, "dx": found[0], "dw": found[1]})
        return found

    # for higher derivatives, all in the dtype of the values

    def product(self, x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """x Sᵀ."""
        return self.forward(x, derivatives.spread(values, self), None)[0]

    def input_gradient(self, dy: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """dy S."""
        dx = dy.new_empty(len(dy), self.shape[1])
        self.run("sl_backward", len(dy), dy.dtype, {"dy": dy, "values": values, "dx": dx})
        return dx

    def weight_gradient(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """dyᵀ x at the active weights."""
        dw = x.new_empty(self.shape)
        self.run("sl_backward", len(x), x.dtype, {"x": x, "dy": dy, "dw": dw})
        return dw.view(-1)[self.where]

    @functools.cached_property
    def where(self) -> torch.Tensor:
        """The position of each value in the flat weight, found by letting the kernel spread the numbers 1, 2, 3, …"""
        numbers = torch.empty(self.shape, dtype=torch.float64)  # exact up to 2^53
        count = torch.arange(1, self.entries + 1, dtype=torch.float64)
        self.run("sl_head_backward", 0, torch.float64, {"gradient": count, "dw": numbers})
        places = numbers.view(-1).nonzero().view(-1)
        where = torch.empty_like(places)
        where[numbers.view(-1)[places].long() - 1] = places
        return where

    def cross_entropy(
        self, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, count: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the mean of -log softmax(x Wᵀ)[target] over targets other than -1, in float32, without keeping logits.

        With `count` it is the sum divided by that number. The forward pass computes the gradients, if they are wanted;
        backward only scales them.
        """
        leave_graph("the loss of a sparse head", derivatives.TO_DENSE)
        return self._cross_entropy(x, weight, targets, count)

    @torch._disable_dynamo  # torch.compile would try to trace the kernel, and warn about it
    def _cross_entropy(
        self, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, count: torch.Tensor | None
    ) -> torch.Tensor:
        loss: torch.Tensor = _CrossEntropy.apply(x, weight, targets, (self, torch.is_grad_enabled(), count))
        return loss

    def run(
        self,
        function: str,
        tokens: int,
        dtype: torch.dtype,
        tensors: Mapping[str, torch.Tensor | None],
        *,
        scale: float = 1.0,
        most_threads: int | None = None,
    ) -> None:
        """Call a function of the library on these tensors, by the names of `_Call`'s fields."""
        addresses = {name: t.data_ptr() for name, t in tensors.items() if t is not None}
        work = tokens * max(self.entries, sum(self.shape))
        threads = max(1, min(most_threads or torch.get_num_threads(), torch.get_num_threads(), work // PER_THREAD))
        call = self._call(tokens=tokens, dtype=DTYPES.index(dtype), threads=threads, scale=scale, **addresses)
        status = getattr(self.library, function)(ctypes.byref(call))
        assert status == 0, f"{function} returned {status}"

    def _call(self, **others: int | float) -> _Call:
        return _Call(matrix=self.matrix.struct, transpose=self.transpose.struct, order=self.order.data_ptr(), **others)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        how: tuple[CompiledIndex, bool, torch.Tensor | None],
    ) -> torch.Tensor:
        index, with_gradients, count = how
        wide = torch.promote_types(x.dtype, torch.float32)
        flat = x.reshape(-1, index.shape[1]).contiguous()
        targets = targets.reshape(-1).to(torch.int64).contiguous()
        if len(targets) != len(flat) or (len(targets) and int(targets.max()) >= index.shape[0]):
            raise UserError(f"{len(flat)} tokens need {len(flat)} targets below {index.shape[0]}")
        if len(targets) and int(targets.min()) < -1:
            raise UserError(f"a target is {int(targets.min())}: use -1 for tokens that do not count")
        counted = targets >= 0
        total = counted.sum() if count is None else count
        weights = counted.to(wide) / total
        wants_gradients = with_gradients and any(ctx.needs_input_grad)  # torch.no_grad does not change the latter
        losses = torch.empty(len(flat), dtype=wide)
        dx = torch.empty(flat.shape, dtype=wide) if wants_gradients else None
        gradient = torch.empty(index.entries, dtype=wide) if wants_gradients else None
        results = {"losses": losses, "dx": dx, "gradient": gradient, "values": losses.new_empty(index.entries)}
        given = {"x": flat, "weight": weight.contiguous(), "targets": targets, "weights": weights}
        each = (index.entries + HEAD_TILE * index.shape[0]) * losses.element_size()
        most = max(1, HEAD_SCRATCH // each)
        index.run("sl_head", len(flat), x.dtype, {**given, **results}, most_threads=most)
        if wants_gradients:
            ctx.save_for_backward(dx, gradient)
        ctx.index, ctx.shape, ctx.dtype = index, x.shape, x.dtype
        return losses.double().sum().div(total).to(wide)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        check_first_derivative("the loss of a sparse head", derivatives.TO_DENSE)
        dx, gradient = ctx.saved_tensors
        index: CompiledIndex = ctx.index
        dw = None
        if ctx.needs_input_grad[1]:
            dw = torch.empty(index.shape, dtype=ctx.dtype)
            index.run("sl_head_backward", len(dx), ctx.dtype, {"gradient": gradient, "dw": dw}, scale=float(grads[0]))
        return (dx * grads[0]).to(ctx.dtype).view(ctx.shape), dw, None, None


# --- MKL ---


class MKLIndex:
    """The mask and its transpose in CSR; `order` maps the values of the first to the order of the second."""

    def __init__(self, active: torch.Tensor):
        self.shape = (int(active.shape[0]), int(active.shape[1]))
        self.where = active.contiguous().view(-1).nonzero().view(-1)
        outputs, inputs = self.shape
        self.rows = _pointers(self.where // inputs, outputs)
        self.columns = (self.where % inputs).to(torch.int32)
        self.order = torch.argsort(self.where % inputs, stable=True)
        self.rows_of_transpose = _pointers((self.where % inputs)[self.order], inputs)
        self.columns_of_transpose = (self.where // inputs)[self.order].to(torch.int32)

    def _matrix(self, values: torch.Tensor) -> torch.Tensor:
        return torch.sparse_csr_tensor(self.rows, self.columns, values, self.shape, check_invariants=False)

    def _transpose(self, values: torch.Tensor) -> torch.Tensor:
        parts = (self.rows_of_transpose, self.columns_of_transpose, values[self.order])
        return torch.sparse_csr_tensor(*parts, self.shape[::-1], check_invariants=False)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dense_gradient: bool
    ) -> torch.Tensor:
        """See `definition.Index`."""
        y = derivatives.linear(x, weight, None, self, dense_gradient)
        return y if bias is None else y + bias

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return y and the values of the active weights."""
        assert bias is None
        values = weight.reshape(-1)[self.where].to(torch.promote_types(x.dtype, torch.float32))
        return self.product(x.to(values.dtype), values).to(x.dtype), values

    def backward(
        self, x: torch.Tensor, dy: torch.Tensor, values: torch.Tensor, dx: bool, dw: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return dx and dW as far as asked for."""
        wide_x, wide_dy = x.to(values.dtype), dy.to(values.dtype)
        found = self.input_gradient(wide_dy, values).to(x.dtype) if dx else None
        if not dw:
            return found, None
        gradient = x.new_zeros(self.shape)
        gradient.view(-1)[self.where] = self.weight_gradient(wide_x, wide_dy).to(x.dtype)
        return found, gradient

    def product(self, x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """x Sᵀ."""
        return (self._matrix(values) @ x.T).T if len(x) else x.new_zeros(0, self.shape[0])

    def input_gradient(self, dy: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """dy S."""
        return (self._transpose(values) @ dy.T).T if len(dy) else dy.new_zeros(0, self.shape[1])

    def weight_gradient(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """dyᵀ x at the active weights."""
        zeros = x.new_zeros(len(self.where))
        if not len(x):
            return zeros
        return torch.sparse.sampled_addmm(self._matrix(zeros), dy.T.contiguous(), x, beta=0.0).values()


def _pointers(sorted_rows: torch.Tensor, count: int) -> torch.Tensor:
    counts = torch.bincount(sorted_rows, minlength=count)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
