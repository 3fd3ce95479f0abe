"""The models, which have the architectures of GPT-2 and BERT, and their loss.

gpt              the GPT, with the norm (torch's or apex's), MLP and recomputation that both models use
bert             BERT
pipelined_gpt    the GPT in pipeline stages
initial_weights  how weights are drawn
cross_entropy    the loss, with little memory
"""

import torch
from torch import nn

from mst_scale.config.blocks import ModelConfig
from mst_scale.models import bert, gpt
from mst_scale.models.bert import BERT
from mst_scale.models.gpt import GPT
from mst_scale.tensor_parallel import TensorGroup

__all__ = ["BERT", "GPT", "blocks_of", "build", "shapes_of"]


def build(config: ModelConfig, tensor: TensorGroup | None = None) -> nn.Module:
    """Build the model of a config, with weights drawn from torch's seed; with `tensor`, this rank's slice of it."""
    return BERT(config, tensor) if config.arch == "bert" else GPT(config, tensor)


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters by name, without memory for its weights."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in build(config).named_parameters()}


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of one of our models, or of a stage of it."""
    return [module for module in model.modules() if isinstance(module, gpt.Block | bert.Block)]
