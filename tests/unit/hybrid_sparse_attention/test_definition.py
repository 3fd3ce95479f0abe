"""The definition itself, against a loop over pairs that follows the formula to the letter."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from mst_scale.hybrid_sparse_attention import Pattern, attention
from tests.support.attention_oracle import inputs


@pytest.mark.parametrize("pattern", [Pattern("dense"), Pattern("strided", 3), Pattern("fixed", 3)])
@pytest.mark.parametrize("causal", [True, False])
def test_loops(pattern: Pattern, causal: bool) -> None:
    q, k, v, _ = inputs((1, 2, 8, 4), 1, torch.float64)
    out = attention(q, k, v, pattern, causal, "definition")
    for h in range(2):
        for i in range(8):
            keys = [j for j in range(8) if pattern.allows(torch.tensor(i), torch.tensor(j), causal)]
            weights = [math.exp(float(q[0, h, i] @ k[0, 0, j]) / 2.0) for j in keys]  # √head_dim = 2
            expected = sum(w * v[0, 0, j] for w, j in zip(weights, keys, strict=True)) / sum(weights)
            assert torch.allclose(out[0, h, i], expected, rtol=0, atol=1e-14)  # 8 terms of order one in float64


@pytest.mark.parametrize("causal", [True, False])
def test_dense_is_torchs_attention(causal: bool) -> None:
    q, k, v, _ = inputs((2, 3, 17, 8), 3, torch.float64)
    torch_says = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert torch.allclose(attention(q, k, v, Pattern(), causal, "definition"), torch_says, rtol=0, atol=1e-14)
