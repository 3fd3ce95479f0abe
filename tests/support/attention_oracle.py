"""The result that every backend must return: the definition, evaluated in float64 on the inputs of the backend."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from mst_scale.hybrid_sparse_attention import Pattern, attention
from mst_scale.hybrid_sparse_attention.definition import definition

NAMES = ("out", "dq", "dk", "dv")

# Largest error allowed, relative to max(1, largest |reference|): the inputs are unit normal, so the terms that are
# summed are of order one even where they cancel (dq and dk of a row with one key are exactly 0).
TOLERANCE = {
    # asked for; sums of a few hundred terms of order one lose about 10 ulp (2e-15)
    torch.float64: {"out": 1e-12, "grads": 1e-12},
    # asked for; eps is 1.2e-7, the same 10 ulp
    torch.float32: {"out": 2e-6, "grads": 2e-6},
    # computed in float32, stored with 10 and 7 explicit bits: half an ulp of a result is 2^-11 and 2^-8 of its size.
    # Gradients also read back the stored out (Σ_c dout·out carries its rounding, head_dim terms): 4 times as much.
    torch.float16: {"out": 2**-11, "grads": 2**-9},
    torch.bfloat16: {"out": 2**-8, "grads": 2**-6},
}


def inputs(
    shape: tuple[int, int, int, int], kv_heads: int, dtype: torch.dtype, device: str = "cpu"
) -> list[torch.Tensor]:
    """q, k, v, dout: unit normal, the same numbers in every dtype and on every device (up to rounding)."""
    batch, heads, length, dim = shape
    generator = torch.Generator().manual_seed(hash((shape, kv_heads)) % 2**31)
    return [
        torch.randn(batch, h, length, dim, dtype=torch.float64, generator=generator).to(device, dtype)
        for h in (heads, kv_heads, kv_heads, heads)
    ]


def raised(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same with small whole numbers for q and k, and 2^18 added to every q·k, which the softmax does not see.

    float32 holds every q·k exactly, in whatever order its terms are added: what is lost is lost after the product.
    """
    q, k, *others = tensors
    q, k = q.round(), k.round()
    q[..., 0], k[..., 0] = 2.0**18, 1.0
    return [q, k, *others]


def nearly_equal(length: int, dim: int, score: float) -> list[torch.Tensor]:
    """q, k, v, dout: all rows of q are the same, all rows of k too; every pair has this score, up to rounding."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(dim, dtype=torch.float64, generator=generator) for _ in range(2))
    k *= score * math.sqrt(dim) / (q @ k)
    v, dout = (torch.randn(1, 2, length, dim, generator=generator) for _ in range(2))
    return [q.float().expand(v.shape), k.float().expand(v.shape), v, dout]


def differentiate(
    compute: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor
) -> list[torch.Tensor]:
    """[out, dq, dk, dv]"""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = compute(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def reference(tensors: list[torch.Tensor], pattern: Pattern, causal: bool) -> list[torch.Tensor]:
    scale = 1.0 / math.sqrt(tensors[0].shape[-1])
    return differentiate(
        lambda q, k, v: definition(q, k, v, pattern=pattern, causal=causal, scale=scale), *[x.double() for x in tensors]
    )


def relative_errors(results: list[torch.Tensor], truth: list[torch.Tensor]) -> dict[str, float]:
    return {
        name: float((a.double() - b).abs().max()) / max(1.0, float(b.abs().max())) if b.numel() else 0.0
        for name, a, b in zip(NAMES, results, truth, strict=True)
    }


def check(backend: str, tensors: list[torch.Tensor], pattern: Pattern, causal: bool, slack: float = 1.0) -> None:
    """Forward and all three gradients of a backend against the definition. `slack` multiplies half types' tolerance."""
    results = differentiate(lambda q, k, v: attention(q, k, v, pattern, causal, backend), *tensors)
    for given, result in zip((tensors[0], *tensors[:3]), results, strict=True):
        assert result.shape == given.shape
        assert result.dtype == given.dtype
    allowed = TOLERANCE[tensors[0].dtype]
    for name, error in relative_errors(results, reference(tensors, pattern, causal)).items():
        limit = allowed["out" if name == "out" else "grads"] * (slack if tensors[0].element_size() == 2 else 1.0)
        assert error <= limit, (
            f"{name} of {backend}, {pattern}, causal={causal}, {tuple(tensors[0].shape)}: {error:.2e}"
        )
