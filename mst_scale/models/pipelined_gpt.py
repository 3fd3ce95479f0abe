"""The GPT as DeepSpeed's pipeline runs it: stages of whole blocks, one after the other.

    wte · wpe · block 0 … block n-1 · ln_f · head          cut between blocks, as evenly as their number allows

A rank holds the layers of its stage, and of each of them its slice where `mesh` cuts layers too. A tied head is the
token embedding once more, on the last stage: DeepSpeed adds up the two stages' gradients, and its norms count one.
Parameters lie under DeepSpeed's names; `logical_names` says which of the GPT's each is.
"""

from __future__ import annotations

import contextlib
import io

import deepspeed.comm as ds_comm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

from mst_scale.config.blocks import ModelConfig
from mst_scale.config.parallel import check_divisible
from mst_scale.distributed import Mesh, logger
from mst_scale.models.cross_entropy import cross_entropy
from mst_scale.models.gpt import Block, Product, first_std
from mst_scale.models.initial_weights import draw_seed, initialise
from mst_scale.models.layer_norm import LayerNorm
from mst_scale.tensor_parallel import TensorGroup

BEFORE = 2  # layers in front of the first block


class TokenEmbedding(nn.Embedding):
    """The token embedding, which a tied head multiplies with."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self.head_product: Product = F.linear  # mst_scale.sparse_linear puts its own here

    def head(self, x: torch.Tensor) -> torch.Tensor:
        return self.head_product(x, self.weight)

    def get_output_embeddings(self) -> nn.Module:
        """As the GPT's: the module whose weight `head_product` multiplies with."""
        return self


class PositionEmbedding(nn.Embedding):
    """Adds its position's vector to each token's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(torch.arange(x.shape[1], device=x.device))


class PipelinedGPT(PipelineModule):
    def __init__(self, config: ModelConfig, mesh: Mesh) -> None:
        check_divisible(config, mesh.sizes)
        if not ds_comm.is_initialized():
            ds_comm.init_distributed(dist_init_required=False, verbose=False)  # adopts torch's process group
        seed = _agreed(draw_seed())
        tensor = TensorGroup.of(mesh)
        said = io.StringIO()  # stdout may be JSON: no place for a list of layers
        with contextlib.redirect_stdout(said):
            super().__init__(
                _layers(config, tensor),
                topology=PipeModelDataParallelTopology(mesh.sizes.pipeline, mesh.sizes.tensor, mesh.data),
                loss_fn=cross_entropy,
                partition_method=f"type:{Block.__name__}",
                activation_checkpoint_interval=int(config.activation_checkpointing),
                checkpointable_layers=[Block.__name__],
            )
        logger.debug("%s", said.getvalue())
        self.config = config
        initialise(self, seed, first_std(config), self.logical_name)
        self.logical_names = {name: self.logical_name(name) for name, _ in self.named_parameters()}
        """What a parameter of this rank is called in the whole GPT."""

    def get_output_embeddings(self) -> nn.Module | None:
        """As the GPT's: the module whose weight the head multiplies with, on a stage that has it; else None.

        A tied head is the token embedding of the first stage, too.
        """
        if self.config.tied_head:
            return dict(self.tied_modules.items()).get("wte")
        return next((module for module in self.children() if type(module) is nn.Linear), None)

    def logical_name(self, name: str) -> str:
        """The GPT's name of a module or parameter called `tied_modules.<key>.…` or `<number of the layer>.…` here."""
        first, _, rest = name.removeprefix("tied_modules.").partition(".")
        if not first.isdigit():
            return ".".join(filter(None, (first, rest)))
        block, n_layer = int(first) - BEFORE, self.config.n_layer
        around = {-2: "wte", -1: "wpe", n_layer: "ln_f", n_layer + 1: "lm_head"}
        return ".".join(filter(None, (around.get(block, f"blocks.{block}"), rest)))


def _layers(config: ModelConfig, tensor: TensorGroup | None) -> list[LayerSpec]:
    d, rows, tied = config.n_embd, config.padded_vocab, config.tied_head
    return [
        TiedLayerSpec("wte", TokenEmbedding, rows, d) if tied else LayerSpec(TokenEmbedding, rows, d),
        LayerSpec(PositionEmbedding, config.seq_length, d),
        *(LayerSpec(Block, config, tensor) for _ in range(config.n_layer)),
        LayerSpec(LayerNorm, d, bias=config.bias),
        TiedLayerSpec("wte", TokenEmbedding, rows, d, forward_fn=TokenEmbedding.head)
        if tied
        else LayerSpec(nn.Linear, d, rows, bias=False),
    ]


def _agreed(seed: int) -> int:
    """The first rank's: a stage alone could not tell that the others have drawn from another."""
    box = [seed]
    dist.broadcast_object_list(box, src=0)
    return box[0]
