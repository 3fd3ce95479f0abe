import logging
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from mst_scale.models import gpt
from mst_scale.models.gpt import LayerNorm, apex_kernel


@pytest.fixture(autouse=True)
def ask_again():
    apex_kernel.cache_clear()
    yield
    apex_kernel.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, kernel: object) -> None:
    """NVIDIA's apex as far as we look at it: the compiled half, and the module with the function."""
    module = types.ModuleType("apex.normalization.fused_layer_norm")
    module.fused_layer_norm_affine = kernel
    packages = {"apex": types.ModuleType("apex"), "apex.normalization": types.ModuleType("apex.normalization")}
    for name, value in {**packages, module.__name__: module, "fused_layer_norm_cuda": object()}.items():
        monkeypatch.setitem(sys.modules, name, value)


@pytest.mark.parametrize("bias", [True, False])
def test_it_is_layer_normalisation(bias: bool):
    x = torch.randn(4, 3, 16, dtype=torch.float64)
    norm = LayerNorm(16, bias=bias).double()
    torch.nn.init.normal_(norm.weight)
    if bias:
        torch.nn.init.normal_(norm.bias)
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    y = (x - mean) / (variance + 1e-5).sqrt() * norm.weight + (norm.bias if bias else 0)
    torch.testing.assert_close(norm(x), y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_are_float32_for_any_input(dtype: torch.dtype):
    """Far from zero: sums of 1024 values around 100 would lose everything in 8 or 11 bits."""
    x = (100 + torch.randn(8, 1024)).to(dtype)
    y = LayerNorm(1024, bias=False).to(dtype)(x)
    exact = F.layer_norm(x.float(), (1024,))
    torch.testing.assert_close(y, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-4)  # one rounding, the result's


def test_torch_is_used_where_apex_is_missing_and_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "fused_layer_norm_cuda", None)  # as if it were not installed
    with caplog.at_level(logging.INFO, logger="mst_scale"):
        norms = [LayerNorm(4, bias=True) for _ in range(3)]
    (said,) = [r.message for r in caplog.records if "LayerNorm" in r.message]
    assert "not installed" in said
    assert all(norm.kernel is None for norm in norms) and "kernel=torch" in repr(norms[0])


def test_the_unrelated_apex_is_not_taken_for_nvidias(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "fused_layer_norm_cuda", object())
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))  # a module: it has no `normalization` below it
    monkeypatch.delitem(sys.modules, "apex.normalization", raising=False)
    with caplog.at_level(logging.INFO, logger="mst_scale"):
        assert LayerNorm(4, bias=False).kernel is None
    assert "not installed" in caplog.text


@pytest.mark.parametrize("bias", [True, False])
def test_apex_computes_cuda_tensors_where_it_is(
    bias: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    calls = []

    def kernel(x, weight, bias, shape, eps):
        calls.append((weight, bias))
        return F.layer_norm(x, shape, weight, bias, eps)

    install(monkeypatch, kernel)
    with caplog.at_level(logging.INFO, logger="mst_scale"):
        norm = LayerNorm(16, bias=bias)
        LayerNorm(16, bias=bias)
    (said,) = [r.message for r in caplog.records if "LayerNorm" in r.message]
    assert "apex" in said and "torch" in said

    x = torch.randn(5, 16)
    on_cpu = norm(x)
    assert not calls, "a tensor on the CPU takes torch's kernel"
    on_cuda = norm(x.as_subclass(LooksLikeCuda)).as_subclass(torch.Tensor)
    assert len(calls) == 1 and calls[0][0] is norm.weight
    assert calls[0][1] is norm.bias if bias else calls[0][1].eq(0).all()
    torch.testing.assert_close(on_cuda, on_cpu)


class LooksLikeCuda(torch.Tensor):
    is_cuda = True


def test_module_name_marks_it_as_a_norm():
    """Targets of sparsity leave norms out by class name."""
    assert "norm" in gpt.LayerNorm.__name__.lower()
