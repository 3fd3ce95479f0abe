"""The models: GPT-2's architecture and BERT's, and their loss.

gpt, bert        one module each; pipelined_gpt: the GPT in stages
initial_weights  what they begin with
layer_norm       torch's or apex's
cross_entropy    the loss, with little memory
recompute        a block computed again in backward
"""

from torch import nn

from mst_scale.config.blocks import ModelConfig
from mst_scale.models.bert import BERT
from mst_scale.models.gpt import GPT
from mst_scale.tensor_parallel import TensorGroup

__all__ = ["BERT", "GPT", "build"]


def build(config: ModelConfig, tensor: TensorGroup | None = None) -> nn.Module:
    """The model that a config describes, with weights from torch's seed; with `tensor`, this rank's slice of it."""
    return BERT(config, tensor) if config.arch == "bert" else GPT(config, tensor)
