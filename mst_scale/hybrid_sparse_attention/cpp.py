"""Calls the compiled CPU kernel of attention.

cpp_kernel/*.h, kernel.cpp  →  one shared library (`mst_scale.compiled`)  →  ctypes.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from mst_scale import compiled
from mst_scale.hybrid_sparse_attention.custom_op import Saved, Tensors3, empty_gradients, empty_results, sparse_operator
from mst_scale.hybrid_sparse_attention.pattern import KINDS, Pattern

SOURCES = Path(__file__).parent / "cpp_kernel"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # kernel.cpp's codes 0, 1, 2, 3
# From this many rows per residue class on, gathering the class is faster than its diagonals: it reads each row once per
# 64 others instead of once per pair. For heads of 64 and l = 32 … 256: equal at 32 rows, 1.2 to 1.4 times faster at 64.
REGROUP_FROM = 32
# Multiply-adds per thread, at least: about 20 µs of work.
PER_THREAD = 1 << 20


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "row"))]


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, _Tensor) for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")),
        *((name, ctypes.c_void_p) for name in ("top", "total")),
        *((name, ctypes.c_int64) for name in ("batches", "heads", "kv_heads", "length", "dim")),
        *((name, ctypes.c_int64) for name in ("dtype", "kind", "stride", "causal", "regroup", "threads")),
        ("scale", ctypes.c_double),
    ]


@functools.cache
def library() -> ctypes.CDLL | str:
    """Return the loaded library, or the reason why there is none. Loading is tried once per process."""
    loaded = compiled.load("sparse_attention", SOURCES)
    if isinstance(loaded, ctypes.CDLL):
        declare(loaded)
    return loaded


def declare(loaded: ctypes.CDLL) -> None:
    """Declare the argument types of the library's functions."""
    for function in (loaded.hsa_forward, loaded.hsa_backward):
        function.argtypes, function.restype = [ctypes.POINTER(_Call)], ctypes.c_int


def unsupported_reason(device: str, dtype: torch.dtype) -> str | None:
    """Describe why this kernel cannot run; None if it can. The kernel is compiled at the first call."""
    if device != "cpu":
        return f"it runs on CPU tensors, not {device}"
    if dtype not in DTYPES:
        return f"it does not support {dtype}"
    loaded = library()
    return loaded if isinstance(loaded, str) else None


def _rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _call(
    function: str,
    pattern: Pattern,
    causal: bool,
    scale: float,
    rows: tuple[torch.Tensor, torch.Tensor],
    **tensors: torch.Tensor,
) -> None:
    loaded = library()
    assert isinstance(loaded, ctypes.CDLL), loaded
    assert scale > 0, scale  # so that the largest product is the largest score
    q, k = tensors["q"], tensors["k"]
    if q.numel() == 0:
        return
    length = q.shape[2]
    work = q.shape[0] * q.shape[1] * q.shape[3] * pattern.pairs(length, causal)
    call = _Call(
        **{name: _Tensor(x.data_ptr(), *x.stride()[:3]) for name, x in tensors.items()},
        top=rows[0].data_ptr(),
        total=rows[1].data_ptr(),
        batches=q.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        length=length,
        dim=q.shape[3],
        dtype=DTYPES.index(q.dtype),
        kind=KINDS.index(pattern.kind),
        stride=min(pattern.stride, length),
        causal=causal,
        regroup=pattern.kind == "strided" and length >= REGROUP_FROM * pattern.stride,
        threads=max(1, min(torch.get_num_threads(), work // PER_THREAD)),
        scale=scale,
    )
    status = getattr(loaded, function)(ctypes.byref(call))
    assert status == 0, f"{function} returned {status}"


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, pattern: Pattern, causal: bool, scale: float
) -> Tensors3:
    """Compute (out, top, total), see custom_op."""
    q, k, v = map(_rows_contiguous, (q, k, v))
    out, top, total = empty_results(q)
    _call("hsa_forward", pattern, causal, scale, (top, total), q=q, k=k, v=v, out=out)
    return out, top, total


def backward(saved: Saved, dout: torch.Tensor, *, pattern: Pattern, causal: bool, scale: float) -> Tensors3:
    """Compute (dq, dk, dv), see custom_op."""
    q, k, v, out, top, total = saved
    q, k, v, out, dout = map(_rows_contiguous, (q, k, v, out, dout))
    dq, dk, dv = empty_gradients(q, k, v)
    tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
    _call("hsa_backward", pattern, causal, scale, (top.contiguous(), total.contiguous()), **tensors)
    return dq, dk, dv


attention_cpp = sparse_operator("sparse_attention_cpp", forward, backward)
