from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention import Pattern, SelfAttention, set_pattern

PATTERNS = (Pattern("strided", 8), Pattern("dense"), Pattern("fixed", 8), Pattern("strided", 16))


def layer(pattern: Pattern = PATTERNS[0], **options: bool | float) -> SelfAttention:
    torch.manual_seed(0)
    return SelfAttention(32, 4, pattern=pattern, **options)  # type: ignore[arg-type]


def gradients(model: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = forward(x)
    out.square().sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def batch(length: int = 37) -> torch.Tensor:
    return torch.randn(2, length, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_projection_attention_projection(bias: bool, causal: bool) -> None:
    """Written out with torch alone; rows of qkv are q, k, v, each by head, as GPT-2's c_attn has its columns."""
    module, x = layer(bias=bias, causal=causal), batch()
    q, k, v = F.linear(x, module.qkv.weight, module.qkv.bias).split(32, dim=-1)
    q, k, v = (t.reshape(2, 37, 4, 8).transpose(1, 2) for t in (q, k, v))
    mask = PATTERNS[0].mask(37, causal)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(2, 37, 32)
    expected = F.linear(out, module.proj.weight, module.proj.bias)
    assert torch.allclose(module(x), expected, rtol=0, atol=2e-6)  # float32, values of order one
    assert (module.qkv.bias is not None) == bias


def test_sparse_and_dense_have_the_same_parameters() -> None:
    """A checkpoint of the sparse phase loads into the dense one."""
    names = {name: tuple(p.shape) for name, p in layer().named_parameters()}
    assert names == {"qkv.weight": (96, 32), "proj.weight": (32, 32)}
    layer(Pattern("dense")).load_state_dict(layer().state_dict())


def test_set_pattern_reaches_every_layer() -> None:
    model = nn.Sequential(layer(), nn.Linear(32, 32), nn.Sequential(layer()))
    assert set_pattern(model, Pattern("dense")) == 2
    assert [m.pattern for m in model.modules() if isinstance(m, SelfAttention)] == [Pattern("dense")] * 2


def test_switching_equals_building_again() -> None:
    module, x = layer(), batch()
    for pattern in (*PATTERNS, *PATTERNS):
        set_pattern(module, pattern)
        fresh = copy.deepcopy(layer(pattern))
        for a, b in zip(gradients(module, module, x), gradients(fresh, fresh, x), strict=True):
            assert torch.equal(a, b)


def test_compiled_module_follows_the_pattern() -> None:
    """No graph breaks (fullgraph), the pattern of the moment, and no compilation for a pattern seen before."""
    torch._dynamo.reset()
    compilations: list[int] = []

    def compiler(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable[..., object]:
        from torch._dynamo.backends.debugging import aot_eager

        compilations.append(len(graph.graph.nodes))
        return aot_eager(graph, example)  # the graph that any compiler gets, without its code generation

    module, x = layer(), batch()
    compiled = torch.compile(module, backend=compiler, fullgraph=True)
    for _ in range(2):
        for pattern in PATTERNS:
            set_pattern(module, pattern)
            for a, b in zip(gradients(module, compiled, x), gradients(module, module, x), strict=True):
                assert torch.allclose(a, b, rtol=0, atol=1e-5)  # the same kernels; sums of squares up to 100
    assert len(compilations) == len(PATTERNS)


def test_compiled_with_changing_lengths() -> None:
    torch._dynamo.reset()
    module = layer()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (40, 37, 64):
        assert torch.allclose(compiled(batch(length)), module(batch(length)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_follows_the_pattern(reentrant: bool) -> None:
    module, x = layer(), batch()
    for pattern in (*PATTERNS, PATTERNS[0]):
        set_pattern(module, pattern)
        again = gradients(module, lambda t: checkpoint(module, t, use_reentrant=reentrant), x)
        for a, b in zip(again, gradients(module, module, x), strict=True):
            assert torch.equal(a, b)


def test_autocast() -> None:
    module, x = layer(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(
        out.float(), module(x), rtol=0, atol=2**-5
    )  # values of order one through 3 bfloat16 roundings


def test_dropout_only_where_dense() -> None:
    module, x = layer(Pattern("dense"), dropout=0.5), batch()
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    module.pattern = Pattern("strided", 8)
    module(x)  # nothing is dropped in evaluation
    module.train()
    with pytest.raises(UserError, match="dropout"):
        module(x)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(UserError, match="multiple of n_head"):
        SelfAttention(32, 5)


def test_a_batch_may_be_empty() -> None:
    model = layer()
    out = model(torch.zeros(0, 8, 32, requires_grad=True))
    out.sum().backward()
    assert out.shape == (0, 8, 32)
