"""Measures on a GPU what is meant to be fast: attention, block linear layers, a step, a run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from mst_scale.hybrid_sparse_attention import Pattern

from .. import attention as attention_bench
from .. import linear_cuda, step_cuda
from ..page import aside
from ..timing import seconds_of
from .part import Case, Row, Where, optimizer_here

# --- attention ---

ROUND_SECONDS = 2.0  # for a comparison
BYTES = 2  # a number in bfloat16
BACKWARD = 3.5  # forward and backward, in forwards: the scores are computed again


def attention(where: Where) -> Iterator[Case]:
    """Every length against flash attention, the best rival first; then memory."""
    lengths = (64,) if where.tiny else (4096, 16384, 1024, 8192, 2048, 32768)
    dtype = "float16" if where.tiny else "bfloat16"
    rates = functools.cache(lambda: _rates(where))
    for length in lengths:
        yield Case(f"{length} tokens", functools.partial(_attention, where, dtype, length, rates))
    for length in lengths[:2]:
        yield Case(f"{length} tokens, memory", functools.partial(_attention_memory, where, dtype, length))


def _attention(where: Where, dtype: str, length: int, rates: Callable[[], dict[str, float]]) -> Row:
    if where.tiny:  # the kernels of the GPU, in the interpreter, against the CPU's flash attention
        return _tiny_attention(length)
    found = attention_bench.compare(dtype, length, where.device, ROUND_SECONDS)
    first = found[0]
    first["share_of_ceiling"] = round(first["speedup"] / first["ceiling"], 3)
    first["roofline"] = round(least_ms(length, rates()) / first["ours_ms"], 3)
    others = [f"{row['speedup']}× {row['rival']}" if row["speedup"] else row["rival"] + ": none" for row in found[1:]]
    said = (
        f"{first['ours_ms']} ms, {first['speedup']}× flash attention, {first['share_of_ceiling']:.0%} of the pair "
        f"ceiling, {first['roofline']:.0%} of the roofline; {', '.join(others)}"
    )
    return {"said": said, "rows": found}


def least_ms(length: int, rates: dict[str, float]) -> float:
    """The least time for forward and backward: pairs at the rate of the largest product, tensors once at a copy's."""
    batch, heads, _, head_dim = attention_bench.shape(length, "cuda")
    pairs = Pattern("strided", attention_bench.STRIDE).pairs(length) * batch * heads
    multiply_adds = BACKWARD * 2 * pairs * head_dim
    moved = (
        12 * batch * heads * length * head_dim * BYTES
    )  # q k v out; q k v out dout dq dk dv, and the rest of softmax
    return max(multiply_adds / rates["multiply_adds"], moved / rates["bytes"])


def _tiny_attention(length: int) -> Row:
    from mst_scale.hybrid_sparse_attention import attention as sparse

    q, k, v, dout = attention_bench.tensors("float16", length, "cpu")

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sparse(q, k, v, Pattern("strided", 16), backend="triton")

    ms = 1e3 * seconds_of(attention_bench.both_ways(ours, q, k, v, dout))
    return {"said": f"{ms:.0f} ms in the interpreter", "rows": []}


def _attention_memory(where: Where, dtype: str, length: int) -> Row:
    if where.tiny:
        return {"said": "nothing to see on a CPU"}
    row = attention_bench.peak_memory(dtype, length, where.device)
    said = f"{row['ours_mib']} MiB, {row['memory_ratio']} of flash attention's ({row['memory_asked']} is allowed)"
    return {"said": said, "rows": [row]}


# --- linear layers ---


def linear(where: Where) -> Iterator[Case]:
    widths = (32,) if where.tiny else (4096, 1600, 768, 5120)
    tokens = 40 if where.tiny else linear_cuda.TOKENS
    rates = functools.cache(lambda: _rates(where))
    for sparsity in (0.9,) if where.tiny else (0.96, 0.9, 0.8):
        for width in widths:
            layer = functools.cache(lambda width=width: linear_cuda.Layer(width, tokens, where.device))
            for side in (16,) if where.tiny else linear_cuda.SIDES:
                name = f"{width}→{4 * width}, blocks of {side}, {sparsity:.0%}"
                yield Case(name, functools.partial(_linear, where, layer, (side, sparsity), rates))


def _linear(
    where: Where, layer: Callable[[], linear_cuda.Layer], blocks: tuple[int, float], rates: Callable[[], Any]
) -> Row:
    clock = _wall_ms if where.tiny else linear_cuda.device_ms
    rows = linear_cuda.measure(layer(), blocks, rates(), 2 if where.tiny else 20, clock)
    together = sum(row["rival_ms"] for row in rows) / sum(row["ours_ms"] for row in rows)
    parts = ", ".join(f"{row['product']} {row['speedup']}× ({row['roofline']:.0%} of the roofline)" for row in rows)
    return {"said": f"{together:.2f}× dense; {parts}", "together": round(together, 3), "rows": rows}


def _rates(where: Where) -> dict[str, float]:
    return linear_cuda.rates(
        where.device, _wall_ms if where.tiny else linear_cuda.device_ms, 64 if where.tiny else 8192
    )


def _wall_ms(run: Callable[[], object]) -> float:
    return 1e3 * seconds_of(run)


# --- a step and a run ---

TINY_STEP = [
    *("--config", "gpt2_small", "--micro", "1", "--rounds", "2", "--phases", "ultra"),
    *("--set", "bf16.enabled=false"),
    *(
        w
        for key in ("n_layer=1", "n_embd=32", "n_head=2", "context=32", "vocab_size=64")
        for w in ("--set", f"model.{key}")
    ),
]


def step(where: Where) -> Iterator[Case]:
    """The ultra-sparse phase of every width first, then in wider blocks, then all phases and the run they come to."""
    if where.tiny:
        yield Case("tiny", lambda: _step(TINY_STEP, None))
        return
    for phases, sides in ((True, None), (True, (64, 32)), (False, None)):
        for shape in reversed(step_cuda.SHAPES.values()):
            for side in (shape.block,) if sides is None else [side for side in sides if side > shape.block]:
                yield _step_case(replace(shape, block=side), phases)


def _step_case(shape: step_cuda.Shape, ultra: bool) -> Case:
    """The ultra-sparse phase alone, or all of the schedule."""
    words = [*step_cuda.words(shape, 7), *(w for key in optimizer_here() for w in ("--set", key))]
    if not ultra:
        at = words.index("--phases")
        del words[at : at + 2]
    name = f"{shape.parameters} in blocks of {shape.block}, {'ultra-sparse phase' if ultra else 'whole run'}"
    return Case(name, functools.partial(_step, words, shape.goal if ultra else None))


def _step(words: list[str], goal: float | None) -> Row:
    from ..step import measured

    with aside():
        found = measured(words)
    row = found["rows"][-1]
    asked = "" if goal is None else f" ({goal}× is the goal)"
    said = f"{row['speedup']}× dense{asked}, {row['ours_ms']} ms, {found['setting']['model']}"
    return {"said": said, "rows": found["rows"], "setting": found["setting"]}
