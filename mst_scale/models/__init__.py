"""The models: GPT-2's architecture and BERT's, their loss, and their names in the Hugging Face world."""

from torch import nn

from mst_scale.config.blocks import ModelConfig
from mst_scale.models.bert import BERT
from mst_scale.models.gpt import GPT

__all__ = ["BERT", "GPT", "build"]


def build(config: ModelConfig) -> nn.Module:
    """The model that a config describes, with weights from torch's seed."""
    return BERT(config) if config.arch == "bert" else GPT(config)
