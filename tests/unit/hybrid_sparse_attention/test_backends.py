"""Every CPU backend against the definition: forward, dq, dk, dv. (Triton: test_triton.py.)"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from mst_scale.hybrid_sparse_attention import Pattern, attention, blocked, cpp
from tests.support.attention_oracle import (
    check,
    differentiate,
    inputs,
    nearly_equal,
    raised,
    reference,
    relative_errors,
)

BACKENDS = ("cpp", "blocked")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    kind=st.sampled_from(["dense", "strided", "fixed"]),
    stride=st.integers(1, 100),
    length=st.integers(1, 150),
    causal=st.booleans(),
    batch=st.integers(1, 2),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2), (4, 1)]),
    dim=st.sampled_from([1, 7, 16, 20, 32]),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_shape(  # noqa: PLR0917
    backend: str,
    kind: str,
    stride: int,
    length: int,
    causal: bool,
    batch: int,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
) -> None:
    tensors = inputs((batch, heads[0], length, dim), heads[1], dtype)
    check(backend, tensors, Pattern(kind, stride), causal)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "stride", "length"),
    [
        ("strided", 1, 70),  # holds every pair
        ("strided", 80, 70),  # l > n
        ("strided", 70, 70),  # l = n
        ("strided", 69, 70),  # one pair outside of the window
        ("strided", 2, 200),  # 100 rows per residue: gathered in the C++ kernel
        ("strided", 48, 97),  # one row more than whole strides
        ("fixed", 64, 130),
        ("fixed", 1, 70),
        ("strided", 16, 1),  # a single row
        ("fixed", 16, 1),
    ],
)
def test_corners(backend: str, dtype: torch.dtype, kind: str, stride: int, length: int) -> None:
    for causal in (True, False):
        check(backend, inputs((1, 2, length, 24), 1, dtype), Pattern(kind, stride), causal)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dim", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_dims(backend: str, dim: int, dtype: torch.dtype) -> None:
    check(backend, inputs((1, 2, 150, dim), 1, dtype), Pattern("strided", 32), True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_definition_is_as_exact_as_the_kernels_that_it_replaces(dtype: torch.dtype) -> None:
    """`auto` takes it at small sizes where there is no compiler."""
    for kind, causal in itertools.product(("strided", "fixed"), (True, False)):
        check("definition", inputs((2, 4, 150, 64), 2, dtype), Pattern(kind, 32), causal)


@pytest.mark.parametrize("backend", BACKENDS)
def test_length_and_stride_of_real_use(backend: str) -> None:
    for kind in ("strided", "fixed"):
        check(backend, inputs((1, 1, 1024, 64), 1, torch.float32), Pattern(kind, 256), True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_batches_and_heads(backend: str) -> None:
    check(backend, inputs((40, 30, 9, 4), 30, torch.float32), Pattern("strided", 4), True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["strided", "fixed"])
@pytest.mark.parametrize("causal", [True, False])
def test_stride_one_or_beyond_the_length_equals_dense(backend: str, kind: str, causal: bool) -> None:
    q, k, v, dout = inputs((1, 2, 50, 16), 2, torch.float64)
    dense = differentiate(lambda *x: attention(*x, Pattern("dense"), causal, "dense"), q, k, v, dout)
    for stride in (1, 50, 51, 10**9):
        result = differentiate(lambda *x, s=stride: attention(*x, Pattern(kind, s), causal, backend), q, k, v, dout)
        assert max(relative_errors(result, dense).values()) <= 1e-12  # the same sums in another order


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["dense", "strided", "fixed"])
@pytest.mark.parametrize("causal", [True, False])
def test_finite_differences(backend: str, kind: str, causal: bool) -> None:
    q, k, v, _ = (x.requires_grad_() for x in inputs((1, 2, 7, 3), 1, torch.float64))
    assert torch.autograd.gradcheck(lambda *x: attention(*x, Pattern(kind, 3), causal, backend), (q, k, v))


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_memory_layout(backend: str) -> None:
    """Views into one projection, a broadcast gradient (`out.sum().backward()`), a transposed last dimension."""
    length, pattern = 45, Pattern("strided", 8)
    projection = torch.randn(2, length, 3, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k, v = (x.transpose(1, 2) for x in projection.unbind(2))
    broadcast = torch.ones((), dtype=torch.float64).expand(q.shape)
    turned = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v, broadcast)]
    for tensors in ([q, k, v, broadcast], turned):
        result = differentiate(lambda *x: attention(*x, pattern, True, backend), *tensors)
        assert max(relative_errors(result, reference(tensors, pattern, True)).values()) <= 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 2, 8, 4), (2, 2, 0, 4)])
def test_nothing_in_nothing_out(backend: str, shape: tuple[int, int, int, int]) -> None:
    q, k, v, dout = inputs(shape, 2, torch.float32)
    assert [
        x.numel() for x in differentiate(lambda *x: attention(*x, Pattern("strided", 4), True, backend), q, k, v, dout)
    ] == [0] * 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_scores_stay_finite(backend: str, dtype: torch.dtype) -> None:
    """Scores of ±10^5: exp overflows unless the maximum is subtracted first, also between parts and tiles."""
    q, k, v, dout = inputs((1, 2, 200, 16), 2, dtype)
    for pattern in (Pattern("strided", 16), Pattern("strided", 3), Pattern("fixed", 16)):
        results = differentiate(lambda *x, p=pattern: attention(*x, p, True, backend), q * 300, k * 300, v, dout)
        assert all(bool(x.isfinite().all()) for x in results)
        truth = attention((q * 300).double(), (k * 300).double(), v.double(), pattern, True, "definition")
        # the softmax has become an argmax: a score's own rounding, eps · 10^5, may shift weight between near ties
        close = (results[0].double() - truth).abs() <= 2**-6 * truth.abs().clamp(min=1)
        assert float(close.double().mean()) > 0.99


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_scores_cost_no_digits(backend: str, dtype: torch.dtype) -> None:
    """Scores of 65,536 and a few more or less, whose last digit in float32 is 0.004."""
    for kind, stride, causal in LARGE:
        check(backend, raised(inputs((1, 2, 197, 16), 2, dtype)), Pattern(kind, stride), causal)


# diagonals, residues, blocks; tiles that nothing divides
LARGE = list(itertools.product(("strided", "fixed"), (48, 3), (True, False)))


@pytest.mark.parametrize("score", [1e4, 1e5])
def test_equal_rows_have_equal_scores(score: float) -> None:
    """In every part of a pattern, forward and backward.

    One digit's difference between two ways to the same product would be 0.1 % of a probability at 10^4. (`blocked`
    leaves its products to torch, whose order depends on their shapes.)
    """
    for kind, stride, causal in LARGE:
        check_as_exact_as_torch("cpp", nearly_equal(197, 64, score), Pattern(kind, stride), causal)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_over_thousands_cost_no_digits(backend: str) -> None:
    """v and dout of one sign, so that sums over all rows grow with every term."""
    q, k, v, dout = inputs((1, 1, 2048, 16), 1, torch.float32)
    check_as_exact_as_torch(backend, [q, k, v.abs(), dout.abs()], Pattern("dense"), False)


def check_as_exact_as_torch(backend: str, tensors: list[torch.Tensor], pattern: Pattern, causal: bool) -> None:
    """Within 4 times the error of torch's kernel in float32, or 8 roundings where torch was lucky."""
    truth, mask = reference(tensors, pattern, causal), pattern.mask(tensors[0].shape[-2], causal)
    theirs = differentiate(lambda *x: scaled_dot_product_attention(*x, attn_mask=mask), *tensors)
    allowed = relative_errors(theirs, truth)
    found = relative_errors(differentiate(lambda *x: attention(*x, pattern, causal, backend), *tensors), truth)
    for name, error in found.items():
        assert error <= max(4 * allowed[name], 2**-21), f"{name}, {pattern}, causal={causal}: {error}, torch {allowed}"


@pytest.mark.full
def test_other_processors(another_processor: None) -> None:
    """As exact without this machine's widest vectors."""
    for dtype, (kind, stride, causal) in itertools.product(DTYPES, LARGE):
        check("cpp", inputs((1, 2, 97, 20), 1, dtype), Pattern(kind, stride), causal)
    for kind, stride, causal in LARGE:
        check("cpp", raised(inputs((1, 2, 97, 20), 1, torch.float32)), Pattern(kind, stride), causal)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_is_not_hidden(backend: str) -> None:
    """A NaN in a key must reach every query that sees it, and no other: training has to notice."""
    q, k, v, _ = inputs((1, 1, 100, 16), 1, torch.float32)
    k[0, 0, 20, 3] = torch.nan
    for pattern in (Pattern("strided", 8), Pattern("strided", 2), Pattern("fixed", 8)):
        seen = pattern.mask(100)[:, 20]
        out = attention(q, k, v, pattern, True, backend)
        assert torch.equal(out.isnan().any(-1)[0, 0], seen)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_with_nothing_to_attend_are_zero(backend: str) -> None:
    """Every pattern holds the diagonal, so such a row comes from scores of -inf alone (a key masked by its values):
    zeros, top = -inf and no NaN. Parts that are empty for a row (its first strides) are in every other test."""
    q, k, v, dout = inputs((1, 1, 40, 4), 1, torch.float64)
    q, k = q.abs(), k.clone()
    k[:, :, :3] = -torch.inf  # rows 0, 1, 2 see nothing else
    module = cpp if backend == "cpp" else blocked
    out, *rows = module.forward(q, k, v, pattern=Pattern("strided", 8), causal=True, scale=0.5)
    assert torch.equal(out[0, 0, :3], torch.zeros(3, 4, dtype=torch.float64))
    assert bool((rows[0][0, 0, :3] == -torch.inf).all())
    assert bool(out.isfinite().all())
    _, _, dv = module.backward((q, k, v, out, *rows), dout, pattern=Pattern("strided", 8), causal=True, scale=0.5)
    assert torch.equal(dv[0, 0, :3], torch.zeros(3, 4, dtype=torch.float64))
    assert bool(dv.isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_operators_keep_the_rules_of_torch_library(backend: str) -> None:
    """Schema, autograd registration, and shapes and strides as torch.compile is told them."""
    q, k, v, dout = inputs((1, 4, 20, 8), 2, torch.float32)
    options = ("strided", 4, True, 0.5)
    operator = getattr(torch.ops.mst_scale, f"sparse_attention_{backend}")
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(operator, (*leaves, *options))
    out, *rows = operator(q, k, v, *options)
    torch.library.opcheck(
        getattr(torch.ops.mst_scale, f"sparse_attention_{backend}_backward"), (q, k, v, out, *rows, dout, *options)
    )


def test_gathering_residues_equals_diagonals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ kernel's two ways through the strided pairs, whatever `auto` would choose at this size."""
    pattern = Pattern("strided", 12)
    for causal, dtype in itertools.product((True, False), DTYPES):
        tensors = inputs((2, 4, 150, 20), 2, dtype)
        for threshold in (1, 10**9):
            monkeypatch.setattr(cpp, "REGROUP_FROM", threshold)
            check("cpp", tensors, pattern, causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stride", [64, 9])  # by diagonals and by residues
def test_any_number_of_threads(dtype: torch.dtype, stride: int) -> None:
    tensors = inputs((3, 4, 700, 16), 2, dtype)  # enough work for 5 threads with either stride
    assert Pattern("strided", stride).pairs(700) * 12 * 16 > 5 * cpp.PER_THREAD
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(differentiate(lambda *x: attention(*x, Pattern("strided", stride), True, "cpp"), *tensors))
    for other in results[1:]:  # no sum depends on how the work is split
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_small_blocks_of_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """`blocked` under a score budget so small that it works row by row."""
    monkeypatch.setattr(blocked, "SCORES", 64)
    for kind in ("strided", "fixed"):
        check("blocked", inputs((1, 2, 60, 8), 1, torch.float64), Pattern(kind, 9), False)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7FFFFFFF])  # of x86, another, of NVIDIA GPUs
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_nan_stays_nan(backend: str, bits: int) -> None:
    """The C++ kernel computes powers of 2 in the bits of the exponent."""
    q, k, v, _ = inputs((1, 1, 8, 16), 1, torch.float32)
    k[0, 0, 3] = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    out = attention(q, k, v, Pattern("strided", 3), True, backend)
    assert out.isnan().any(-1).flatten().tolist() == Pattern("strided", 3).mask(8)[:, 3].tolist()


@pytest.mark.parametrize("backend", [*BACKENDS, "definition", "dense"])
def test_scores_may_have_another_scale(backend: str) -> None:
    tensors = inputs((2, 4, 30, 16), 2, torch.float64)
    pattern = Pattern("dense") if backend == "dense" else Pattern("strided", 7)
    q, k, v, dout = tensors
    found = differentiate(lambda *x: attention(*x, pattern, True, backend, scale=0.7), q, k, v, dout)
    other = differentiate(lambda q, k, v: attention(q * (0.7 * 4), k, v, pattern, True, "auto"), q, k, v, dout)
    for one, two in zip(found, other, strict=True):
        torch.testing.assert_close(one, two)
