"""Each function of weights against a definition of its own, in float64 and by loops."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest
import torch

import mst_scale
from mst_scale.config import load
from mst_scale.methods import METHODS, WeightFunction
from mst_scale.methods.baselines.pixelfly import pattern
from mst_scale.methods.baselines.spartan import soft_mask
from mst_scale.methods.baselines.top_kast import largest


def function(name: str, **options) -> WeightFunction:
    method = METHODS[name]
    return method.function(method.options(**options))


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient_of(of: WeightFunction, stored: torch.Tensor, kept: int, upstream: torch.Tensor) -> torch.Tensor:
    stored = stored.clone().requires_grad_()
    of.weight(stored, kept, 1.0).backward(upstream)
    pull = of.pull(stored.detach(), kept, 1.0)
    return stored.grad if pull is None else stored.grad + pull


@pytest.mark.parametrize(
    ("name", "phases"),
    [
        ("gmp", [("dense", 0), ("warmup", 250), ("ultra", 750)]),
        ("spartan", [("warmup", 0), ("ultra", 500)]),
    ],
)
def test_gradual_pruning_takes_half_of_the_run(name, phases):
    schedule = load({"training": {"steps": 1_000}, "mst": {"method": name}}).schedule
    assert [(phase.name, phase.start) for phase in schedule.phases] == phases


def test_the_largest_with_ties_to_the_lower_index():
    assert largest(torch.tensor([[1.0, -2, 2], [2, 0, -3]]), 3).tolist() == [[False, True, True], [False, False, True]]
    assert largest(matrix(3, 4), 12).all() and not largest(matrix(3, 4), 0).any()


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0, 3.5])
def test_powerprop(alpha):
    of, weight, upstream = function("powerprop", alpha=alpha, floor=0.01), matrix(5, 7), matrix(5, 7, seed=1)
    stored, _ = of.begin(weight)
    torch.testing.assert_close(of.weight(stored, 35, 1.0), weight)
    stored[0, :3] = 0.0  # as masks leave it
    stored[1, :3] = torch.tensor([1e-9, -1e-9, -0.5])
    size = stored.abs() ** (alpha - 1)
    by_hand = upstream * alpha * torch.where(size < 0.01, 0.01, size)
    torch.testing.assert_close(gradient_of(of, stored, 35, upstream), by_hand)
    torch.testing.assert_close(of.weight(stored, 35, 1.0), stored * stored.abs() ** (alpha - 1))
    papers = function("powerprop", alpha=alpha, floor=1e-30)
    torch.testing.assert_close(gradient_of(papers, stored, 35, upstream), upstream * alpha * size)


def test_top_kast():
    of, stored, upstream = function("top-kast", extra=0.2, penalty=0.5), matrix(4, 5), matrix(4, 5, seed=1)
    order = sorted(range(20), key=lambda i: -abs(float(stored.view(-1)[i])))
    used, reached = set(order[:6]), set(order[:10])
    weight, gradient = of.weight(stored, 6, 1.0).view(-1), gradient_of(of, stored, 6, upstream).view(-1)
    for i in range(20):
        theta, g = float(stored.view(-1)[i]), float(upstream.view(-1)[i])
        assert float(weight[i]) == (theta if i in used else 0.0)
        pull = 0.5 * theta if i in used else 0.5 * theta / (6 / 20)
        assert float(gradient[i]) == pytest.approx(g + pull if i in reached else 0.0, rel=1e-6)
    assert of.density((4, 5), 0.3) == 0.3 and of.gradient_density((4, 5), 0.3) == pytest.approx(0.5)


def soft(theta: torch.Tensor, kept: int, sharpness: float) -> torch.Tensor:
    """θ·m by scipy-free means: μ by Newton's method on Σm = k."""
    values = sharpness * theta.abs() / theta.abs().mean()
    mu = values.mean()
    for _ in range(200):
        mask = torch.sigmoid(values - mu)
        mu = mu + (mask.sum() - kept) / (mask * (1 - mask)).sum().clamp(min=1e-3)
    return theta * torch.sigmoid(values - mu)


def test_spartan():
    of, stored, upstream = function("spartan", sharpness=3.0), matrix(4, 6), matrix(4, 6, seed=1)
    mask = soft_mask(stored.abs() / stored.abs().mean(), 8, 3.0)
    assert float(mask.sum()) == pytest.approx(8)
    torch.testing.assert_close(stored * mask, soft(stored, 8, 3.0))
    weight = of.weight(stored, 8, 1.0)
    assert int((weight != 0).sum()) == 8
    torch.testing.assert_close(weight[weight != 0], soft(stored, 8, 3.0)[weight != 0])
    gradient, step = gradient_of(of, stored, 8, upstream), 1e-6
    for i in range(24):  # straight through the hard choice: the derivative of the soft one
        up, down = stored.clone(), stored.clone()
        up.view(-1)[i] += step
        down.view(-1)[i] -= step
        by_differences = ((soft(up, 8, 3.0) - soft(down, 8, 3.0)) * upstream).sum() / (2 * step)
        assert float(gradient.view(-1)[i]) == pytest.approx(float(by_differences), rel=1e-5, abs=1e-7)


def test_sr_ste():
    of, stored, upstream = function("sr-ste", n=2, m=4, decay=0.25), matrix(3, 8), matrix(3, 8, seed=1)
    weight, gradient = of.weight(stored, 0, 1.0), gradient_of(of, stored, 0, upstream)
    for row, group in itertools.product(range(3), range(2)):
        places = range(4 * group, 4 * group + 4)
        kept = sorted(places, key=lambda j: -abs(float(stored[row, j])))[:2]
        for j in places:
            assert float(weight[row, j]) == (float(stored[row, j]) if j in kept else 0.0)
            more = 0.0 if j in kept else 0.25 * float(stored[row, j])
            assert float(gradient[row, j]) == pytest.approx(float(upstream[row, j]) + more)
    assert torch.equal(of.end(stored, 0, 1.0), stored)


def test_masks_of_two_in_four_both_ways():
    of, stored = function("sr-ste", transposable=True), matrix(8, 4)
    kept = of.weight(stored, 0, 1.0) != 0
    for square, chosen in zip(stored.abs().split(4), kept.split(4), strict=True):
        assert (chosen.sum(0) == 2).all() and (chosen.sum(1) == 2).all()
        rows = [row for row in itertools.product((0, 1), repeat=4) if sum(row) == 2]
        masks = (torch.tensor(four) for four in itertools.product(rows, repeat=4))
        best = max(float((square * mask).sum()) for mask in masks if (mask.sum(0) == 2).all())
        assert float(square[chosen].sum()) == pytest.approx(best)


def test_s_ste():
    of, weight, upstream = function("s-ste"), matrix(3, 8), matrix(3, 8, seed=1)
    _, scale = of.begin(weight)
    projected = torch.zeros(3, 8, dtype=torch.float64)
    for row, group in itertools.product(range(3), range(2)):
        places = range(4 * group, 4 * group + 4)
        size = sorted(abs(float(weight[row, j])) for j in places)
        for j in places:
            value = float(weight[row, j])
            projected[row, j] = math.copysign(max(abs(value) - size[1], 0.0), value)
    torch.testing.assert_close(of.weight(weight, 0, scale), scale * projected)
    nearby = [float(((weight - b * projected) ** 2).sum()) for b in (scale, scale * 1.01, scale * 0.99)]
    assert nearby[0] == min(nearby), "β brings the projection closest to the first weights"
    assert torch.equal(gradient_of(of, weight, 0, upstream), upstream)


@pytest.mark.parametrize("shape", [(16, 16), (32, 16), (16, 48)])
def test_monarch_is_block_diagonal_twice_with_a_transposition_between(shape):
    of, weight = function("monarch", blocks=4), matrix(*shape)
    b, r = of.sizes(shape)
    assert (b, r) == (4, 1)
    stored, _ = of.begin(weight)
    left, right = of.factors(stored)
    inner = torch.block_diag(*right)  # (j, k·r) by inputs
    swap = torch.zeros(b * b * r, b * b * r, dtype=torch.float64)
    for j, k, a in itertools.product(range(b), range(b), range(r)):
        swap[(k * b + j) * r + a, (j * b + k) * r + a] = 1
    product = torch.block_diag(*left) @ swap @ inner
    torch.testing.assert_close(of.weight(stored, 0, 1.0), product)
    assert int((product != 0).sum()) == product.numel()
    assert int((stored != 0).sum()) == round(of.density(shape, 1.0) * weight.numel())
    for k, j in itertools.product(range(b), range(b)):  # the best of rank r in every piece
        rows, columns = (
            slice(k * shape[0] // b, (k + 1) * shape[0] // b),
            slice(j * shape[1] // b, (j + 1) * shape[1] // b),
        )
        left_out = torch.linalg.svdvals(weight[rows, columns])[r:]
        difference = (weight - product)[rows, columns]
        assert float(difference.square().sum()) == pytest.approx(float(left_out.square().sum()), rel=1e-4)
    again, _ = of.begin(product)
    torch.testing.assert_close(of.weight(again, 0, 1.0), product, rtol=1e-4, atol=1e-5)


def test_the_butterflys_pattern():
    by_hand = {(i, j) for i in range(8) for j in range(8) if i == j or i ^ j in (1, 2, 4)}
    assert set(pattern(8, 8, 3)) == by_hand
    assert set(pattern(8, 4, 2)) == {
        (i, j) for i in range(8) for j in range(4) if i // 2 == j or (i // 2) ^ j in (1, 2)
    }


@pytest.mark.parametrize("shape", [(32, 32), (64, 32), (32, 64)])
def test_pixelfly(shape):
    of, weight = function("pixelfly", block=4, strides=2), matrix(*shape)
    stored, _ = of.begin(weight)
    product, rank = of.weight(stored, 0, 1.0), of.rank(shape)
    on = torch.zeros(shape, dtype=torch.bool)
    for i, j in of.places(shape):
        on[4 * i : 4 * i + 4, 4 * j : 4 * j + 4] = True
    rest = weight.masked_fill(on, 0.0)
    u, size, v = torch.linalg.svd(rest)
    low = u[:, :rank] @ torch.diag(size[:rank]) @ v[:rank]
    torch.testing.assert_close(product, weight.masked_fill(~on, 0.0) + low, rtol=1e-4, atol=1e-5)
    held = int(on.sum()) + rank * sum(shape)
    assert int((stored != 0).sum()) == held == round(of.density(shape, 1.0) * weight.numel())
    assert 0.2 < rank * sum(shape) / held < 0.3, "a quarter of the weights"


# pixelfly multiplies whole groups of blocks where they fit the matrix, or else block by block
CASES = [(name, (64, 96), {}) for name, method in METHODS.items() if method.function]
CASES += [
    ("pixelfly", shape, {"block": 8, "strides": s}) for shape in ((64, 64), (192, 64), (64, 256)) for s in (1, 2, 3)
]


@pytest.mark.parametrize(("name", "shape", "options"), CASES)
def test_products_and_their_gradients_are_those_of_the_weight(name, shape, options):
    of, (outputs, inputs) = function(name, **options), shape
    assert name != "pixelfly" or (of.groups(shape) > 0) == (options.get("strides") in (1, 2))
    stored, scale = of.begin(matrix(*shape))
    x, bias, kept = matrix(2, 3, inputs, seed=2).requires_grad_(), matrix(outputs, seed=3), 1000
    stored.requires_grad_()
    results = []
    for product in (
        lambda: of.linear(x, stored, bias, kept, scale),
        lambda: x @ of.weight(stored, kept, scale).t() + bias,
    ):
        x.grad = stored.grad = None
        y = product()
        (y * matrix(*y.shape, seed=4)).sum().backward()
        results.append((y, x.grad, stored.grad))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert 0 < of.density((64, 96), 0.2) <= 1


@pytest.mark.parametrize(
    ("name", "shape"), [("sr-ste", (8, 6)), ("s-ste", (8, 6)), ("monarch", (7, 5)), ("pixelfly", (6, 7))]
)
def test_a_layer_of_an_unsupported_shape_gets_a_reason(name, shape):
    assert "mst.targets" in function(name).unsupported_reason(shape, "cpu", torch.float32)
    assert function(name).unsupported_reason((64, 64), "cpu", torch.float32) is None


def test_monarch_names_why_two_blocks_save_nothing():
    of = function("monarch", blocks=2)
    assert "factors as large as the matrix" in of.unsupported_reason((32, 32), "cpu", torch.float32)
    assert "cannot be divided" in of.unsupported_reason((33, 32), "cpu", torch.float32)
    assert of.unsupported_reason((128, 32), "cpu", torch.float32) is None


def test_the_page_names_every_method_and_its_source():
    page = (Path(mst_scale.__file__).parent.parent / "docs" / "methods.md").read_text()
    for name in set(METHODS) - {"channels", "averaged"}:  # of studies, once their plans have been read
        method = METHODS[name]
        assert f"`{name}`" in page or name in ("dense", "tiny", "dense-short"), name
        for paper in re.findall(r"arXiv \d{4}\.\d{5}", method.cites):
            assert paper in page or name in ("static",), (name, paper)
        for key, value in vars(method.options()).items():
            assert f"`{key}`" in page, (name, key, value)


TWO_OF_FOUR = [("sr-ste", {}), ("sr-ste", {"transposable": True}), ("s-ste", {})]


def check_two_of_four(name: str, options: dict, tokens: int, device: str, dtype: torch.dtype):
    of, stored = function(name, products="semi-structured", **options), matrix(96, 128).to(device, dtype)
    x, bias = matrix(tokens, 128, seed=1).to(device, dtype).requires_grad_(), matrix(96, seed=2).to(device, dtype)
    upstream, results = matrix(tokens, 96, seed=3).to(device, dtype), []
    stored.requires_grad_()
    for product in (
        lambda: of.linear(x, stored, bias, 0, 1.0),
        lambda: x @ of.weight(stored, 0, 1.0).t() + bias,
    ):
        x.grad = stored.grad = None
        y = product()
        y.backward(upstream)
        results.append((y, x.grad, stored.grad))
    for mine, theirs in zip(*results, strict=True):
        # both add up in float32 and round once, to 8 bits or more; near 0 by what terms of size 1 leave
        torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [64, 13])
@pytest.mark.parametrize(("name", "options"), TWO_OF_FOUR)
def test_two_of_four_by_sparse_tensor_cores(name, options, dtype, tokens):
    check_two_of_four(name, options, tokens, "cuda", dtype)


@pytest.mark.parametrize(("name", "options"), TWO_OF_FOUR)
def test_the_inputs_of_sparse_tensor_cores(name, options, monkeypatch):
    """Without the device: matrices with two of four along their rows, tokens in eights."""
    given = []

    def kept_dense(weight: torch.Tensor) -> torch.Tensor:
        assert ((weight.reshape(-1, 4) != 0).sum(1) == 2).all() and weight.is_contiguous()
        given.append(tuple(weight.shape))
        return weight

    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", kept_dense)
    check_two_of_four(name, options, 13, "cpu", torch.float64)
    assert given == [(96, 128)] + [(128, 96)] * bool(options), "the gradient of x too, where masks hold both ways"


def test_spartans_soft_mask_solves_its_transport_problem():
    """Of all masks that sum to k it has the most Σ m·v + H(m)/β, H the entropy of each entry: any step away loses."""
    generator = torch.Generator().manual_seed(3)
    values, kept, sharpness = torch.rand(40, generator=generator, dtype=torch.float64), 9, 7.0
    mask = soft_mask(values, kept, sharpness)
    assert float(mask.sum()) == pytest.approx(kept, abs=1e-9) and mask.min() > 0 and mask.max() < 1

    def gain(m: torch.Tensor) -> float:
        entropy = -(m * m.log() + (1 - m) * (1 - m).log())
        return float((m * values + entropy / sharpness).sum())

    room = torch.minimum(mask, 1 - mask)
    for _ in range(50):
        step = torch.randn(40, generator=generator, dtype=torch.float64)
        step -= step.mean()
        step *= 0.5 * float((room / step.abs()).min())
        assert gain(mask + step) < gain(mask) and gain(mask - step) < gain(mask)
