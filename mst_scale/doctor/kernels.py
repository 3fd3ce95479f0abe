"""Compiles and runs each of our kernels, and compares it with its definition in float64.

Forward and every gradient, on small shapes that no tile divides. The error is the largest difference over the largest
value (at least 1), and its bound that of the kernel's own tests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mst_scale import tile_choice
from mst_scale.doctor.finding import Finding, each, look, ok, skip, wrong
from mst_scale.doctor.versions import device
from mst_scale.hybrid_sparse_attention import Pattern
from mst_scale.hybrid_sparse_attention import dispatch as attention_dispatch
from mst_scale.hybrid_sparse_attention.definition import definition as attention_definition
from mst_scale.sparse_linear import cpu, semi_structured
from mst_scale.sparse_linear import dispatch as linear_dispatch
from mst_scale.sparse_linear.definition import Index
from mst_scale.sparse_linear.definition import definition as linear_definition

FLOAT32, HALF, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (FLOAT32, BFLOAT16, HALF)
# (out, gradients): sums of some hundred terms; half types are rounded once forward, and read back rounded backward
ATTENTION_BOUNDS = {FLOAT32: (2e-6, 2e-6), HALF: (2**-10, 2**-8), BFLOAT16: (2**-7, 2**-5)}
EPS = {FLOAT32: 2**-24, HALF: 2**-11, BFLOAT16: 2**-8}
BLOCK_BOUNDS = {FLOAT32: 1e-5, HALF: 2e-3, BFLOAT16: 1.6e-2}
SIDE = 32
DENSE_PRODUCT = 'mst.compute.backend = "dense"'


@dataclass(frozen=True)
class Error:
    """The worst of one kernel in one type."""

    dtype: torch.dtype
    what: str
    error: float
    bound: float

    @property
    def fine(self) -> bool:
        return self.error <= self.bound  # what is not a number is not


def found() -> list[Finding]:
    where = device()
    checks: dict[str, Callable[[], Finding]] = {
        "attention, cpp": lambda: attention("cpp", "cpu"),
        "attention, triton": lambda: attention("triton", where),
        "linear, compiled": compiled_linear,
        "linear, MKL": mkl_linear,
        "linear, blocks": lambda: block_linear(where),
        "linear, 2:4": lambda: two_of_four(where),
    }
    with tile_choice.one():  # to compile all that a kernel could choose would take minutes
        return each(checks)


# --- attention ---


def attention(backend: str, where: str) -> Finding:
    name, began = f"attention, {backend}", time.monotonic()
    able = [t for t in DTYPES if attention_dispatch.why_not(backend, where, t, 32, dense=False) is None]
    if not able:
        reason = attention_dispatch.why_not(backend, where, FLOAT32, 32, dense=False) or ""
        return cannot(name, reason, where if backend == "triton" else "cpu", "attention is slower without it")
    errors = [attention_error(backend, where, dtype) for dtype in able]
    return judged(name, errors, began, 'mst.attention.backend = "blocked"')


def attention_error(backend: str, where: str, dtype: torch.dtype) -> Error:
    """Over both patterns, both directions, with heads that share their keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(2, heads, 75, 32, dtype=torch.float64, generator=generator).to(where, dtype)
        for heads in (4, 2, 2, 4)
    )
    worst: list[Error] = []
    for pattern in (Pattern("strided", 16), Pattern("fixed", 16)):
        for causal in (True, False):

            def ours(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern = pattern, causal: bool = causal) -> Tensor:
                return attention_dispatch.attention(q, k, v, pattern, causal, backend)

            def exact(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern = pattern, causal: bool = causal) -> Tensor:
                return attention_definition(q, k, v, pattern=pattern, causal=causal, scale=1 / math.sqrt(32))

            result = both_ways(ours, (q, k, v), dout)
            truth = both_ways(exact, [x.double().cpu() for x in (q, k, v)], dout.double().cpu())
            bounds = ATTENTION_BOUNDS[dtype]
            names = dict(zip(("out", "dq", "dk", "dv"), (bounds[0], *[bounds[1]] * 3), strict=True))
            worst.append(compared(dtype, names, result, truth))
    return max(worst, key=_weight)


# --- linear layers ---


def compiled_linear() -> Finding:
    name, began = "linear, compiled", time.monotonic()
    if (reason := cpu.why_not_compiled()) is not None:
        return cannot(name, reason, "cpu", "sparse layers are computed by MKL, half as fast")
    errors = []
    for dtype in DTYPES:
        active = single_weights()
        index = cpu.CompiledIndex(active)
        bounds = linear_bounds(dtype)
        errors += [linear_error(index, active, dtype, bounds), head_error(index, active, dtype, bounds)]
    return judged(name, errors, began, DENSE_PRODUCT)


def mkl_linear() -> Finding:
    name, began = "linear, MKL", time.monotonic()
    if not torch.backends.mkl.is_available():
        return skip(name, "this torch has no MKL: only machines without a compiler would use it")
    active = single_weights()
    dtypes = (FLOAT32, BFLOAT16)
    errors = [linear_error(cpu.MKLIndex(active), active, t, linear_bounds(t)) for t in dtypes]
    return judged(name, errors, began, DENSE_PRODUCT)


def block_linear(where: str) -> Finding:
    name, began, shape = "linear, blocks", time.monotonic(), (96, 160)
    able = [t for t in DTYPES if linear_dispatch.why_not("block", where, t, shape, SIDE) is None]
    if not able:
        reason = linear_dispatch.why_not("block", where, FLOAT32, shape, SIDE) or ""
        return cannot(name, reason, where, "blocks are multiplied by dense products")
    generator = torch.Generator().manual_seed(1)
    blocks = torch.rand(3, 5, generator=generator) < 0.4
    active = blocks.repeat_interleave(SIDE, 0).repeat_interleave(SIDE, 1)
    index = linear_dispatch.build_index("block", active.to(where), SIDE)
    errors = [linear_error(index, active, t, BLOCK_BOUNDS[t], where) for t in able]
    return judged(name, errors, began, DENSE_PRODUCT)


def two_of_four(where: str) -> Finding:
    name, began, shape = "linear, 2:4", time.monotonic(), (64, 128)
    if (reason := semi_structured.why_not(where, BFLOAT16, shape)) is not None:
        return skip(name, f"not here: {reason}")
    active = torch.tensor([True, True, False, False]).repeat(64, 32)
    index = _TwoOfFour()
    error = linear_error(index, active, BFLOAT16, BLOCK_BOUNDS[BFLOAT16], where, masked=True)
    return judged(name, [error], began, "another method than sr-ste")


class _TwoOfFour:
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, dense_gradient: bool) -> Tensor:
        return semi_structured.linear(x, weight, bias)


def single_weights() -> Tensor:
    return torch.rand(70, 100, generator=torch.Generator().manual_seed(1)) >= 0.8


def linear_bounds(dtype: torch.dtype) -> float:
    """A random walk of 100 roundings in float32, and those of the result."""
    return 8 * EPS[FLOAT32] * 100**0.5 + 4 * EPS[dtype] * (dtype != FLOAT32)


def linear_error(
    index: Index, active: Tensor, dtype: torch.dtype, bound: float, where: str = "cpu", *, masked: bool = False
) -> Error:
    """y, dx, dW and db; dW masked and dense. `masked`: it wants zeros in the weight, and gives the dense dW only."""
    generator = torch.Generator().manual_seed(2)
    outputs, inputs = active.shape
    x, weight, bias, dy = (
        torch.randn(size, generator=generator).to(dtype)
        for size in ((69, inputs), active.shape, outputs, (69, outputs))
    )
    weight = weight.masked_fill(~active, 0) if masked else weight
    worst = []
    for dense in (True,) if masked else (False, True):

        def ours(x: Tensor, w: Tensor, b: Tensor, dense: bool = dense) -> Tensor:
            return index.linear(x, w, b, dense)

        def exact(x: Tensor, w: Tensor, b: Tensor, dense: bool = dense) -> Tensor:
            return linear_definition(x, w, active, b, dense_gradient=dense)

        given = (x, weight, bias)
        result = both_ways(ours, [t.to(where) for t in given], dy.to(where))
        truth = both_ways(exact, [t.double() for t in given], dy.double())
        worst.append(compared(dtype, dict.fromkeys(("y", "dx", "dW", "db"), bound), result, truth))
        if not dense and result[2].cpu()[~active].any():
            worst.append(Error(dtype, "dW where masked", float(result[2].cpu()[~active].abs().max()), 0.0))
    return max(worst, key=_weight)


def head_error(index: cpu.CompiledIndex, active: Tensor, dtype: torch.dtype, bound: float) -> Error:
    """The head and its cross-entropy at once."""
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(size, generator=generator).to(dtype) for size in ((69, active.shape[1]), active.shape))
    targets = torch.randint(active.shape[0], (69,), generator=generator)

    def exact(x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(linear_definition(x, w, active), targets)

    result = both_ways(lambda x, w: index.cross_entropy(x, w, targets), (x, weight), torch.tensor(1.0))
    truth = both_ways(exact, (x.double(), weight.double()), torch.tensor(1.0, dtype=torch.float64))
    return compared(dtype, dict.fromkeys(("loss", "dx of the loss", "dW of the loss"), bound), result, truth)


# --- comparing ---


def both_ways(compute: Callable[..., Tensor], given: Sequence[Tensor], back: Tensor) -> list[Tensor]:
    """The result and the gradient of each tensor given."""
    leaves = [x.detach().clone().requires_grad_() for x in given]
    out = compute(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, back.to(out.dtype))]


def compared(dtype: torch.dtype, bounds: Mapping[str, float], ours: list[Tensor], truth: list[Tensor]) -> Error:
    errors = [
        Error(dtype, what, float((a.cpu().double() - b).abs().max()) / max(1.0, float(b.abs().max())), bound)
        for (what, bound), a, b in zip(bounds.items(), ours, truth, strict=True)
    ]
    return max(errors, key=_weight)


def _weight(error: Error) -> float:
    if math.isnan(error.error):
        return math.inf
    return error.error / error.bound if error.bound else math.inf


def judged(name: str, errors: Sequence[Error], began: float, instead: str) -> Finding:
    seconds = round(time.monotonic() - began, 2)
    by_type: dict[torch.dtype, Error] = {}
    for error in sorted(errors, key=_weight):
        by_type[error.dtype] = error  # the worst comes last
    numbers = {_type(one.dtype): {"what": one.what, "error": one.error, "bound": one.bound} for one in by_type.values()}
    bad = [one for one in by_type.values() if not one.fine]
    if bad:
        one = bad[-1]
        said = (
            f"computes wrongly: {one.what} in {_type(one.dtype)} is off by {one.error:.1e}, {one.bound:.1e} is allowed"
        )
        cure = f"empty the kernel cache ({_cache()}) and look again; until it is right, {instead}"
        return wrong(name, said, cure, seconds=seconds, **numbers)
    ordered = [by_type[dtype] for dtype in DTYPES if dtype in by_type]
    told = ", ".join(f"{_type(one.dtype)} {one.error:.0e} ≤ {one.bound:.0e}" for one in ordered)
    return ok(name, f"largest errors {told}; {seconds:.1f} s", seconds=seconds, **numbers)


def cannot(name: str, reason: str, where: str, loss: str) -> Finding:
    """A kernel of GPUs is nothing to look at where there is none."""
    said = f"not here: {reason}"
    if where == "cpu" and "CUDA" in reason:
        return skip(name, said)
    return look(name, f"{said}; {loss}", "install a C++ compiler" if where == "cpu" else "pip install triton")


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cache() -> str:
    from mst_scale.compiled import cache_folder

    return str(cache_folder())
