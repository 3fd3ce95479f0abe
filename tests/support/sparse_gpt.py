"""A small GPT with random weights, some of which are zero."""

from __future__ import annotations

from typing import Any

import torch

from mst_scale.compact_files.weights import ModelWeights
from mst_scale.config import ModelConfig
from mst_scale.hybrid_sparse_attention import Pattern, set_pattern
from mst_scale.models import GPT

DENSE = Pattern("dense")
SHAPE: dict[str, Any] = {"n_layer": 2, "n_head": 4, "n_embd": 32, "seq_length": 48, "vocab_size": 70, "init_std": 0.2}


def sparse_gpt(sparsity: float, pattern: Pattern = DENSE, *, head: bool = True, **shape: Any) -> GPT:
    """Every matrix but the position embedding (and the head's, without `head`) has this share of zeros."""
    torch.manual_seed(3)
    model = GPT(ModelConfig(**{**SHAPE, **shape})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
            elif name != "wpe.weight" and (head or name != "wte.weight"):
                parameter.mul_(torch.rand(parameter.shape) >= sparsity)
    set_pattern(model, pattern)
    return model


def weights_of(model: GPT, pattern: Pattern = DENSE) -> ModelWeights:
    """The weights as they would be read from a file."""
    from pathlib import Path

    state = {name: p.detach() for name, p in model.named_parameters()}
    return ModelWeights(Path("model"), model.config, tuple(state), state.__getitem__, None, None, None, pattern)
