"""Runs the checks of --full: kernels, a few training steps, and what the backends "auto" choose.

Each kernel is compiled, run, and compared with its definition in float64: forward and every gradient, on small shapes
that no tile divides. The error is the largest difference divided by the largest value (at least 1), and its bound is
that of the kernel's own tests. A tiny GPT is trained sparsely through `mst_scale.initialize`, and its masks are
compared between ranks.
"""

from __future__ import annotations

import importlib
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mst_scale import tile_choice
from mst_scale.comm import Ranks
from mst_scale.comm.exchange import Exchange
from mst_scale.compiled import cache_folder
from mst_scale.doctor.findings import Finding, look, ok, run_each, skip, wrong
from mst_scale.doctor.machine import device
from mst_scale.hybrid_sparse_attention import Pattern
from mst_scale.hybrid_sparse_attention import attention as sparse_attention
from mst_scale.hybrid_sparse_attention import dispatch as attention_dispatch
from mst_scale.hybrid_sparse_attention.definition import definition as attention_definition
from mst_scale.sparse_linear import cpu, crossovers, semi_structured
from mst_scale.sparse_linear import dispatch as linear_dispatch
from mst_scale.sparse_linear.definition import Index
from mst_scale.sparse_linear.definition import definition as linear_definition

FLOAT32, HALF, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (FLOAT32, BFLOAT16, HALF)
# (out, gradients): sums of some hundred terms; half types are rounded once forward, and read back rounded backward
ATTENTION_BOUNDS = {FLOAT32: (2e-6, 2e-6), HALF: (2**-10, 2**-8), BFLOAT16: (2**-7, 2**-5)}
LINEAR_BOUNDS = {  # a random walk of 100 roundings in float32, and those of the result
    FLOAT32: 80 * 2**-24, HALF: 80 * 2**-24 + 4 * 2**-11, BFLOAT16: 80 * 2**-24 + 4 * 2**-8
}  # fmt: skip
BLOCK_BOUNDS = {FLOAT32: 1e-5, HALF: 2e-3, BFLOAT16: 1.6e-2}
SIDE = 32
DENSE_PRODUCT = 'mst.compute.backend = "dense"'
STEPS, INTERVAL, BATCH, CONTEXT, VOCABULARY = 4, 2, 2, 32, 64
WIDTHS = {"qkv": (2304, 768), "out": (768, 768), "up": (3072, 768), "down": (768, 3072), "head": (50304, 768)}
SPARSITY = 0.96
HEADS_AND_LENGTHS, STRIDE = ((64, 1024), (64, 4096), (128, 2048), (128, 4096)), 256


# --- kernels ---


class Error(NamedTuple):
    """The largest error of a kernel in one type."""

    dtype: torch.dtype
    what: str
    error: float
    bound: float

    @property
    def fine(self) -> bool:
        """Whether the error is within its bound, which NaN is not."""
        return self.error <= self.bound

    @property
    def severity(self) -> float:
        """The error relative to its bound."""
        return self.error / self.bound if self.bound and not math.isnan(self.error) else math.inf


def check_kernels() -> list[Finding]:
    """Compare every kernel with its definition."""
    where = device()
    with tile_choice.one():  # compiling every tile that a kernel could choose would take minutes
        return run_each(
            {
                "attention, cpp": lambda: check_attention("cpp", "cpu"),
                "attention, triton": lambda: check_attention("triton", where),
                "linear, compiled": check_compiled_linear,
                "linear, blocks": lambda: check_blocks(where),
                "linear, 2:4": lambda: check_two_of_four(where),
            }
        )


def check_attention(backend: str, where: str) -> Finding:
    """Compare attention in both patterns and directions, with heads that share their keys."""
    name, began = f"attention, {backend}", time.monotonic()
    reasons = {t: attention_dispatch.unsupported_reason(backend, where, t, head_dim=32, dense=False) for t in DTYPES}
    able = [dtype for dtype, reason in reasons.items() if reason is None]
    if not able:
        return _unavailable(name, reasons[FLOAT32] or "", where, "attention is slower without it")
    errors = []
    for dtype, kind, causal in itertools.product(able, ("strided", "fixed"), (True, False)):
        generator, pattern = torch.Generator().manual_seed(0), Pattern(kind, 16)
        q, k, v, dout = (
            torch.randn(2, heads, 75, 32, dtype=torch.float64, generator=generator).to(where, dtype)
            for heads in (4, 2, 2, 4)
        )
        ours = partial(attention_dispatch.attention, pattern=pattern, causal=causal, backend=backend)
        exact = partial(attention_definition, pattern=pattern, causal=causal, scale=1 / math.sqrt(32))
        result = both_ways(ours, (q, k, v), dout)
        truth = both_ways(exact, [x.double().cpu() for x in (q, k, v)], dout.double().cpu())
        out, gradient = ATTENTION_BOUNDS[dtype]
        errors.append(compare(dtype, {"out": out, "dq": gradient, "dk": gradient, "dv": gradient}, result, truth))
    return _judge(name, errors, began, 'mst.attention.backend = "blocked"')


def check_compiled_linear() -> Finding:
    """Compare the compiled kernels for single weights, with and without the loss."""
    name, began = "linear, compiled", time.monotonic()
    if (reason := cpu.not_compiled_reason()) is not None:
        return _unavailable(name, reason, "cpu", "sparse layers are computed as dense ones, much slower")
    active = single_weights()
    index = cpu.CompiledIndex(active)
    errors = [check(index, active, t, LINEAR_BOUNDS[t]) for t in DTYPES for check in (linear_error, _head_error)]
    return _judge(name, errors, began, DENSE_PRODUCT)


def check_blocks(where: str) -> Finding:
    """Compare the kernels for blocks of weights."""
    name, began = "linear, blocks", time.monotonic()
    reasons = {dtype: linear_dispatch.unsupported_reason("block", where, dtype, (96, 160), SIDE) for dtype in DTYPES}
    able = [dtype for dtype, reason in reasons.items() if reason is None]
    if not able:
        return _unavailable(name, reasons[FLOAT32] or "", where, "blocks are multiplied by dense products")
    blocks = torch.rand(3, 5, generator=torch.Generator().manual_seed(1)) < 0.4
    active = blocks.repeat_interleave(SIDE, 0).repeat_interleave(SIDE, 1)
    index = linear_dispatch.build_index("block", active.to(where), SIDE)
    errors = [linear_error(index, active, t, BLOCK_BOUNDS[t], where) for t in able]
    return _judge(name, errors, began, DENSE_PRODUCT)


def check_two_of_four(where: str) -> Finding:
    """Compare the 2:4 product."""
    name, began = "linear, 2:4", time.monotonic()
    if (reason := semi_structured.unsupported_reason(where, BFLOAT16, (64, 128))) is not None:
        return skip(name, f"not here: {reason}")
    active = torch.tensor([True, True, False, False]).repeat(64, 32)
    error = linear_error(_TwoOfFour(), active, BFLOAT16, BLOCK_BOUNDS[BFLOAT16], where, masked=True)
    return _judge(name, [error], began, "another method than sr-ste")


class _TwoOfFour:
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, dense_gradient: bool) -> Tensor:
        return semi_structured.linear(x, weight, bias)


def single_weights() -> Tensor:
    """Return the mask of single weights that kernels are checked with."""
    return torch.rand(70, 100, generator=torch.Generator().manual_seed(1)) >= 0.8


def linear_error(
    index: Index, active: Tensor, dtype: torch.dtype, bound: float, where: str = "cpu", *, masked: bool = False
) -> Error:
    """Return the largest error of y, dx, dW and db, with dW masked and dense.

    With `masked`, the kernel needs zeros at inactive weights, and computes only the dense dW.
    """
    generator = torch.Generator().manual_seed(2)
    outputs, inputs = active.shape
    x, weight, bias, dy = (
        torch.randn(size, generator=generator).to(dtype)
        for size in ((69, inputs), active.shape, outputs, (69, outputs))
    )
    given = (x, weight.masked_fill(~active, 0) if masked else weight, bias)
    errors = []
    for dense in (True,) if masked else (False, True):

        def exact(x: Tensor, weight: Tensor, bias: Tensor, dense: bool = dense) -> Tensor:
            return linear_definition(x, weight, active, bias, dense_gradient=dense)

        result = both_ways(partial(index.linear, dense_gradient=dense), [t.to(where) for t in given], dy.to(where))
        truth = both_ways(exact, [t.double() for t in given], dy.double())
        errors.append(compare(dtype, dict.fromkeys(("y", "dx", "dW", "db"), bound), result, truth))
        if not dense and result[2].cpu()[~active].any():
            errors.append(Error(dtype, "dW where masked", float(result[2].cpu()[~active].abs().max()), 0.0))
    return max(errors, key=lambda error: error.severity)


def _head_error(index: cpu.CompiledIndex, active: Tensor, dtype: torch.dtype, bound: float) -> Error:
    """Return the largest error of the head fused with its cross-entropy."""
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(size, generator=generator).to(dtype) for size in ((69, active.shape[1]), active.shape))
    targets, one = torch.randint(active.shape[0], (69,), generator=generator), torch.tensor(1.0)

    def exact(x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(linear_definition(x, w, active), targets)

    result = both_ways(lambda x, w: index.cross_entropy(x, w, targets), (x, weight), one)
    truth = both_ways(exact, (x.double(), weight.double()), one.double())
    return compare(dtype, dict.fromkeys(("loss", "dx of the loss", "dW of the loss"), bound), result, truth)


def both_ways(compute: Callable[..., Tensor], given: Sequence[Tensor], back: Tensor) -> list[Tensor]:
    """Return the result and the gradient of each given tensor."""
    leaves = [x.detach().clone().requires_grad_() for x in given]
    out = compute(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, back.to(out.dtype))]


def compare(dtype: torch.dtype, bounds: Mapping[str, float], ours: list[Tensor], truth: list[Tensor]) -> Error:
    """Return the most severe error of these tensors, by the bound of each."""
    errors = [
        Error(dtype, what, float((a.cpu().double() - b).abs().max()) / max(1.0, float(b.abs().max())), bound)
        for (what, bound), a, b in zip(bounds.items(), ours, truth, strict=True)
    ]
    return max(errors, key=lambda error: error.severity)


def _judge(name: str, errors: Sequence[Error], began: float, instead: str) -> Finding:
    ordered = sorted(errors, key=lambda error: error.severity)
    worst = ordered[-1]
    if not worst.fine:
        dtype = type_name(worst.dtype)
        message = f"wrong results: {worst.what} in {dtype} is off by {worst.error:.1e}, {worst.bound:.1e} is allowed"
        fix = f"empty the kernel cache ({cache_folder()}) and check again; until this is fixed, use {instead}"
        return wrong(name, message, fix)
    worst_of = {one.dtype: one for one in ordered}
    by_type = {type_name(dtype): worst_of[dtype] for dtype in DTYPES if dtype in worst_of}
    largest = ", ".join(f"{dtype} {one.error:.0e} ≤ {one.bound:.0e}" for dtype, one in by_type.items())
    numbers = {dtype: one.error for dtype, one in by_type.items()}
    return ok(name, f"largest errors {largest}; {time.monotonic() - began:.1f} s", **numbers)


def _unavailable(name: str, reason: str, where: str, loss: str) -> Finding:
    """Return the finding of a kernel that cannot run; on a machine without a GPU, GPU kernels are skipped."""
    if where == "cpu" and "CUDA" in reason:
        return skip(name, f"not here: {reason}")
    return look(name, f"not here: {reason}; {loss}", f"install {'a C++ compiler' if where == 'cpu' else 'triton'}")


def type_name(dtype: torch.dtype) -> str:
    """Return the name of a type without "torch."."""
    return str(dtype).removeprefix("torch.")


# --- training ---


def check_training(ranks: Ranks, stage: int) -> list[Finding]:
    """Train a tiny GPT for a few sparse steps at a ZeRO stage; called on every rank."""
    name, began = f"training, ZeRO {stage}", time.monotonic()
    engine = _engine(stage, ranks)
    with tile_choice.one():
        losses = [train_step(engine, number, ranks) for number in range(STEPS)]
    engine.mst.check_drift()
    everyone = Exchange(ranks.control)
    digests: list[Any] = everyone.all(list(engine.mst.state.digests))
    finite = all(everyone.all(all(map(math.isfinite, losses))))
    changed, sparsity = bool(engine.mst.changed_at), float(engine.mst.sparsity)
    engine.destroy()
    fix = "MST_TRACEBACK=1 mst doctor shows where; the findings above may say why"
    if not finite:
        return [wrong(name, f"the loss is not finite: {losses}", fix)]
    if not changed or not 0 < sparsity < 1:
        return [wrong(name, f"no topology step in {STEPS} steps, sparsity {sparsity:.0%}", fix)]
    if differing := [rank for rank, one in enumerate(digests) if one != digests[0]]:
        return [wrong(name, f"masks of ranks {differing} differ from those of rank 0", fix)]
    same = f", the same masks on {ranks.world_size} ranks" if ranks.world_size > 1 else ""
    message = f"{STEPS} steps, {STEPS // INTERVAL} of them prune and grow, {sparsity:.0%} sparse{same}"
    return [ok(name, f"{message}; {time.monotonic() - began:.1f} s")]


def _engine(stage: int, ranks: Ranks) -> Any:
    from mst_scale.config import ModelConfig
    from mst_scale.engine.api import initialize
    from mst_scale.models import build

    torch.manual_seed(1)
    model = build(ModelConfig(n_layer=1, n_head=2, n_embd=32, seq_length=CONTEXT, vocab_size=VOCABULARY))
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "train_batch_size": BATCH * ranks.world_size,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": device() == "cpu"}},
        "bf16": {"enabled": device() == "cuda"},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 2**31,
        "training": {"steps": 100, "seed": 1},
        "mst": {
            "method": "rigl",
            "sparsity": {"max": 0.8},
            "topology": {"interval": INTERVAL},
            "attention": {"pattern": "strided", "stride": 8},
        },
    }
    return initialize(model=model, config=config)[0]


def train_step(engine: Any, number: int, ranks: Ranks) -> float:
    """Train one step on random tokens; return the loss."""
    generator = torch.Generator().manual_seed(number * ranks.world_size + ranks.rank)
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=generator).to(engine.device)
    loss = engine(tokens[:, :-1], tokens[:, 1:])
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


# --- what "auto" chooses ---


def check_choices() -> list[Finding]:
    """Report what "auto" chooses for GPT-2 small, in bfloat16 on a GPU and float32 on the CPU, and why."""
    where = device()
    dtype = BFLOAT16 if where == "cuda" else FLOAT32
    chosen, why = attention_dispatch.choose(where, dtype, 64, dense=False, small=False)
    findings = [ok("auto, attention", f"{chosen} in {type_name(dtype)}: {why}", chosen=chosen)]
    for side in (1, SIDE) if where == "cuda" else (1,):
        layers: dict[tuple[str, str], list[str]] = {}  # with the same choice
        for name, shape in WIDTHS.items():
            layers.setdefault(linear_dispatch.choose(where, dtype, shape, SPARSITY, side), []).append(name)
        choices = "; ".join(f"{', '.join(names)}: {backend}, {why}" for (backend, why), names in layers.items())
        in_blocks = f" in blocks of {side}" if side > 1 else ""
        findings.append(ok(f"auto, linear{in_blocks}", f"{SPARSITY:.0%} sparse, {type_name(dtype)}: {choices}"))
    return findings


def tune(ranks: Ranks | None) -> list[Finding]:
    """Measure the crossovers that "auto" reads, on the first rank of each machine, because machines may differ."""
    if ranks is not None and ranks.local_rank != 0:
        return []
    where = device()
    options = ["--device", "cuda", "--tune"] if where == "cuda" else ["--tune"]
    importlib.import_module("mst_scale.benchmarks.linear").main(options)
    written = ok("tune", f"{len(crossovers.measured_here())} crossovers written to {crossovers.own()}")
    return [written, tune_attention(where)] if where == "cuda" else [written]


def tune_attention(where: str) -> Finding:
    """Launch attention's kernels once, which makes them choose their tiles; Triton's cache keeps the choice.

    Those of linear layers were chosen while measuring the crossovers.
    """
    for head_dim, length in HEADS_AND_LENGTHS:
        shape = (2, 4, length, head_dim)
        q, k, v = (torch.randn(shape, device=where, dtype=BFLOAT16, requires_grad=True) for _ in range(3))
        sparse_attention(q, k, v, Pattern("strided", STRIDE)).sum().backward()
    return ok("tune, attention", "tiles for heads of 64 and 128 chosen; Triton's cache keeps them")
