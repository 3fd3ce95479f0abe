from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention import Pattern, attention, cpp, dispatch
from tests.support.attention_oracle import inputs

SPARSE = Pattern("strided", 8)


def small(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return inputs((1, 2, 32, 8), 2, dtype)[:3]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize("pattern", [SPARSE, Pattern("dense")])
def test_a_scale_that_is_not_positive_is_rejected(scale: float, pattern: Pattern) -> None:
    with pytest.raises(UserError, match="positive"):
        attention(*small(), pattern, scale=scale)


def test_auto_picks_by_device_dtype_and_size() -> None:
    float32 = torch.float32
    assert dispatch.choose("cpu", float32, 64, dense=True, small=False)[0] == "dense"
    assert dispatch.choose("cpu", float32, 64, dense=False, small=True)[0] == "cpp"
    assert dispatch.choose("cpu", torch.float8_e4m3fn, 64, dense=False, small=False)[0] == "blocked"
    assert dispatch.choose("cuda", float32, 64, dense=False, small=False)[0] == "triton"
    assert dispatch.choose("cuda", torch.float64, 64, dense=False, small=False)[0] == "blocked"
    assert dispatch.choose("cuda", float32, 512, dense=False, small=True)[0] == "definition"
    assert dispatch.choose("mps", float32, 64, dense=False, small=False)[0] == "blocked"


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    dispatch._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="mst_scale"):
        for _ in range(3):
            attention(*small(), SPARSE)
    said = [record.message for record in caplog.records if "backend" in record.message]
    assert said == ["attention (sparse) on cpu in torch.float32: backend cpp, the fused kernel for cpu"]


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("triton", "needs a CUDA device"),
        ("dense", "every pair"),
        ("flash", "unknown: choose one of auto, dense, cpp"),
    ],
)
def test_a_backend_that_cannot_run_gives_the_reason(backend: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        attention(*small(), SPARSE, backend=backend)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`auto` goes on with torch operators and says so; asking for cpp is an error."""
    expected = attention(*small(), SPARSE)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("MST_SCALE_CACHE", str(tmp_path))
    cpp.library.cache_clear()
    dispatch._log_choice.cache_clear()
    try:
        with caplog.at_level(logging.INFO, logger="mst_scale"):
            for _ in range(2):
                result = attention(*small(), SPARSE)
            large = attention(*(x.repeat(1, 1, 64, 1) for x in small()), SPARSE)
        with pytest.raises(UserError, match="no C\\+\\+ compiler"):
            attention(*small(), SPARSE, backend="cpp")
    finally:
        cpp.library.cache_clear()
    assert torch.allclose(result, expected, rtol=0, atol=2e-6)  # float32 sums in another order
    assert bool(large.isfinite().all())
    notices = [r.message for r in caplog.records if "no C++ compiler" in r.message]
    assert [("definition" in n, "blocked" in n) for n in notices] == [(True, False), (False, True)]


def test_dropout() -> None:
    q, k, v = small()
    with pytest.raises(UserError, match="dropout"):
        attention(q, k, v, SPARSE, dropout=0.1)
    with pytest.raises(UserError, match="dropout"):
        attention(q, k, v, Pattern("dense"), backend="blocked", dropout=0.1)
    torch.manual_seed(0)
    ones = torch.ones_like(v)
    kept = attention(q, k, ones, Pattern("dense"), dropout=0.5)
    assert not torch.allclose(kept, ones)  # it really drops


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 8, 4), (2, 8, 4), (2, 8, 4)), "takes q, k, v of shape"),
        (((1, 2, 8, 4), (1, 2, 8, 4), (1, 2, 9, 4)), "k and v of equal shape"),
        (((1, 2, 8, 4), (1, 2, 9, 4), (1, 2, 9, 4)), "differ in batch, length or head_dim"),
        (((1, 3, 8, 4), (1, 2, 8, 4), (1, 2, 8, 4)), "cannot share"),
    ],
)
def test_shapes_that_do_not_fit(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        attention(*(torch.zeros(s) for s in shapes))


def test_types_that_do_not_fit() -> None:
    q, k, v = small()
    with pytest.raises(UserError, match="share dtype"):
        attention(q, k, v.double())
    with pytest.raises(UserError, match="floating-point"):
        attention(q.int(), k.int(), v.int())


@pytest.mark.parametrize("backend", ["definition", "blocked"])
def test_autocast_does_not_round_what_is_computed_in_float32(backend: str) -> None:
    def gradient(autocast: bool) -> torch.Tensor:
        q, k, v = (x.mul(6).bfloat16().requires_grad_() for x in small())
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = attention(q, k, v, SPARSE, backend=backend)
        out.float().square().sum().backward()
        assert q.grad is not None
        return q.grad

    assert torch.equal(gradient(True), gradient(False))


def test_autocast_makes_dtypes_alike_as_torchs_attention_does() -> None:
    q, k, v = small()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = attention(q, k, v.bfloat16(), SPARSE)
    assert torch.equal(mixed, attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), SPARSE))
