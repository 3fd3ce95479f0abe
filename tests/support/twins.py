"""Our GPT and BERT, and the same networks of Hugging Face with the same shapes."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from mst_scale.config import ModelConfig
from mst_scale.hugging_face import names
from mst_scale.models import BERT, GPT

SHAPE: dict[str, Any] = {"n_layer": 3, "n_head": 4, "n_embd": 64, "d_ff": 160, "seq_length": 32, "vocab_size": 101}


@dataclass(frozen=True)
class Twins:
    ours: type[torch.nn.Module]
    small: ModelConfig
    names: ModuleType  # which tensor is which

    def theirs(self, config: ModelConfig) -> Any:
        import transformers

        about = self.names.hugging_face_config(config)
        (kind,) = about["architectures"]
        return getattr(transformers, kind)(getattr(transformers, kind).config_class(**about)).eval()


GPT2 = Twins(GPT, ModelConfig(**SHAPE, bias=True), names)
MASKED = Twins(BERT, ModelConfig(**SHAPE, arch="bert", bias=True), names)


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """Weights large enough that a wrong transpose, bias or norm shows in the logits."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model


def x() -> torch.Tensor:
    return torch.randint(0, 101, (2, 32), generator=torch.Generator().manual_seed(1))
