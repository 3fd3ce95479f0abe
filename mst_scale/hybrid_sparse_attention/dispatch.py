"""Chooses the kernel that computes attention.

`attention(q, k, v, pattern)` checks its inputs once, then passes them to a backend. All backends give the same result:

    dense        torch's scaled_dot_product_attention, if the pattern contains every pair
    cpp          compiled kernel for CPUs
    triton       fused kernels for CUDA
    blocked      torch operators on any device: costs as much as the pairs, but launches many small kernels
    definition   masked dense attention on any device: quadratic

`auto` chooses by device, dtype and size, and logs each different choice once. Requesting a backend that cannot run is a
UserError that says why.
"""

from __future__ import annotations

import functools
import logging
import math

import torch
import torch.nn.functional as F

from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention import cpp
from mst_scale.hybrid_sparse_attention.blocked import attention_blocked
from mst_scale.hybrid_sparse_attention.custom_op import SparseAttention
from mst_scale.hybrid_sparse_attention.definition import definition
from mst_scale.hybrid_sparse_attention.pattern import Pattern

BACKENDS = ("auto", "dense", "cpp", "triton", "blocked", "definition")
# Up to this size (batch × heads × length²), masked dense attention costs less than the launches of the blocked one.
SMALL = 1 << 21
DENSE = Pattern("dense")
log = logging.getLogger("mst_scale")


def attention(  # noqa: PLR0917  (the public signature)
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Pattern = DENSE,
    causal: bool = True,
    backend: str = "auto",
    *,
    dropout: float = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    """Return softmax(scale · q·kᵀ) v over the pairs of `pattern`.

    Args:
        q: queries (batch, heads, length, head_dim).
        k: keys, with as many heads or fewer; each is then shared by heads / kv_heads neighboring query heads.
        v: values, of the same shape as k.
        pattern: the pairs to compute.
        causal: whether a query sees only itself and earlier keys.
        backend: one of `BACKENDS`.
        dropout: dropout of the probabilities, available only where attention is dense.
        scale: a positive factor of the scores; by default 1 / √head_dim.

    Raises:
        UserError: for tensors that do not fit each other, dropout of sparse attention, or a scale that is not positive.
    """
    if scale is not None and not scale > 0:
        raise UserError(f"the scale of attention must be positive, not {scale}")
    q, k, v = _alike_under_autocast(q, k, v)
    _check(q, k, v)
    length = q.shape[-2]
    # "True if … else False" turns a symbolic length into a guard when torch.compile traces with dynamic shapes
    dense = True if pattern.is_dense(length) else False  # noqa: SIM210
    if dropout > 0.0 and not (dense and backend in ("auto", "dense")):
        raise UserError(f"sparse attention does not support dropout: set it to 0 to use {pattern}")
    small = True if q.shape[0] * q.shape[1] * length * length <= SMALL else False  # noqa: SIM210
    backend = select(backend, q.device.type, q.dtype, int(q.shape[-1]), dense, small)
    if backend == "dense":
        return _dense(q, k, v, causal, dropout, scale)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    compute = definition if backend == "definition" else _operator(backend)
    return compute(q, k, v, pattern=pattern, causal=causal, scale=scale)


def select(  # noqa: PLR0917
    backend: str, device: str, dtype: torch.dtype, head_dim: int, dense: bool, small: bool
) -> str:
    """Return the backend to use; `auto` selects the fastest one that can run.

    Raises:
        UserError: if `backend` is unknown or cannot run.
    """
    if backend not in BACKENDS:
        raise UserError(f"attention backend {backend!r} is unknown: choose one of {', '.join(BACKENDS)}")
    if backend == "auto":
        backend, why = choose(device, dtype, head_dim, dense, small)
        _log_choice(device, dtype, "every pair" if dense else "sparse", backend, why)
    elif (reason := unsupported_reason(backend, device, dtype, head_dim, dense)) is not None:
        raise UserError(f"attention backend {backend!r} cannot run here: {reason}")
    return backend


# torch.compile evaluates `select` while it traces, because the result depends only on constants. This is all that
# torch.compiler.assume_constant_result does, but calling it imports the compiler, which takes 1.4 s in each process.
select._dynamo_marked_constant = True  # type: ignore[attr-defined]


def choose(device: str, dtype: torch.dtype, head_dim: int, dense: bool, small: bool) -> tuple[str, str]:
    """Return the backend that `auto` selects, and the reason."""
    if dense:
        return "dense", "the pattern contains every pair"
    fused = "triton" if device == "cuda" else "cpp"
    reason = unsupported_reason(fused, device, dtype, head_dim, dense)
    if reason is None:
        return fused, f"the fused kernel for {device}"
    if small:
        return "definition", f"no {fused}: {reason}; masked dense attention is cheap at this size"
    return "blocked", f"no {fused}: {reason}"


def unsupported_reason(backend: str, device: str, dtype: torch.dtype, head_dim: int, dense: bool) -> str | None:
    """Describe why a backend cannot run; None if it can."""
    if backend == "dense" and not dense:
        return "it computes every pair, but this pattern does not contain every pair; use auto"
    if backend == "cpp":
        return cpp.unsupported_reason(device, dtype)
    if backend == "triton":
        try:
            from mst_scale.hybrid_sparse_attention import triton_kernel
        except ImportError as error:
            return f"triton cannot be imported ({error})"
        return triton_kernel.unsupported_reason(device, dtype, head_dim)
    return None


def _operator(backend: str) -> SparseAttention:
    if backend == "triton":
        from mst_scale.hybrid_sparse_attention.triton_kernel import attention_triton

        return attention_triton
    return cpp.attention_cpp if backend == "cpp" else attention_blocked


def _dense(  # noqa: PLR0917
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, dropout: float, scale: float | None
) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    if group > 1:  # with enable_gqa torch would not use its flash kernel on CPU
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=dropout, scale=scale)


@functools.cache  # once per choice and process
def _log_choice(device: str, dtype: torch.dtype, pairs: str, backend: str, why: str) -> None:
    log.info("attention (%s) on %s in %s: backend %s, %s", pairs, device, dtype, backend, why)


def _alike_under_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return tensors of several dtypes in autocast's, as torch's attention does; others as they are."""
    device = tensors[0].device.type
    if all(x.dtype == tensors[0].dtype for x in tensors) or not torch.is_autocast_enabled(device):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise UserError(
            "attention takes q, k, v of shape (batch, heads, length, head_dim), with k and v of equal shape; got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:]:
        raise UserError(f"q {tuple(q.shape)} and k {tuple(k.shape)} differ in batch, length or head_dim")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise UserError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads: make one divide the other")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise UserError(
            "q, k, v must share dtype and device; got " + ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        )
    if not q.dtype.is_floating_point:
        raise UserError(f"attention takes floating-point tensors, not {q.dtype}")
