"""Turns a hand-written forward and backward into one operator for autograd and torch.compile.

    (out, top, total) = forward(q, k, v)     top_i = max_j q_i·k_j,   total_i = Σ_j exp(scale (q_i·k_j - top_i))
    (dq, dk, dv) = backward(q, k, v, out, top, total, dout)          p_ij = exp(scale (q_i·k_j - top_i)) / total_i

Every sparse backend is such a pair. It is registered with torch.library, so that torch.compile keeps it in the graph as
one opaque node and activation checkpointing recomputes it like any other operator. Saved for backward: q, k, v, out and
8 bytes per row. Dense flash attention saves 4 bytes per row, top and total as one log-sum-exp; at scores of 10^5 its
rounding to float32 is an error of 0.004, and every p has the same relative error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch

from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention.pattern import Pattern
from mst_scale.transforms import check_not_transformed

TO_DEFINITION = 'set mst.attention.backend to "definition", which computes every pair and masks'
Tensors3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""(q, k, v, out, top, total), which backward gets."""
Backward = Callable[..., Tensors3]


class Forward(Protocol):
    """The forward function of a backend."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, pattern: Pattern, causal: bool, scale: float
    ) -> Tensors3:
        """Return (out, top, total)."""


class SparseAttention(Protocol):
    """A registered operator: attention over the pairs of a pattern."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, pattern: Pattern, causal: bool, scale: float
    ) -> torch.Tensor:
        """Return the output (batch, heads, length, head_dim)."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_output(q: torch.Tensor) -> torch.Tensor:
    """Return an empty (batch, heads, length, head_dim) tensor laid out so that merging the heads of a row is a view."""
    batch, heads, length, dim = q.shape
    return q.new_empty(batch, length, heads, dim).transpose(1, 2)


def empty_results(q: torch.Tensor) -> Tensors3:
    """Return empty (out, top, total); top and total have one number per row of queries."""
    top, total = (q.new_empty(q.shape[:3], dtype=accumulator(q.dtype)) for _ in range(2))
    return empty_output(q), top, total


def empty_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors3:
    """Return empty (dq, dk, dv)."""
    return empty_output(q), empty_output(k), empty_output(v)


def sparse_operator(name: str, forward: Forward, backward: Backward) -> SparseAttention:
    """Register `mst_scale::{name}` and return it as a function of (q, k, v, pattern, causal, scale)."""
    options = "str kind, int stride, bool causal, float scale"
    saved = "Tensor q, Tensor k, Tensor v, Tensor out, Tensor top, Tensor total"

    def run_forward(*inputs: Any) -> Tensors3:
        *qkv, kind, stride, causal, scale = inputs
        with torch.autocast(qkv[0].device.type, enabled=False):
            return forward(*qkv, pattern=Pattern(kind, stride), causal=causal, scale=scale)

    def run_backward(*inputs: Any) -> Tensors3:
        *saved, dout, kind, stride, causal, scale = inputs
        with torch.autocast(dout.device.type, enabled=False):
            return backward(tuple(saved), dout, pattern=Pattern(kind, stride), causal=causal, scale=scale)

    forward_op = torch.library.custom_op(
        f"mst_scale::{name}",
        run_forward,
        mutates_args=(),
        schema=f"(Tensor q, Tensor k, Tensor v, {options}) -> (Tensor, Tensor, Tensor)",
    )
    backward_op = torch.library.custom_op(
        f"mst_scale::{name}_backward",
        run_backward,
        mutates_args=(),
        schema=f"({saved}, Tensor dout, {options}) -> (Tensor, Tensor, Tensor)",
    )
    forward_op.register_fake(lambda q, *_: empty_results(q))
    backward_op.register_fake(lambda q, k, v, *_: empty_gradients(q, k, v))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors3) -> None:
        q, k, v, *ctx.options = inputs
        out, top, total = output
        ctx.save_for_backward(q, k, v, out, top, total)
        ctx.mark_non_differentiable(top, total)

    def run_autograd(ctx: Any, dout: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*backward_op(*ctx.saved_tensors, dout, *ctx.options), None, None, None, None)

    def run_second(ctx: Any, *grads: torch.Tensor) -> NoReturn:
        raise UserError(
            f"sparse attention ({name}) has no second derivatives, which create_graph=True requires; {TO_DEFINITION}"
        )

    forward_op.register_autograd(run_autograd, setup_context=setup_context)
    backward_op.register_autograd(run_second)

    def apply(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, pattern: Pattern, causal: bool, scale: float
    ) -> torch.Tensor:
        check_not_transformed(f"sparse attention ({name})", TO_DEFINITION, q, k, v, vmap=True)
        return forward_op(q, k, v, pattern.kind, pattern.stride, causal, scale)[0]

    return apply
