"""Cases of the block kernels and their errors against masked dense products in float64."""

from __future__ import annotations

from typing import Any

import torch

from mst_scale.sparse_linear.block import BlockIndex
from mst_scale.sparse_linear.definition import definition

# One rounding of the result to its type, and sums in float32 of some hundred terms of size 1.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def mask_of(outputs: int, inputs: int, side: int, kind: str) -> torch.Tensor:
    down, across = -(-outputs // side), -(-inputs // side)
    generator = torch.Generator().manual_seed(outputs + inputs)
    blocks = torch.rand(down, across, generator=generator) < 0.3
    if kind == "empty rows":
        blocks[0], blocks[:, -1], blocks[-1, 0] = False, False, True
    elif kind in ("all", "none"):
        blocks[:] = kind == "all"
    elif kind == "one":
        blocks[:] = False
        blocks[-1, -1] = True
    weights = blocks.repeat_interleave(side, 0).repeat_interleave(side, 1)
    return weights[:outputs, :inputs].contiguous()


def errors(case: dict[str, Any], device: str = "cpu") -> dict[str, float]:
    """Largest error of y, dx, dw and db, relative to the largest value of each."""
    dtype = getattr(torch, case["dtype"])
    outputs, inputs, tokens = case["outputs"], case["inputs"], case["tokens"]
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, weight, dy = draw(tokens, inputs), draw(outputs, inputs), draw(tokens, outputs)
    bias = draw(outputs) if case["bias"] else None
    active = mask_of(outputs, inputs, case["side"], case["kind"])
    exact = _differentiate(
        lambda a, w, b: definition(a, w, active, b, dense_gradient=case["dense"]),
        *(None if t is None else t.double() for t in (x, weight, bias, dy)),
    )
    index = BlockIndex(active.to(device), case["side"])
    weight = weight.masked_fill(~active, float("nan"))  # what is masked is never read
    if case["transposed"]:
        weight = weight.T.contiguous().T
    found = _differentiate(
        lambda a, w, b: index.linear(a, w, b, case["dense"]),
        *(None if t is None else t.to(device) for t in (x, weight, bias, dy)),
    )
    report = {}
    for name, mine in found.items():
        other = exact[name]
        if not mine.numel():
            report[name] = 0.0
            continue
        assert mine.dtype == dtype and mine.shape == other.shape
        report[name] = float((mine.cpu().double() - other).abs().max() / other.abs().max().clamp(min=1e-30))
    if not case["dense"]:
        assert not found["dw"].cpu()[~active].count_nonzero(), "zero where masked"
    return report


def poisoned() -> dict[str, bool]:
    """Values that are not finite in x, dy or an active weight: they reach what active weights join them to, and
    nothing else. (What is masked is NaN in `errors`, and never read.)"""
    active = mask_of(64, 64, 16, "empty rows")
    index = BlockIndex(active, 16)
    x, weight, dy = (torch.ones(rows, 64) for rows in (33, 64, 33))

    def only(values: torch.Tensor, expected: torch.Tensor) -> bool:
        return torch.equal(~values.isfinite(), expected) and bool(expected.any()) and not bool(expected.all())

    def row(number: int, rows: int, values: torch.Tensor) -> torch.Tensor:
        found = torch.zeros(rows, 64, dtype=torch.bool)
        found[number] = values
        return found

    kept = int(active.any(1).nonzero()[0])  # the first output that is not empty
    spoilt = {}
    for name, value in (("nan", float("nan")), ("inf", float("inf"))):
        bad_x, bad_dy, bad_weight = x.clone(), dy.clone(), weight.clone()
        bad_x[3], bad_dy[5, kept], bad_weight[kept, active[kept]] = value, value, value
        spoilt[f"{name} in x, y"] = only(index.forward(bad_x, weight, None), row(3, 33, active.any(1)))
        spoilt[f"{name} in dy, dx"] = only(index.input_gradient(bad_dy, weight), row(5, 33, active[kept]))
        spoilt[f"{name} in dy, dw"] = only(index.weight_gradient(x, bad_dy), row(kept, 64, active[kept]))
        column = torch.zeros(64, dtype=torch.bool)
        column[kept] = True
        spoilt[f"{name} in w, y"] = only(index.forward(x, bad_weight, None), column.expand(33, 64))
        spoilt[f"{name} in w, dx"] = only(index.input_gradient(dy, bad_weight), active[kept].expand(33, 64))
    return spoilt


def _differentiate(function: Any, x: Any, weight: Any, bias: Any, dy: Any) -> dict[str, torch.Tensor]:
    leaves = [t.detach().clone().requires_grad_() if t is not None else None for t in (x, weight, bias)]
    y = function(*leaves)
    wanted = [t for t in leaves if t is not None]
    gradients = torch.autograd.grad(y, wanted, dy)
    return dict(zip(("y", "dx", "dw", "db"), (y.detach(), *gradients), strict=False))


def second_derivatives(device: str = "cpu") -> dict[str, float]:
    """Largest errors of the gradients of a loss, and of those of a penalty on them, relative to the largest value."""
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(40, 50, generator=generator), torch.randn(70, 50, generator=generator)
    active = mask_of(70, 50, 16, "some")

    def both(layer: Any, *leaves: torch.Tensor) -> list[torch.Tensor]:
        leaves = tuple(leaf.clone().requires_grad_() for leaf in leaves)
        first = torch.autograd.grad(layer(*leaves).pow(3).sum(), leaves, create_graph=True)
        penalty = first[0].square().sum() + 2 * first[1].square().sum()
        return [*first, *torch.autograd.grad(penalty, leaves)]

    index = BlockIndex(active.to(device), 16)
    found = both(lambda a, w: index.linear(a, w, None, False), x.to(device), weight.to(device))
    exact = both(lambda a, w: torch.nn.functional.linear(a, w * active), x.double(), weight.double())
    pairs = zip(("dx", "dw", "ddx", "ddw"), found, exact, strict=True)
    return {name: float((f.detach().cpu() - e).abs().max() / e.abs().max()) for name, f, e in pairs}
