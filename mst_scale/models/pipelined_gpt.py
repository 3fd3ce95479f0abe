"""Implements the GPT as a DeepSpeed pipeline, whose stages consist of whole blocks.

    wte · wpe · block 0 … block n-1 · ln_f · head          split between blocks, as evenly as their number allows

A rank holds the layers of its stage, or its slices of them under tensor parallelism. A tied head is a second copy of
the token embedding on the last stage: DeepSpeed sums the gradients of the two stages and counts one of them in norms.
Parameters have DeepSpeed's names; `logical_names` maps them to the GPT's.
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

from mst_scale.comm import Mesh, logger
from mst_scale.config.blocks import ModelConfig
from mst_scale.config.parallel import check_divisible
from mst_scale.errors import UserError
from mst_scale.models.cross_entropy import cross_entropy
from mst_scale.models.gpt import GPT, Block, LayerNorm, Product, first_std
from mst_scale.models.initial_weights import draw_seed, initialize
from mst_scale.tensor_parallel import TensorGroup

BEFORE = 2  # layers before the first block


class TokenEmbedding(nn.Embedding):
    """The token embedding; a tied head multiplies by its weight."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self.head_product: Product = F.linear  # sparse_linear replaces it

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of normalized states."""
        return self.head_product(x, self.weight)

    def get_output_embeddings(self) -> nn.Module:
        """Return the module whose weight `head_product` multiplies by."""
        return self


class PositionEmbedding(nn.Embedding):
    """Adds the embedding of its position to each token's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > self.num_embeddings:
            raise UserError(f"a sequence of {x.shape[1]} tokens does not fit model.seq_length = {self.num_embeddings}")
        return x + super().forward(torch.arange(x.shape[1], device=x.device))


class PipelinedGPT(PipelineModule):
    """This rank's stage of a GPT.

    Raises:
        UserError: if the config cannot be split over `mesh`.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh) -> None:
        check_divisible(config, mesh.sizes)
        if not ds_comm.is_initialized():
            ds_comm.init_distributed(dist_init_required=False, verbose=False)  # adopts torch's process group
        seed = _agreed(draw_seed())
        tensor = TensorGroup.of(mesh)
        printed = io.StringIO()  # DeepSpeed prints a list of layers, and stdout may be JSON
        with contextlib.redirect_stdout(printed):
            super().__init__(
                _layers(config, tensor),
                topology=PipeModelDataParallelTopology(mesh.sizes.pipeline, mesh.sizes.tensor, mesh.data),
                loss_fn=cross_entropy,
                partition_method=f"type:{Block.__name__}",
                activation_checkpoint_interval=int(config.activation_checkpointing),
                checkpointable_layers=[Block.__name__],
            )
        logger.debug("%s", printed.getvalue())
        self.config = config
        initialize(self, seed, first_std(config), self.logical_name)
        self.logical_names = {name: self.logical_name(name) for name, _ in self.named_parameters()}
        """The GPT's name of each parameter of this rank."""

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the module whose weight the head multiplies by, or None on a stage without it.

        With a tied head, the first stage has it too, as the token embedding.
        """
        if self.config.tied_head:
            return dict(self.tied_modules.items()).get("wte")
        return next((module for module in self.children() if isinstance(module, nn.Linear)), None)

    def whole_model(self) -> GPT:
        """Return the GPT of which this is a stage, without values."""
        with torch.device("meta"):
            return GPT(self.config)

    def logical_name(self, name: str) -> str:
        """Return the GPT's name of `tied_modules.<key>.…` or `<number of the layer>.…`."""
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
    """Return the seed of the first rank, because stages could otherwise use different ones unnoticed."""
    box = [seed]
    dist.broadcast_object_list(box, src=0)
    return box[0]
