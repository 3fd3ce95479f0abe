"""Computes attention over a pattern with torch operators only, at the cost of its pairs.

    strided   window  i - l < j ≤ i   ∪   rows r, r + l, r + 2l … among themselves, for each residue r
    fixed     blocks of l rows among themselves   ∪   every query with the last keys of earlier blocks

Each part is a `Band`: views of the rows involved, with extra batch dimensions (residues, blocks), in which query a sees
an interval of keys. A band is walked in blocks of queries: one product with the keys that the block can see, masked
where the ends of the interval cross it. Forward merges the parts of a row by their largest score and their sum:

    top = max(top_1, top_2),   total_k' = total_k e^(scale (top_k - top)),   total = total_1' + total_2'
    out = out_1 total_1' / total + out_2 total_2' / total

and backward needs no gradient of top and total: each part runs with the merged out, top and total. It takes time
O(n·(l + n/l)), and memory for at most `SCORES` scores at a time. It supports any device and any floating type; half
types are computed in float32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mst_scale.hybrid_sparse_attention.custom_op import Saved, Tensors3, accumulator, empty_output, sparse_operator
from mst_scale.hybrid_sparse_attention.pattern import Pattern

SCORES = 1 << 22  # 16 MiB of float32 scores; backward holds two such blocks
View = Callable[[torch.Tensor], torch.Tensor]
Bound = Callable[[Any], Any]  # of one row (int) or of a tensor of rows; may lie outside of the keys


@dataclass(frozen=True)
class Band:
    """Query a of `queries(q)` sees the keys b of `keys(k)` with low(a) ≤ b < high(a); both bounds never decrease."""

    queries: View
    keys: View
    low: Bound
    high: Bound


def _bands(pattern: Pattern, length: int, causal: bool) -> Iterator[Band]:
    """Yield the parts of a pattern. They are disjoint, and the first ones give every row at least one key."""
    n, l = length, min(pattern.stride, length)  # noqa: E741  (the paper's letters)
    whole, rest = divmod(n, l)
    if pattern.is_dense(n):
        yield Band(_all, _all, _never, _self if causal else _ever)
    elif pattern.kind == "strided":
        yield Band(_all, _all, lambda a: a - l + 1, _self if causal else lambda a: a + l)
        for first, residues, count in ((0, rest, whole + 1), (rest, l - rest, whole)):
            if residues and count > 1:
                view = _residues(first, residues, count, l)
                yield Band(view, view, _never, lambda a: a)
                if not causal:
                    yield Band(view, view, lambda a: a + 1, _ever)
    else:
        for view, size in ((_blocks(0, whole, l), l), (_blocks(whole * l, 1, rest), rest)):
            if size:
                yield Band(view, view, _never, _self if causal else _ever)
        last = _residues(l - 1, 1, whole, l)  # the last key of every whole block, behind a batch dimension of 1
        yield Band(_unsqueezed, last, _never, lambda a: a // l)
        if not causal:
            yield Band(_unsqueezed, last, lambda a: a // l + 1, _ever)


def _never(_: Any) -> int:
    return 0


def _ever(_: Any) -> int:
    return sys.maxsize


def _self(a: Any) -> Any:
    return a + 1


def _all(x: torch.Tensor) -> torch.Tensor:
    return x


def _unsqueezed(x: torch.Tensor) -> torch.Tensor:
    return x.unsqueeze(-3)


def _residues(first: int, residues: int, count: int, stride: int) -> View:
    """View (…, n, d) as (…, residues, count, d): row a of residue r is row first + r + a·stride."""

    def view(x: torch.Tensor) -> torch.Tensor:
        *lead, row, column = x.stride()
        shape = (*x.shape[:-2], residues, count, x.shape[-1])
        return x.as_strided(shape, (*lead, row, stride * row, column), x.storage_offset() + first * row)

    return view


def _blocks(first: int, blocks: int, size: int) -> View:
    """View (…, n, d) from row `first` as (…, blocks, size, d)."""

    def view(x: torch.Tensor) -> torch.Tensor:
        return x[..., first : first + blocks * size, :].unflatten(-2, (blocks, size))

    return view


def _tiles(band: Band, q: torch.Tensor, k: torch.Tensor) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
    """Yield blocks of queries, the keys that each can see, and the mask unless it is all true.

    A block is about as long as the interval of keys (16 to 128 rows), so that at most about half of the computed scores
    are masked; it is shorter where many batches would make the scores large.
    """
    count, keys = q.shape[-2], k.shape[-2]
    batch = q[..., 0, 0].numel()
    start = 0
    while start < count:
        span = max(1, min(keys, band.high(start)) - max(0, band.low(start)))
        size = min(128, max(16, span))
        while size > 1 and batch * size * (span + size) > SCORES:
            size //= 2
        stop = min(count, start + size)
        low, high = max(0, band.low(start)), min(keys, band.high(stop - 1))
        if low < high:
            mask = None
            if band.low(stop - 1) > low or band.high(start) < high:
                row = torch.arange(start, stop, device=q.device)[:, None]
                column = torch.arange(low, high, device=q.device)
                mask = (column < band.low(row)) | (column >= band.high(row))
            yield slice(start, stop), slice(low, high), mask
        start = stop


def _scores(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return q·k without the scale, because the largest score of the row is subtracted before scaling."""
    scores = q.to(dtype) @ k.to(dtype).transpose(-2, -1)
    return scores if mask is None else scores.masked_fill_(mask, -torch.inf)


def _grouped(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """View (b, h, n, d) and (b, g, n, d) as (b, g, h/g, n, d) and (b, g, 1, n, d)."""
    return q.unflatten(1, (k.shape[1], -1)), k.unsqueeze(2)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, pattern: Pattern, causal: bool, scale: float
) -> Tensors3:
    """Compute (out, top, total), see custom_op."""
    dtype = accumulator(q.dtype)
    out = empty_output(q)
    wide = out.zero_() if q.dtype == dtype else torch.zeros_like(out, dtype=dtype)
    top = torch.full(q.shape[:3], -torch.inf, dtype=dtype, device=q.device)
    total = torch.zeros_like(top)
    if q.numel():
        (q5, k5), (o5, v5) = _grouped(q, k), _grouped(wide, v)
        top5, total5 = (x.unflatten(1, (k.shape[1], -1)).unsqueeze(-1) for x in (top, total))
        for band in _bands(pattern, q.shape[2], causal):
            qs, ks, vs = band.queries(q5), band.keys(k5), band.keys(v5)
            merged, tops, totals = (band.queries(x) for x in (o5, top5, total5))
            for rows, columns, mask in _tiles(band, qs, ks):
                scores = _scores(qs[..., rows, :], ks[..., columns, :], mask, dtype)
                before = tops[..., rows, :]
                most = torch.maximum(scores.amax(-1, keepdim=True), before)
                base = most.masked_fill(most == -torch.inf, 0.0)  # a row that has not seen any key: exp(-inf - 0) = 0
                p = scores.sub_(base).mul_(scale).exp_()
                kept = (before - base).mul_(scale).exp_() * totals[..., rows, :]  # weight of the parts merged so far
                both = kept + p.sum(-1, keepdim=True)
                share = both.masked_fill(both == 0.0, 1.0)
                merged[..., rows, :].mul_(kept / share).add_((p / share) @ vs[..., columns, :].to(dtype))
                before.copy_(most)
                totals[..., rows, :] = both
    if wide is not out:
        out.copy_(wide)
    return out, top, total


def backward(saved: Saved, dout: torch.Tensor, *, pattern: Pattern, causal: bool, scale: float) -> Tensors3:
    """Compute (dq, dk, dv), see custom_op."""
    q, k, v, out, top, total = saved
    dtype = accumulator(q.dtype)
    grads = [empty_output(x) for x in (q, k, v)]
    dq, dk, dv = (x.zero_() if x.dtype == dtype else torch.zeros_like(x, dtype=dtype) for x in grads)
    if q.numel():
        delta = torch.einsum("bhnd,bhnd->bhn", dout.to(dtype), out.to(dtype))  # Σ_j p_ij dp_ij
        (q5, k5), (do5, v5), (dq5, dk5) = _grouped(q, k), _grouped(dout, v), _grouped(dq, dk)
        dv5, heads = dv.unsqueeze(2), (k.shape[1], -1)
        top = top.masked_fill(top == -torch.inf, torch.inf)  # a row that has not seen any key: exp(-inf) = 0
        inverse = 1 / total.masked_fill(total == 0.0, 1.0)
        top5, inverse5, d5 = (x.unflatten(1, heads).unsqueeze(-1) for x in (top, inverse, delta))
        for band in _bands(pattern, q.shape[2], causal):
            qs, dos, dqs, tops, inverses, ds = (band.queries(x) for x in (q5, do5, dq5, top5, inverse5, d5))
            ks, vs, dks, dvs = (band.keys(x) for x in (k5, v5, dk5, dv5))
            for rows, columns, mask in _tiles(band, qs, ks):
                qt, dot = qs[..., rows, :].to(dtype), dos[..., rows, :].to(dtype)
                kt = ks[..., columns, :].to(dtype)
                p = _scores(qt, kt, mask, dtype).sub_(tops[..., rows, :]).mul_(scale).exp_()
                p.mul_(inverses[..., rows, :])
                dvs[..., columns, :] += (p.transpose(-2, -1) @ dot).sum_to_size(dvs[..., columns, :].shape)
                dp = dot @ vs[..., columns, :].to(dtype).transpose(-2, -1)
                dscores = dp.sub_(ds[..., rows, :]).mul_(p).mul_(scale)
                dqs[..., rows, :] += dscores @ kt
                dks[..., columns, :] += (dscores.transpose(-2, -1) @ qt).sum_to_size(dks[..., columns, :].shape)
    for grad, sums in zip(grads, (dq, dk, dv), strict=True):
        if grad is not sums:
            grad.copy_(sums)
    return grads[0], grads[1], grads[2]


attention_blocked = sparse_operator("sparse_attention_blocked", forward, backward)
