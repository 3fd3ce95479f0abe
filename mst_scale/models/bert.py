"""Implements BERT for masked-language-model pretraining, with post-norm blocks and a transformed head.

    x ← ln_e(wte[tokens] + wpe[0…T-1] + wtt[types])
    x ← ln_1(x + attention(x));   x ← ln_2(x + mlp(x))         for each block; attention sees both sides
    logits = ln_h(gelu(transform(x))) Wᵀ + head_bias,  W = wte.weight or lm_head.weight     (padded_vocab rows)

Attention, MLP, norm and loss are the GPT's modules, so sparse attention and sparse weights work in the same way. There
is no next-sentence objective and no padding: sequences are full windows of a token file (data/masking.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from mst_scale.config.blocks import ModelConfig
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention import SelfAttention, SequenceShard
from mst_scale.models.cross_entropy import IGNORE, cross_entropy
from mst_scale.models.gpt import MLP, LayerNorm, run_block
from mst_scale.models.initial_weights import draw_seed, initialize
from mst_scale.tensor_parallel import TensorGroup, check_no_dropout

EPS = 1e-12  # of BERT's norms; a normal number in float32, in which statistics are computed
TOKEN_TYPES = 2  # first and second text; pretraining here uses only the first


class Block(nn.Module):
    """A post-norm block: attention and an MLP, each added to its input and then normalized."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup | None = None) -> None:
        super().__init__()
        d, bias = config.n_embd, config.bias
        self.attention = SelfAttention(d, config.n_head, bias=bias, dropout=config.dropout, causal=False, tensor=tensor)
        self.ln_1 = LayerNorm(d, bias=bias, eps=EPS)
        self.mlp = MLP(d, config.ffw, bias=bias, gelu="none", tensor=tensor)  # the exact GELU
        self.ln_2 = LayerNorm(d, bias=bias, eps=EPS)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.ln_1(x + self.dropout(self.attention(x)))
        return self.ln_2(x + self.dropout(self.mlp(x)))


class BERT(nn.Module):
    """A BERT of the given config; with `tensor`, this rank's slice of it."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup | None = None) -> None:
        super().__init__()
        if config.arch != "bert":
            raise UserError(f"model.arch is {config.arch!r}, and BERT needs 'bert': use mst_scale.models.build")
        self.config = config
        self.part = SequenceShard()  # the whole sequence, unless `sequence_parallel` replaces it
        seed, d = draw_seed(), config.n_embd
        if tensor is not None:
            check_no_dropout(config.dropout)
            seed = tensor.agreed(seed)
        self.wte = nn.Embedding(config.padded_vocab, d)
        self.wpe = nn.Embedding(config.seq_length, d)
        self.wtt = nn.Embedding(TOKEN_TYPES, d)
        self.ln_e = LayerNorm(d, bias=config.bias, eps=EPS)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, tensor) for _ in range(config.n_layer))
        self.transform = nn.Linear(d, d, bias=config.bias)
        self.ln_h = LayerNorm(d, bias=config.bias, eps=EPS)
        self.lm_head = None if config.tied_head else nn.Linear(d, config.padded_vocab, bias=False)
        self.head_bias = nn.Parameter(torch.zeros(config.padded_vocab)) if config.bias else None
        self.head_product: Callable[..., torch.Tensor] = F.linear  # sparse_linear replaces it
        initialize(self, seed, lambda name: config.init_std)

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor | None = None, types: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits (batch, length, padded_vocab), or with `targets` the mean loss in float32.

        `targets[b, t]` is the token at `tokens[b, t]` before masking; positions with target -1 are ignored, and the
        head does not compute them. `types` (batch, length) are 0 or 1, by default 0.
        """
        positions = self.part.positions(tokens, self.config.seq_length)
        x = self.wte(tokens) + self.wpe(positions) + self.wtt(torch.zeros_like(tokens) if types is None else types)
        x = self.dropout(self.ln_e(x))
        for block in self.blocks:
            x = run_block(block, x, recompute=self.config.activation_checkpointing)
        if targets is None:
            return self.head(x)
        counted = targets != IGNORE
        share = cross_entropy(self.head(x[counted]), targets[counted], self.part.count(counted))
        return self.part.mean(share)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the last block's output."""
        x = self.ln_h(F.gelu(self.transform(x)))
        weight = self.wte.weight if self.lm_head is None else self.lm_head.weight
        return self.head_product(x, weight, self.head_bias)

    def get_output_embeddings(self) -> nn.Module:
        """Return the module whose weight the head multiplies by (`wte` for a tied head), as in transformers."""
        return self.wte if self.lm_head is None else self.lm_head
