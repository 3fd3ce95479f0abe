"""Every backend against the definition: forward and all gradients, odd shapes, values that are not finite."""

import pytest
import torch
import torch.nn.functional as F

from mst_scale.errors import UserError
from mst_scale.sparse_linear import SparseLayers, cpu, dispatch, kernel
from mst_scale.sparse_linear.definition import definition

# A sum of n products in precision eps is off by at most n·eps times the sum of their sizes: a random walk, so √n·eps in
# practice. The definition runs in float64; 16-bit types round their output, and
# x, w, dy are exact in both.
EPS = {torch.float32: 2**-24, torch.float64: 2**-53, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def case(outputs, inputs, tokens, sparsity, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    active = torch.rand(outputs, inputs, generator=generator) >= sparsity
    return active, drawn(tokens, inputs), drawn(outputs, inputs), drawn(outputs), drawn(tokens, outputs)


def results(linear, x, weight, bias, dy):
    """y, dx, dW, db."""
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = linear(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def assert_close(found, expected, dtype, terms):
    for what, a, b in zip(("y", "dx", "dW", "db"), found, expected, strict=True):
        assert a.dtype == dtype and a.shape == b.shape, what
        scale = b.abs().max().item() if b.numel() else 0.0
        bound = 8 * EPS[torch.promote_types(dtype, torch.float32)] * terms**0.5 + 2 * EPS[dtype]
        error = (a.double() - b).abs().max().item() if a.numel() else 0.0
        assert error <= bound * max(scale, 1.0), f"{what}: {error:.2e} of {scale:.1f}"


SHAPES = [
    (48, 32, 64),  # whole vectors and tiles
    (37, 19, 5),  # nothing divides
    (70, 3200, 70),  # more inputs than one panel, a ragged tile of tokens
    (3200, 70, 1),  # more outputs than one panel, one token
    (33, 40, 130),
    (3, 5, 0),  # no token
    (1, 1, 17),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sparsity", [0.7, 0.0, 1.0])
def test_forward_and_gradients(shape, sparsity):
    active, *tensors = case(*shape, sparsity)
    index = cpu.CompiledIndex(active)
    found = results(lambda x, w, b: index.linear(x, w, b, False), *tensors)
    expected = results(lambda x, w, b: definition(x, w, active, b), *(t.double() for t in tensors))
    assert_close(found, expected, torch.float32, max(shape))
    assert not found[2][~active].any(), "dW is exactly zero where masked"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dense_gradient", [False, True])
def test_dtypes_and_the_dense_gradient(dtype, dense_gradient):
    active, *tensors = case(70, 100, 70, 0.8, dtype)
    index = cpu.CompiledIndex(active)
    found = results(lambda x, w, b: index.linear(x, w, b, dense_gradient), *tensors)
    wide = (t.double() for t in tensors)
    expected = results(lambda x, w, b: definition(x, w, active, b, dense_gradient=dense_gradient), *wide)
    assert_close(found, expected, dtype, 100)
    assert bool(found[2][~active].any()) == dense_gradient


def test_the_definition_is_a_masked_dense_layer():
    active, x, weight, bias, dy = case(12, 9, 6, 0.5)
    weight[~active] = torch.nan  # whatever stands there
    found = results(lambda x, w, b: definition(x, w, active, b), x, weight, bias, dy)
    clean = weight.masked_fill(~active, 0)
    expected = results(F.linear, x, clean, bias, dy)
    expected[2] = expected[2].masked_fill(~active, 0)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("shape", [(16, 20000, 8), (20000, 16, 8), (16, 16, 20000)], ids=["y", "dx", "dW"])
def test_long_sums_cost_no_digits(shape):
    """Values of one sign, so that sums grow with every term: within 4 times the error of torch, summing in pieces."""
    active, *tensors = case(*shape, 0.0)
    x, weight, bias, dy = (t.abs() for t in tensors)
    index = cpu.CompiledIndex(active)
    found = results(lambda x, w, b: index.linear(x, w, b, False), x, weight, bias, dy)
    theirs = results(F.linear, x, weight, bias, dy)
    exact = results(F.linear, *(t.double() for t in (x, weight, bias, dy)))
    for what, ours, torchs, truth in zip(("y", "dx", "dW"), found, theirs, exact, strict=False):
        error, allowed = (float(((t.double() - truth) / truth).abs().max()) for t in (ours, torchs))
        assert error <= 4 * allowed, f"{what}: {error:.1e}, torch {allowed:.1e}"


def test_empty_rows_and_columns():
    active, *tensors = case(40, 50, 20, 0.5)
    active[::3], active[:, ::4] = False, False
    index = cpu.CompiledIndex(active)
    found = results(lambda x, w, b: index.linear(x, w, b, False), *tensors)
    assert torch.equal(found[0][:, ::3], tensors[2][::3].expand(20, -1)), "an empty row gives the bias"
    assert not found[1][:, ::4].any() and not found[2][~active].any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_spread_as_in_a_dense_layer(value):
    """NaN wherever an active weight meets it; a masked weight does not see it (0 · inf is NaN in a dense product)."""
    active, x, weight, bias, dy = case(40, 50, 20, 0.8)
    x[3, 7] = value
    index = cpu.CompiledIndex(active)
    y, _, dw, _ = results(lambda x, w, b: index.linear(x, w, b, False), x, weight, bias, dy)
    assert torch.equal(~y[3].isfinite(), active[:, 7]) and y[:3].isfinite().all() and y[4:].isfinite().all()
    assert torch.equal(~dw.isfinite().all(0), torch.arange(50) == 7) and not dw[~active].any()
    dy[5, 11] = value
    y, dx, dw, _ = results(lambda x, w, b: index.linear(x, w, b, False), case(40, 50, 20, 0.8)[1], weight, bias, dy)
    assert torch.equal(~dx[5].isfinite(), active[11]) and torch.equal(~dw[11].isfinite(), active[11])
    weight[0, active[0]] = value
    y, *_ = results(lambda x, w, b: index.linear(x, w, b, False), case(40, 50, 20, 0.8)[1], weight, bias, dy)
    assert not y[:, 0].isfinite().any() and y[:, 1:].isfinite().all()


def test_the_same_bits_for_any_number_of_threads(monkeypatch):
    active, x, weight, bias, dy = case(300, 260, 300, 0.9)
    products = kernel.CompiledProducts(active)
    monkeypatch.setattr(kernel, "PER_THREAD", 1)  # so that even this small call wakes them
    found = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        values = products.gather(weight)
        found.append([products.forward(x, values, bias), *products.backward(x, dy, values, True, True)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.full
def test_other_processors(another_processor):
    """As exact without this machine's widest vectors."""
    active, *tensors = case(70, 1600, 70, 0.9)
    found = results(lambda x, w, b: cpu.CompiledIndex(active).linear(x, w, b, False), *tensors)
    expected = results(lambda x, w, b: definition(x, w, active, b), *(t.double() for t in tensors))
    assert_close(found, expected, torch.float32, 1600)
    bfloat16_is_float32_rounded((70, 1600, 100))
    float16_is_exact()


def bfloat16_is_float32_rounded(shape):
    """Output and input gradient, bit for bit: two tokens in a word are still added up in float32, each in its order."""
    active, *tensors = case(*shape, 0.8, torch.bfloat16)
    index = cpu.CompiledIndex(active)
    found = results(lambda x, w, b: index.linear(x, w, b, False), *tensors)
    wide = results(lambda x, w, b: index.linear(x, w, b, False), *(t.float() for t in tensors))
    assert torch.equal(found[0], wide[0].bfloat16()) and torch.equal(found[1], wide[1].bfloat16())
    assert_close(found, [t.double() for t in wide], torch.bfloat16, max(shape))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bfloat16_is_float32_rounded(shape):
    bfloat16_is_float32_rounded(shape)


def test_bfloat16_rounds_what_is_not_finite():
    """NaN stays NaN, and what exceeds the largest number becomes infinite."""
    largest = torch.finfo(torch.bfloat16).max
    x = torch.tensor([[torch.nan], [torch.inf], [-torch.inf], [largest], [-largest], [1.0]] * 6).bfloat16()
    index = cpu.CompiledIndex(torch.ones(20, 1, dtype=torch.bool))
    weight = torch.full((20, 1), 1.5).bfloat16()
    y = index.linear(x, weight, None, False)
    assert torch.equal(y.nan_to_num(7.0), (x * weight.T).nan_to_num(7.0))


def float16_is_exact():
    """Every float16 there is goes in and comes out, and products of all of them are rounded as torch rounds them."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).view(-1, 1)
    index = cpu.CompiledIndex(torch.ones(1, 1, dtype=torch.bool))
    for factor in (1.0, 0.7, 1 / 3000, 30.0):
        weight = torch.tensor([[factor]], dtype=torch.float16)
        y = index.linear(x, weight, None, False)
        expected = (x.float() * weight.float()).half()
        assert torch.equal(y.isnan(), expected.isnan()) and torch.equal(y[~y.isnan()], expected[~y.isnan()])


def test_float16_is_exact():
    float16_is_exact()


def test_index_is_the_mask():
    active = torch.rand(50, 1700, generator=torch.Generator().manual_seed(1)) > 0.9
    index = cpu.CompiledIndex(active)
    eye = torch.eye(1700)
    assert torch.equal(index.linear(eye, torch.ones(50, 1700), None, False).T.bool(), active)


# --- without a compiler ---


def test_without_a_compiler_layers_are_dense_and_a_request_for_the_kernel_says_why(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("MST_SCALE_CACHE", str(tmp_path))
    kernel.library.cache_clear()
    try:
        assert "no C++ compiler" in cpu.unsupported_reason("cpu", torch.float32)
        chosen, why = dispatch.choose("cpu", torch.float32, (3072, 768), 0.96, 1)
        assert chosen == "dense" and "no C++ compiler" in why
        with pytest.raises(UserError, match="no C\\+\\+ compiler"):
            model = torch.nn.Linear(50, 40)
            SparseLayers(model, {"weight": model.weight}, {"weight": (40, 50)}, "cpu")
    finally:
        kernel.library.cache_clear()
