"""What is the network that we pretrain?

GPT-2 (Radford et al. 2019): token and position embeddings, `n_layer` pre-norm blocks, a final norm, and a head that
is the token embedding again (tied) or a matrix of its own.

    x ← wte[tokens] + wpe[0…T-1]
    x ← x + attention(ln_1(x));   x ← x + mlp(ln_2(x))        for each block
    logits = ln_f(x) Wᵀ,  W = wte.weight or lm_head.weight    (padded_vocab rows)

The model knows nothing about ranks, ZeRO or sparsity. What is exchangeable has one seam each: attention is
`SelfAttention`, the norm `LayerNorm`, the loss `cross_entropy`, the head `GPT.head`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from mst_scale.config.blocks import ModelConfig
from mst_scale.hybrid_sparse_attention import SelfAttention
from mst_scale.models.cross_entropy import cross_entropy
from mst_scale.models.layer_norm import LayerNorm
from mst_scale.randomness import counter_hash

INIT_STD = 0.02
INIT_CHUNK = 1 << 22  # values drawn at once: 16 MiB of float32 beside the weight, however large the weight is


class MLP(nn.Module):
    def __init__(self, n_embd: int, d_ffw: int, *, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(n_embd, d_ffw, bias=bias)
        self.down = nn.Linear(d_ffw, n_embd, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))  # tanh: GPT-2's own GELU, "gelu_new"


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias)
        self.attention = SelfAttention(config.n_embd, config.n_head, bias=config.bias, dropout=config.dropout)
        self.ln_2 = LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config.n_embd, config.ffw, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.ln_1(x)))
        return x + self.dropout(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.arch != "gpt":
            raise ValueError(f"this is the GPT, and model.arch is {config.arch!r}")
        self.config = config
        # One draw from the global generator, before any layer draws its own default values: the weights depend on
        # torch.manual_seed, not on which layers there are, which device they are on or how ZeRO cuts them.
        seed = int(torch.randint(2**62, (), device="cpu"))
        self.wte = nn.Embedding(config.padded_vocab, config.n_embd)
        self.wpe = nn.Embedding(config.context, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd, bias=config.bias)
        self.lm_head = None if config.tied_head else nn.Linear(config.n_embd, config.padded_vocab, bias=False)
        self._initialise(seed)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (batch, length, padded_vocab) of `tokens` (batch, length); with `targets`, the mean loss in float32.

        `targets[b, t]` is the token that follows `tokens[b, t]`; positions with target -1 do not count.
        """
        length = tokens.shape[-1]
        if length > self.config.context:
            raise ValueError(
                f"a sequence of {length} tokens does not fit model.context = {self.config.context}: "
                "cut it, or train with a larger model.context"
            )
        x = self.dropout(self.wte(tokens) + self.wpe(torch.arange(length, device=tokens.device)))
        for block in self.blocks:
            x = self._checkpointed(block, x) if self._recomputes() else block(x)
        logits = self.head(self.ln_f(x))
        return logits if targets is None else cross_entropy(logits, targets)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.wte.weight) if self.lm_head is None else self.lm_head(x)

    def get_output_embeddings(self) -> nn.Module:
        """The module whose weight the head multiplies with (Hugging Face's name for it): a tied head's is `wte`."""
        return self.wte if self.lm_head is None else self.lm_head

    def _recomputes(self) -> bool:
        return self.config.activation_checkpointing and self.training and torch.is_grad_enabled()

    @staticmethod
    def _checkpointed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Keep the block's input only and compute the rest again in the backward pass, as DeepSpeed is configured to.

        Saves all of a block's activations but 2·batch·length·n_embd bytes (bf16), for one more forward pass. It works
        unconfigured; `deepspeed.checkpointing.configure` adds partitioning and offload to the CPU.
        """
        from deepspeed import checkpointing  # seconds to import, so only where it is used

        return checkpointing.checkpoint(block, x)

    def _initialise(self, seed: int) -> None:
        """N(0, 0.02) for matrices and embeddings, smaller where a block writes into the residual stream, zero biases.

        `Module.apply` is the one hook that `deepspeed.zero.Init` understands: it gathers one module's parameters at a
        time around the call, so no process ever holds the whole model.
        """
        names = {module: name for name, module in self.named_modules()}
        residual_std = INIT_STD / math.sqrt(2 * self.config.n_layer)  # 2 additions per block keep the variance

        def initialise(module: nn.Module) -> None:
            if not isinstance(module, (nn.Linear, nn.Embedding)):
                return
            name = names[module]
            std = residual_std if name.endswith(("attention.proj", "mlp.down")) else INIT_STD
            _fill_normal(module.weight, std, counter_hash(seed, name))
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

        self.apply(initialise)


@torch.no_grad()
def _fill_normal(weight: torch.Tensor, std: float, seed: int) -> None:
    """The same values for any device and dtype (rounded): drawn on the CPU in float32, piece by piece."""
    if weight.is_meta:
        return
    if weight.numel() == 0:
        raise ValueError(
            "the parameters are partitioned before GPT could initialise them: "
            'set "override_module_apply": true under "zero_optimization"'
        )
    for number, piece in enumerate(weight.view(-1).split(INIT_CHUNK)):
        generator = torch.Generator().manual_seed(counter_hash(seed, number))
        # torch.normal, because zero.Init turns what torch.empty returns into its own dtype
        piece.copy_(torch.normal(0.0, std, (piece.numel(),), generator=generator, dtype=torch.float32, device="cpu"))
