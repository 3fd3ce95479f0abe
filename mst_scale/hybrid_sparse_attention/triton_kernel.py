"""Computes attention over a pattern of pairs on a GPU, at the cost of the pairs.

Positions are reordered so that every part of a pattern is a band next to the diagonal of a matrix, and tensor cores
work on whole tiles:

    window    i - l < j ≤ i, in the order of the sequence
    residues  j = i - ml: residue by residue (0, l, 2l, …, 1, l+1, …); a tile of 64 positions holds several residues
    block     ⌊i/l⌋ = ⌊j/l⌋, in the order of the sequence
    last      keys kl + l - 1 of earlier blocks

There is one forward kernel (online softmax), one for dq, and one for dk and dv. Each is launched once per part, and two
parts make a pattern. The second launch continues from out, top and total of the first one; gradients add up. The part
with fewer pairs goes first in forward and dq, so that rounding to the storage type in between matters least.

Importing this file requires triton, so dispatch imports it only for the Triton backend.
"""

# ruff: noqa: PLR0917  (kernels take their arguments by position)

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl

from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention.custom_op import Saved, Tensors3, empty_gradients, empty_results, sparse_operator
from mst_scale.hybrid_sparse_attention.pattern import Pattern
from mst_scale.hybrid_sparse_attention.tiles import Tile, size_class, tiles_of, width
from mst_scale.tile_choice import among, capability_of

WINDOW, RESIDUES, BLOCK, LAST = (tl.constexpr(part) for part in range(4))
BEYOND = tl.constexpr(2**31 - 1)  # a row outside of every sequence
LOG2E = tl.constexpr(1.4426950408889634)


# ------------------------------------------------------------------------------------------------ geometry of a part
@triton.jit
def _query_row(position, stride, per, PART: tl.constexpr):
    """Row of the sequence at a position in the part's order; `per` is the number of rows per residue, rounded up."""
    if PART == RESIDUES:
        return tl.where(position < per * stride, (position % per) * stride + position // per, BEYOND)
    else:
        return position


@triton.jit
def _key_row(position, stride, per, PART: tl.constexpr):
    if PART == LAST:
        return position * stride + stride - 1  # at least the length for the first invalid position, length // stride
    else:
        return _query_row(position, stride, per, PART)


@triton.jit
def _seen(query, key, stride, per, PART: tl.constexpr, CAUSAL: tl.constexpr):
    """Whether the query at this position sees the key at that one."""
    if PART == WINDOW:
        return (query - key < stride) & (key <= query if CAUSAL else key - query < stride)
    elif PART == RESIDUES:
        return (query // per == key // per) & (key < query if CAUSAL else key != query)
    elif PART == BLOCK:
        return (query // stride == key // stride) & (key <= query if CAUSAL else True)
    else:
        return key < query // stride if CAUSAL else key != query // stride


@triton.jit
def _all_seen(first, last, start, end, n, stride, per, PART: tl.constexpr, CAUSAL: tl.constexpr, SKIP: tl.constexpr):
    """Whether queries first … last see all keys start … end, and these lie in the sequence; false without SKIP."""
    if not SKIP:
        return False
    elif PART == WINDOW:
        return (last - start < stride) & (end <= first if CAUSAL else end - first < stride) & (end < n)
    elif PART == RESIDUES:
        alike = (first // per == last // per) & (start // per == first // per) & (end // per == first // per)
        return (
            alike & (end < first if CAUSAL else (end < first) | (start > last)) & (end % per * stride + end // per < n)
        )
    elif PART == BLOCK:
        alike = (first // stride == last // stride) & (start // stride == first // stride)
        return alike & (end <= first if CAUSAL else end // stride == first // stride) & (end < n)
    else:
        earlier = end < first // stride
        return (earlier if CAUSAL else earlier | (start > last // stride)) & (end * stride + stride - 1 < n)


@triton.jit
def _keys_of(first, last, n, stride, per, PART: tl.constexpr, CAUSAL: tl.constexpr):
    """Positions [low, high) of the keys that queries first … last can see."""
    if PART == WINDOW:
        return tl.maximum(first - stride + 1, 0), tl.minimum(n, (last + 1) if CAUSAL else (last + stride))
    elif PART == RESIDUES:
        return first // per * per, tl.minimum(per * stride, (last + 1) if CAUSAL else ((last // per + 1) * per))
    elif PART == BLOCK:
        return first // stride * stride, tl.minimum(n, (last + 1) if CAUSAL else ((last // stride + 1) * stride))
    else:
        return 0, tl.minimum(n // stride, (last // stride) if CAUSAL else n)


@triton.jit
def _queries_of(first, last, n, stride, per, PART: tl.constexpr, CAUSAL: tl.constexpr):
    """Positions [low, high) of the queries that can see keys first … last."""
    if PART == WINDOW:
        return first if CAUSAL else tl.maximum(first - stride + 1, 0), tl.minimum(n, last + stride)
    elif PART == RESIDUES:
        return first if CAUSAL else first // per * per, tl.minimum(per * stride, (last // per + 1) * per)
    elif PART == BLOCK:
        return first if CAUSAL else first // stride * stride, tl.minimum(n, (last // stride + 1) * stride)
    else:
        return (first + 1) * stride if CAUSAL else 0, n


@triton.jit
def _load(base, rows, pitch, n, D: tl.constexpr, WIDE: tl.constexpr):
    """Rows of one head as (len(rows), WIDE); zeros outside of the tensor."""
    column = tl.arange(0, WIDE)
    inside = (rows < n)[:, None] & (column < D)[None, :]
    return tl.load(base + rows[:, None] * pitch + column[None, :], mask=inside, other=0.0)


@triton.jit
def _store(base, rows, pitch, n, value, D: tl.constexpr, WIDE: tl.constexpr):
    column = tl.arange(0, WIDE)
    inside = (rows < n)[:, None] & (column < D)[None, :]
    tl.store(base + rows[:, None] * pitch + column[None, :], value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _own(base, b, h, n, heads, WIDTH: tl.constexpr):
    """One head of a tensor that this file has allocated: contiguous (batch, length, heads, WIDTH)."""
    return base + b * n * heads * WIDTH + h * WIDTH


@triton.jit
def _softmax(top, total, row, n):
    """top, and 1 / total; +inf for rows without keys and outside of the sequence, so that exp2(s - top) is 0."""
    most = tl.load(top + row, mask=row < n, other=-float("inf"))
    sum = tl.load(total + row, mask=row < n, other=0.0)
    return tl.where(most == -float("inf"), float("inf"), most), 1.0 / tl.where(sum == 0.0, 1.0, sum)


# ------------------------------------------------------------------------------------------------ kernels
# `kind` is only read by the tuner: launches of one kind share tuning results.
@triton.jit(do_not_specialize=["kind"])
def _forward(
    q, k, v, out, tops, totals,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    n, stride, per, heads, positions, kind, scale,
    GROUP: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    PART: tl.constexpr, CAUSAL: tl.constexpr, FIRST: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(positions, QUERIES)
    first = tl.program_id(0) % tiles * QUERIES
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // heads, head % heads
    q += b * q_batch + h * q_head
    k += b * k_batch + h // GROUP * k_head
    v += b * v_batch + h // GROUP * v_head
    out = _own(out, b, h, n, heads, D)
    tops += head * n
    totals += head * n

    position = first + tl.arange(0, QUERIES)
    row = _query_row(position, stride, per, PART)
    query = _load(q, row, q_row, n, D, WIDE)
    if FIRST:
        top = tl.full([QUERIES], -float("inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        sums = tl.zeros([QUERIES, WIDE], tl.float32)
    else:  # continue from the result of the launch before
        top = tl.load(tops + row, mask=row < n, other=-float("inf"))
        total = tl.load(totals + row, mask=row < n, other=0.0)
        sums = _load(out, row, heads * D, n, D, WIDE).to(tl.float32) * total[:, None]
    last = tl.minimum(first + QUERIES, positions) - 1
    low, high = _keys_of(first, last, n, stride, per, PART, CAUSAL)
    for start in range(low, high, KEYS):
        other = start + tl.arange(0, KEYS)
        key_row = _key_row(other, stride, per, PART)
        key = _load(k, key_row, k_row, n, D, WIDE)
        value = _load(v, key_row, v_row, n, D, WIDE)
        s = tl.dot(query, tl.trans(key), input_precision="ieee")
        if not _all_seen(first, last, start, start + KEYS - 1, n, stride, per, PART, CAUSAL, SKIP):
            seen = _seen(position[:, None], other[None, :], stride, per, PART, CAUSAL) & (key_row < n)[None, :]
            s = tl.where(seen, s, -float("inf"))
        above = tl.maximum(top, tl.max(s, 1))
        base = tl.where(above == -float("inf"), 0.0, above)
        shrink = tl.exp2((top - base) * (scale * LOG2E))
        p = tl.exp2((s - base[:, None]) * (scale * LOG2E))
        total = total * shrink + tl.sum(p, 1)
        sums = sums * shrink[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
        top = above
    _store(out, row, heads * D, n, sums / tl.where(total == 0.0, 1.0, total)[:, None], D, WIDE)
    tl.store(tops + row, top, mask=row < n)
    tl.store(totals + row, total, mask=row < n)


@triton.jit(do_not_specialize=["kind"])
def _backward_queries(
    q, k, v, out, tops, totals, dout, delta, dq,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    n, stride, per, heads, positions, kind, scale,
    GROUP: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    PART: tl.constexpr, CAUSAL: tl.constexpr, FIRST: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(positions, QUERIES)
    first = tl.program_id(0) % tiles * QUERIES
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // heads, head % heads
    q += b * q_batch + h * q_head
    k += b * k_batch + h // GROUP * k_head
    v += b * v_batch + h // GROUP * v_head
    out, dout, dq = _own(out, b, h, n, heads, D), _own(dout, b, h, n, heads, D), _own(dq, b, h, n, heads, D)
    tops += head * n
    totals += head * n
    delta += head * n

    position = first + tl.arange(0, QUERIES)
    row = _query_row(position, stride, per, PART)
    query = _load(q, row, q_row, n, D, WIDE)
    dvalue = _load(dout, row, heads * D, n, D, WIDE)
    top, inverse = _softmax(tops, totals, row, n)
    mean = tl.sum(dvalue.to(tl.float32) * _load(out, row, heads * D, n, D, WIDE).to(tl.float32), 1)  # Σ_j p_ij dp_ij
    if FIRST:
        tl.store(delta + row, mean, mask=row < n)  # the dk, dv kernel reads it
    sums = tl.zeros([QUERIES, WIDE], tl.float32)
    last = tl.minimum(first + QUERIES, positions) - 1
    low, high = _keys_of(first, last, n, stride, per, PART, CAUSAL)
    for start in range(low, high, KEYS):
        other = start + tl.arange(0, KEYS)
        key_row = _key_row(other, stride, per, PART)
        key = _load(k, key_row, k_row, n, D, WIDE)
        value = _load(v, key_row, v_row, n, D, WIDE)
        s = tl.dot(query, tl.trans(key), input_precision="ieee")
        if not _all_seen(first, last, start, start + KEYS - 1, n, stride, per, PART, CAUSAL, SKIP):
            seen = _seen(position[:, None], other[None, :], stride, per, PART, CAUSAL) & (key_row < n)[None, :]
            s = tl.where(seen, s, -float("inf"))
        p = tl.exp2((s - top[:, None]) * (scale * LOG2E)) * inverse[:, None]
        dp = tl.dot(dvalue, tl.trans(value), input_precision="ieee")
        ds = p * (dp - mean[:, None])
        sums += tl.dot(ds.to(key.dtype), key, input_precision="ieee")
    sums *= scale
    if not FIRST:
        sums += _load(dq, row, heads * D, n, D, WIDE).to(tl.float32)
    _store(dq, row, heads * D, n, sums, D, WIDE)


@triton.jit(do_not_specialize=["kind"])
def _backward_keys(
    q, k, v, tops, totals, dout, delta, dk, dv,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    n, stride, per, key_heads, positions, kind, scale,
    GROUP: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    PART: tl.constexpr, CAUSAL: tl.constexpr, FIRST: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(positions, KEYS)
    first = tl.program_id(0) % tiles * KEYS
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, g = head // key_heads, head % key_heads
    heads = key_heads * GROUP
    q += b * q_batch
    k += b * k_batch + g * k_head
    v += b * v_batch + g * v_head
    dk, dv = _own(dk, b, g, n, key_heads, D), _own(dv, b, g, n, key_heads, D)

    position = first + tl.arange(0, KEYS)
    row = _key_row(position, stride, per, PART)
    key = _load(k, row, k_row, n, D, WIDE)
    value = _load(v, row, v_row, n, D, WIDE)
    sums_k = tl.zeros([KEYS, WIDE], tl.float32)
    sums_v = tl.zeros([KEYS, WIDE], tl.float32)
    last = tl.minimum(first + KEYS, positions) - 1
    low, high = _queries_of(first, last, n, stride, per, PART, CAUSAL)
    for shared in range(GROUP):  # all query heads that read this key head
        h = g * GROUP + shared
        for start in range(low, high, QUERIES):
            other = start + tl.arange(0, QUERIES)
            query_row = _query_row(other, stride, per, PART)
            query = _load(q + h * q_head, query_row, q_row, n, D, WIDE)
            dvalue = _load(_own(dout, b, h, n, heads, D), query_row, heads * D, n, D, WIDE)
            at = (b * heads + h) * n
            top, inverse = _softmax(tops + at, totals + at, query_row, n)
            mean = tl.load(delta + at + query_row, mask=query_row < n, other=0.0)
            s = tl.dot(key, tl.trans(query), input_precision="ieee")
            if not _all_seen(start, start + QUERIES - 1, first, last, n, stride, per, PART, CAUSAL, SKIP):
                seen = _seen(other[None, :], position[:, None], stride, per, PART, CAUSAL) & (row < n)[:, None]
                s = tl.where(seen, s, -float("inf"))
            p = tl.exp2((s - top[None, :]) * (scale * LOG2E)) * inverse[None, :]
            sums_v += tl.dot(p.to(dvalue.dtype), dvalue, input_precision="ieee")
            dp = tl.dot(value, tl.trans(dvalue), input_precision="ieee")
            ds = p * (dp - mean[None, :])
            sums_k += tl.dot(ds.to(query.dtype), query, input_precision="ieee")
    sums_k *= scale
    if not FIRST:
        sums_k += _load(dk, row, key_heads * D, n, D, WIDE).to(tl.float32)
        sums_v += _load(dv, row, key_heads * D, n, D, WIDE).to(tl.float32)
    _store(dk, row, key_heads * D, n, sums_k, D, WIDE)
    _store(dv, row, key_heads * D, n, sums_v, D, WIDE)


# ------------------------------------------------------------------------------------------------ launches
def interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def unsupported_reason(device: str, dtype: torch.dtype, head_dim: int) -> str | None:
    """Describe why these kernels cannot run; None if they can."""
    if device != "cuda" and not interpreted():
        return f"it needs a CUDA device (tensors are on {device}), or TRITON_INTERPRET=1 before the first import"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it does not support {dtype}"
    if dtype == torch.bfloat16 and interpreted():
        return "Triton's interpreter computes bfloat16 products incorrectly: use float32 or float16"
    if head_dim > 256:
        return f"it supports head_dim up to 256, not {head_dim}"
    return None


def _parts(pattern: Pattern, length: int) -> list[int]:
    """Return the parts of a pattern, each of which is one launch; the part with the fewest pairs is first."""
    if pattern.is_dense(length):
        return [WINDOW.value]
    return [RESIDUES.value, WINDOW.value] if pattern.kind == "strided" else [LAST.value, BLOCK.value]


# tensors that all launches but the first read before they write them: tuning must restore them
CONTINUED = {"_forward": ("out", "tops", "totals"), "_backward_queries": ("dq",), "_backward_keys": ("dk", "dv")}


TUNED_BY = ["PART", "CAUSAL", "GROUP", "D", "FIRST", "kind"]  # and dtypes


@functools.cache
def _tuned(name: str, tiles: tuple[Tile, ...], continued: tuple[str, ...]) -> Any:
    """Return a kernel that is tuned over these tile sizes at the first launch of each kind; results are cached."""
    configs = [
        triton.Config(
            {"QUERIES": one.queries, "KEYS": one.keys, "SKIP": one.skip}, num_warps=one.warps, num_stages=one.stages
        )
        for one in tiles
    ]
    kernel = globals()[name]
    return triton.autotune(configs, key=TUNED_BY, restore_value=continued, cache_results=True)(kernel)


def _launch(name, tensors, q, k, v, pattern, causal, scale, part, first, over_keys):
    batch, heads, length, dim = q.shape
    stride = length if pattern.is_dense(length) else pattern.stride
    per = triton.cdiv(length, stride)
    owners, group = k.shape[1] if over_keys else heads, heads // k.shape[1]
    positions = (
        length // stride if part == LAST.value and over_keys else per * stride if part == RESIDUES.value else length
    )
    if positions == 0:
        return

    def grid(tile: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(positions, tile["KEYS" if over_keys else "QUERIES"]) * batch * owners,)

    kind = size_class(stride) * 32 + size_class(per)
    tiles = among(tiles_of(name, capability_of(q.device), q.dtype, dim))
    kernel = _tuned(name, tiles, () if first else CONTINUED[name])
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    with torch.cuda.device_of(q):  # Triton launches on the current device
        kernel[grid](
            *tensors, *strides, length, stride, per, owners, positions, kind, scale,
            GROUP=group, D=dim, WIDE=width(dim), PART=part, CAUSAL=causal, FIRST=first,
        )  # fmt: skip


def _readable(x: torch.Tensor) -> torch.Tensor:
    """Make the last dimension contiguous, and offsets within a head fit into 32 bits."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x if x.shape[2] * x.stride(2) < 2**31 else x.contiguous()


def _check_offsets(q: torch.Tensor) -> None:
    """Check that 32-bit offsets suffice: the kernels' tensors have rows of heads × head_dim numbers."""
    _, heads, length, dim = q.shape
    if length * heads * dim >= 2**31:
        raise UserError(
            f"{length} rows of {heads} heads × {dim} exceed the kernels' 32-bit offsets: split the sequences over "
            "ranks (sequence_parallel), or use backend blocked"
        )


def _packed(x: torch.Tensor) -> torch.Tensor:
    """Lay out (batch, heads, length, d) as the tensors that the kernels allocate."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, pattern: Pattern, causal: bool, scale: float
) -> Tensors3:
    """Compute (out, top, total), see custom_op."""
    _check_offsets(q)
    q, k, v = map(_readable, (q, k, v))
    out, top, total = empty_results(q)
    if q.numel():
        for index, part in enumerate(_parts(pattern, q.shape[2])):
            _launch("_forward", (q, k, v, out, top, total), q, k, v, pattern, causal, scale, part, index == 0, False)
    return out, top, total


def backward(saved: Saved, dout: torch.Tensor, *, pattern: Pattern, causal: bool, scale: float) -> Tensors3:
    """Compute (dq, dk, dv), see custom_op."""
    q, k, v, out, top, total = saved
    q, k, v = map(_readable, (q, k, v))
    out, dout, top, total = _packed(out), _packed(dout), top.contiguous(), total.contiguous()
    dq, dk, dv = empty_gradients(q, k, v)
    if q.numel():
        delta = torch.empty_like(top)
        parts = _parts(pattern, q.shape[2])
        for index, part in enumerate(parts):
            tensors = (q, k, v, out, top, total, dout, delta, dq)
            _launch("_backward_queries", tensors, q, k, v, pattern, causal, scale, part, index == 0, False)
        for index, part in enumerate(reversed(parts)):  # here the first launch must write every row
            tensors = (q, k, v, top, total, dout, delta, dk, dv)
            _launch("_backward_keys", tensors, q, k, v, pattern, causal, scale, part, index == 0, True)
    return dq, dk, dv


attention_triton = sparse_operator("sparse_attention_triton", forward, backward)
