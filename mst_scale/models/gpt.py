"""The GPT that is pretrained: GPT-2's architecture.

Radford et al. 2019: token and position embeddings, `n_layer` pre-norm blocks, a final norm, and a head that
is the token embedding again (tied) or a matrix of its own.

    x ← wte[tokens] + wpe[0…T-1]
    x ← x + attention(ln_1(x));   x ← x + mlp(ln_2(x))        for each block
    logits = ln_f(x) Wᵀ,  W = wte.weight or lm_head.weight    (padded_vocab rows)

The model knows nothing about ZeRO or sparsity, and two things of ranks: `tensor`, where it is given, cuts the matrices
of its blocks (embeddings, norms and head are whole on every rank), and `part` says where its tokens stand in their
sequences, if these are cut. What is exchangeable has one seam each: attention is `SelfAttention`, the norm `LayerNorm`,
the loss `cross_entropy`, the head `GPT.head`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from mst_scale.config.blocks import ModelConfig
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention import Part, SelfAttention
from mst_scale.models.cross_entropy import IGNORE, cross_entropy
from mst_scale.models.initial_weights import draw_seed, initialise
from mst_scale.models.layer_norm import LayerNorm
from mst_scale.models.recompute import run_block
from mst_scale.tensor_parallel import TensorGroup, check_no_dropout, column_linear, row_linear

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor | None]


class MLP(nn.Module):
    def __init__(
        self, n_embd: int, d_ffw: int, *, bias: bool, gelu: str = "tanh", tensor: TensorGroup | None = None
    ) -> None:
        super().__init__()
        self.gelu = gelu  # tanh: GPT-2's own, "gelu_new"; none: the exact one
        self.up = column_linear(n_embd, d_ffw, bias=bias, tensor=tensor, what="model.d_ffw")
        self.down = row_linear(d_ffw, n_embd, bias=bias, tensor=tensor, what="model.d_ffw")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.gelu))

    def chained(self) -> tuple[nn.Linear, nn.Linear, int, int]:
        """Two layers between which neurons stay apart (sparse_linear.narrow), in one stretch and one group."""
        return self.up, self.down, 1, 1


class Block(nn.Module):
    def __init__(self, config: ModelConfig, tensor: TensorGroup | None = None) -> None:
        super().__init__()
        d, bias = config.n_embd, config.bias
        self.ln_1 = LayerNorm(d, bias=bias)
        self.attention = SelfAttention(d, config.n_head, bias=bias, dropout=config.dropout, tensor=tensor)
        self.ln_2 = LayerNorm(d, bias=bias)
        self.mlp = MLP(d, config.ffw, bias=bias, tensor=tensor)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.ln_1(x)))
        return x + self.dropout(self.mlp(self.ln_2(x)))


def first_std(config: ModelConfig) -> Callable[[str], float]:
    """The deviation of a module's first weights by its name."""
    residual = config.init_std / math.sqrt(2 * config.n_layer)  # 2 additions per block keep the variance
    return lambda name: residual if name.endswith(("attention.proj", "mlp.down")) else config.init_std


class GPT(nn.Module):
    def __init__(self, config: ModelConfig, tensor: TensorGroup | None = None) -> None:
        super().__init__()
        if config.arch != "gpt":
            raise UserError(f"this is the GPT, and model.arch is {config.arch!r}")
        self.config = config
        self.part = Part()  # the whole sequence, until `sequence_parallel` says otherwise
        seed = draw_seed()
        if tensor is not None:
            check_no_dropout(config.dropout)
            seed = tensor.agreed(seed)
        self.wte = nn.Embedding(config.padded_vocab, config.n_embd)
        self.wpe = nn.Embedding(config.context, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, tensor) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd, bias=config.bias)
        # mst_scale.sparse_linear puts its own here: the product with a tied weight; head and loss at once, if it can
        self.head_product: Product = F.linear
        self.head_loss: Loss | None = None
        self.lm_head = None if config.tied_head else nn.Linear(config.n_embd, config.padded_vocab, bias=False)
        initialise(self, seed, first_std(config))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (batch, length, padded_vocab) of `tokens` (batch, length); with `targets`, the mean loss in float32.

        `targets[b, t]` is the token that follows `tokens[b, t]`; positions with target -1 do not count. Where sequences
        are cut over ranks, `tokens`, `targets` and logits are of this rank's part, the loss is of whole sequences.
        """
        x = self.dropout(self.wte(tokens) + self.wpe(self.part.positions(tokens, self.config.context)))
        for block in self.blocks:
            x = run_block(block, x, recompute=self.config.activation_checkpointing)
        x = self.ln_f(x)
        return self.head(x) if targets is None else self.part.mean(self.share_of_loss(x, targets))

    def share_of_loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        count = self.part.count(targets != IGNORE)
        if self.head_loss is not None and self.lm_head is None:
            loss = self.head_loss(x, self.wte.weight, targets, count)
            if loss is not None:
                return loss
        return cross_entropy(self.head(x), targets, count)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        return self.head_product(x, self.wte.weight) if self.lm_head is None else self.lm_head(x)

    def get_output_embeddings(self) -> nn.Module:
        """The module whose weight the head multiplies with (Hugging Face's name for it): a tied head's is `wte`."""
        return self.wte if self.lm_head is None else self.lm_head
