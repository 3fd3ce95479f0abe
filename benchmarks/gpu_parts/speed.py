"""Measures speed on a GPU (a whole step, block linear layers, attention, the optimizer), and the memory of runs."""

from __future__ import annotations

import functools
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mst_scale import tile_choice
from mst_scale.hybrid_sparse_attention import Pattern

from .. import attention as attention_bench
from .. import linear_cuda, step_cuda
from .. import memory as measured
from ..page import aside
from ..step_sides import engine_of
from ..timing import in_rounds, seconds_of
from .part import Case, Row, Where

# --- a whole step ---

# width, variant, compiled, micro-batches per step
STEP_CASES = (
    ("6.7B", "channels-80", False, 8),
    ("6.7B", "blocks64-96", False, 8),
    ("1.5B", "channels-80", True, 8),
    ("1.5B", "blocks64-96", True, 8),
    ("1.5B", "blocks32-96", False, 8),
    ("6.7B", "blocks64-80", False, 8),
    ("6.7B", "channels-80", False, 1),
    ("6.7B", "blocks64-96", False, 1),
    ("6.7B", "blocks128-96", False, 1),
    ("6.7B", "channels-80", True, 1),
    ("6.7B", "blocks64-96", True, 1),
    ("6.7B", "blocks64-80", False, 1),
)


def step(where: Where) -> Iterator[Case]:
    """Channels and blocks at the widths of 6.7B and of GPT-2 XL; the dense engine of a width is built once."""
    dense = _Dense(where.tiny)
    for case in STEP_CASES[:1] if where.tiny else STEP_CASES:
        parameters, variant, compiled, micro_batches = case
        of = f"{micro_batches} micro-batch{'es' * (micro_batches > 1)} per step"
        name = f"{parameters}, {variant}, {'compiled' if compiled else 'eager'}, {of}"
        yield Case(name, functools.partial(_step, where, dense, case))


class _Dense:
    """The baseline's engine of one width and number of micro-batches at a time."""

    def __init__(self, tiny: bool):
        self.tiny = tiny
        self.key: tuple[str, int] | None = None
        self.stepper: step_cuda.Stepper | None = None

    def of(self, parameters: str, micro_batches: int) -> step_cuda.Stepper:
        key = (parameters, micro_batches)
        if self.stepper is None or key != self.key:
            if self.stepper is not None:
                self.stepper.close()
            self.stepper = None
            self.stepper = step_cuda.ready_stepper(step_cuda.SHAPES[parameters], {}, micro_batches, self.tiny)
            self.key = key
            self.kernels = step_cuda.profile(self.stepper)
        return self.stepper


def _step(where: Where, dense: _Dense, case: tuple[str, str, bool, int]) -> Row:
    parameters, variant, compiled, micro_batches = case
    with aside():
        baseline, shape = dense.of(parameters, micro_batches), step_cuda.SHAPES[parameters]
        rounds = 2 if where.tiny else 5
        row = step_cuda.measure(shape, variant, baseline, compiled=compiled, rounds=rounds, tiny=where.tiny)
    said = f"{row['speedup']}× dense ({row['baseline_ms']} ms), {row['ours_ms']} ms; {row['model']}"
    return {"said": said, "rows": [row], "dense_kernels": dense.kernels}


# --- linear layers ---

# (inputs, outputs, tokens): the MLP of 2048 that published sparse kernels report, and that of 6.7B
SHAPES = ((4096, 16384, 8192), (2048, 5632, 16384))


def linear(where: Where) -> Iterator[Case]:
    """Yield block linear layers and 2:4 layers, product by product."""
    shapes = ((32, 128, 40),) if where.tiny else SHAPES
    rates = functools.cache(lambda: _rates(where))
    layers = {
        shape: functools.cache(lambda shape=shape: linear_cuda.Layer(shape[0], shape[2], where.device, shape[1]))
        for shape in shapes
    }
    for sparsity in (0.9,) if where.tiny else (0.96, 0.9, 0.8):
        for side in (16,) if where.tiny else (64, 128, 32):
            for shape, layer in layers.items():
                name = f"{shape[2]:,} tokens, {shape[0]}→{shape[1]}, blocks of {side}, {sparsity:.0%}"
                yield Case(name, functools.partial(_linear, where, layer, (side, sparsity), rates))
    if not where.tiny:
        for shape, layer in layers.items():
            yield Case(f"{shape[2]:,} tokens, {shape[0]}→{shape[1]}, 2:4", functools.partial(_two_of_four, layer))


def _linear(
    where: Where, layer: Callable[[], linear_cuda.Layer], blocks: tuple[int, float], rates: Callable[[], Any]
) -> Row:
    clock = _wall_ms if where.tiny else linear_cuda.device_ms
    rows = linear_cuda.measure(layer(), blocks, rates(), 2 if where.tiny else 20, clock)
    together = sum(row["baseline_ms"] for row in rows) / sum(row["ours_ms"] for row in rows)
    parts = ", ".join(f"{row['product']} {row['speedup']}× ({row['roofline']:.0%} of the roofline)" for row in rows)
    return {"said": f"{together:.2f}× dense; {parts}", "together": round(together, 3), "rows": rows}


def _two_of_four(layer: Callable[[], linear_cuda.Layer]) -> Row:
    row = linear_cuda.two_of_four(layer(), 20)
    return {"said": f"forward product {row['speedup']}× dense", "rows": [row]}


def _rates(where: Where) -> dict[str, float]:
    return linear_cuda.rates(
        where.device, _wall_ms if where.tiny else linear_cuda.device_ms, 64 if where.tiny else 8192
    )


def _wall_ms(run: Callable[[], object]) -> float:
    return 1e3 * seconds_of(run)


# --- attention ---

ROUND_SECONDS = 1.0  # for a comparison
BYTES = 2  # a number in bfloat16
BACKWARD = 3.5  # forward and backward, in forwards: the scores are computed again


def attention(where: Where) -> Iterator[Case]:
    """Every length against cuDNN's and flash attention; then memory."""
    lengths = (64,) if where.tiny else (16384, 8192, 2048)
    dtype = "float16" if where.tiny else "bfloat16"
    rates = functools.cache(lambda: _rates(where))
    for length in lengths:
        yield Case(f"{length} tokens", functools.partial(_attention, where, dtype, length, rates))
    for length in lengths[1:2] or lengths:
        yield Case(f"{length} tokens, memory", functools.partial(_attention_memory, where, dtype, length))


def _attention(where: Where, dtype: str, length: int, rates: Callable[[], dict[str, float]]) -> Row:
    if where.tiny:  # the kernels of the GPU, in the interpreter, against the CPU's flash attention
        return _tiny_attention(length)
    others = (attention_bench.CUDNN, attention_bench.FLASH3)
    found = attention_bench.compare(dtype, length, where.device, ROUND_SECONDS, others)
    first = found[0]
    first["share_of_ceiling"] = round(first["speedup"] / first["ceiling"], 3)
    first["roofline"] = round(least_ms(length, rates()) / first["ours_ms"], 3)
    versus = ", ".join(
        f"{row['speedup']}× {row['baseline']}" if row["speedup"] else f"{row['baseline']}: none" for row in found
    )
    said = f"{first['ours_ms']} ms: {versus}; {first['ceiling']}× fewer pairs; {first['roofline']:.0%} of the roofline"
    return {"said": said, "rows": found}


def least_ms(length: int, rates: dict[str, float]) -> float:
    """The least time for forward and backward: pairs at the rate of the largest product, tensors once at a copy's."""
    batch, heads, _, head_dim = attention_bench.shape(length, "cuda")
    pairs = Pattern("strided", attention_bench.STRIDE).pairs(length) * batch * heads
    multiply_adds = BACKWARD * 2 * pairs * head_dim
    # q k v out; q k v out dout dq dk dv, and the rest of softmax
    moved = 12 * batch * heads * length * head_dim * BYTES
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


# --- the optimizer ---

SPARSITY = 0.96
WEIGHTS = 85_000_000  # the sparse weights of GPT-2 small


def optimizer(where: Where) -> Iterator[Case]:
    """torch's fused AdamW on all weights, masked or not, and on the active ones alone."""
    weights = 10_000 if where.tiny else WEIGHTS
    yield Case(f"{weights:,} weights at {SPARSITY:.0%}", functools.partial(_optimizer, where, weights))


def _optimizer(where: Where, weights: int) -> Row:
    clock = _wall_ms if where.tiny else linear_cuda.device_ms

    def adam(count: int) -> tuple[torch.nn.Parameter, Callable[[], object]]:
        parameter = torch.nn.Parameter(torch.randn(count, device=where.device))
        parameter.grad = torch.randn_like(parameter)
        return parameter, torch.optim.AdamW([parameter], lr=1e-4, fused=True).step

    _, dense = adam(weights)
    active = torch.rand(weights, device=where.device) > SPARSITY
    masked_parameter, masked_step = adam(weights)

    def masked() -> None:
        assert masked_parameter.grad is not None
        masked_parameter.grad.mul_(active)
        masked_step()
        masked_parameter.data.mul_(active)

    compact = adam(round((1 - SPARSITY) * weights))[1]
    rounds = 2 if where.tiny else 20
    times = [statistics.median(taken) for taken in in_rounds([dense, masked, compact], rounds, clock)]
    names = ("dense_ms", "masked_ms", "compact_ms")
    row = {name: round(ms, 4) for name, ms in zip(names, times, strict=True)}
    said = f"dense {times[0]:.3f} ms, masked {times[1]:.3f} ms, active weights alone {times[2]:.3f} ms"
    return {"said": said, "rows": [row]}


# --- the memory of real runs, against the prediction of `mst plan` ---

TORCH_ADAM = "optimizer.params.torch_adam=true"  # DeepSpeed's fused kernel would be compiled first
PLAIN = ["data_types={}"]  # accumulation in fp32 does not go with bf16 at stage 1
TINY = ["model.n_layer=1", "model.n_embd=32", "model.n_head=2", "model.seq_length=32", "model.vocab_size=64"]


def memory(where: Where) -> Iterator[Case]:
    """Every ZeRO stage with its masks, on one rank; then recomputation, which changes what is fullest."""
    config = "gpt2_small"
    for stage in (1,) if where.tiny else (2, 1, 3):
        settings = [f"zero_optimization.stage={stage}", *(PLAIN if stage == 1 else ())]
        yield Case(f"{config}, ZeRO {stage}", functools.partial(peak, where, config, settings))
    if where.tiny:
        return
    again = ["zero_optimization.stage=1", *PLAIN, "model.activation_checkpointing=true"]
    yield Case(f"{config}, ZeRO 1, recomputed", functools.partial(peak, where, config, again))


def peak(where: Where, config: str, settings: list[str]) -> Row:
    """The most that two steps hold, one of them a topology step, beyond what the process held before."""
    from mst_scale.config import load
    from mst_scale.plan.memory import memory as modelled
    from mst_scale.plan.setting import setting_of

    os.environ.setdefault(tile_choice.VARIABLE, "0")  # nothing is timed
    micro = 1 if where.tiny else 8
    tiny = ["bf16.enabled=false", *TINY] if where.tiny else []
    batch = [f"train_micro_batch_size_per_gpu={micro}", f"train_batch_size={micro}", "gradient_accumulation_steps=1"]
    experiment = load(
        config, [*batch, *settings, *tiny, TORCH_ADAM, "mst.topology.interval=2", "tensorboard.enabled=false"]
    )
    expected = modelled(experiment, setting_of(experiment, 1)).peak
    with aside():
        found = measured.peak_of(lambda: _two_steps(experiment, micro), where.device)
    if found is None:
        return {"said": "this process's memory cannot be read here"}
    apart = found / expected - 1
    said = f"{found / 1e9:.2f} GB, the plan says {expected / 1e9:.2f} ({apart:+.0%})"
    return {"said": said, "bytes": found, "planned": expected}


def _two_steps(experiment: Any, micro: int) -> None:
    from mst_scale import comm

    comm.init()
    engine = engine_of(experiment)
    for _ in range(2):
        shape = (micro, experiment.model.seq_length + 1)
        tokens = torch.randint(experiment.model.vocab_size, shape, device=engine.device)
        engine.backward(engine(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        engine.step()
    engine.destroy()
