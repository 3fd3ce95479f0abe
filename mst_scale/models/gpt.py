"""Implements the GPT, with GPT-2's architecture (Radford et al. 2019).

Token and position embeddings, `n_layer` pre-norm blocks, a final norm, and a head that is the token embedding again
(tied) or a separate matrix:

    x ← wte[tokens] + wpe[0…T-1]
    x ← x + attention(ln_1(x));   x ← x + mlp(ln_2(x))        for each block
    logits = ln_f(x) Wᵀ,  W = wte.weight or lm_head.weight    (padded_vocab rows)

The model does not depend on ZeRO or sparsity. Two attributes concern ranks: `tensor` splits the matrices of its blocks
(embeddings, norms and head are replicated), and `part` gives the positions of its tokens if sequences are split. Each
replaceable part has one implementation: attention is `SelfAttention`, the norm `LayerNorm`, the loss `cross_entropy`,
the head `GPT.head`.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from mst_scale.config.blocks import ModelConfig
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention import SelfAttention, SequenceShard
from mst_scale.models.cross_entropy import IGNORE, cross_entropy
from mst_scale.models.initial_weights import draw_seed, initialize
from mst_scale.tensor_parallel import TensorGroup, check_no_dropout, column_linear, row_linear

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor | None]
log = logging.getLogger("mst_scale")


@functools.cache
def apex_kernel() -> Callable[..., torch.Tensor] | None:
    """Return the fused LayerNorm of NVIDIA's apex, or None if that is not installed; the choice is logged once.

    The package called `apex` on the public index is unrelated: NVIDIA's is built from source.
    """
    try:
        import fused_layer_norm_cuda  # type: ignore[import-not-found]  # noqa: F401  (the compiled half)
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine
    except ModuleNotFoundError:
        log.info("LayerNorm: torch's kernel (NVIDIA apex, which has a fused one, is not installed)")
        return None
    except Exception as error:  # the unrelated package can fail in any way
        log.info("LayerNorm: torch's kernel (NVIDIA apex cannot be used: %s: %s)", type(error).__name__, error)
        return None
    log.info("LayerNorm: NVIDIA apex's fused kernel on CUDA, torch's elsewhere")
    return fused_layer_norm_affine


class LayerNorm(nn.Module):
    """Normalize over the last dimension, with an optional bias, by apex's kernel if it can run.

    y = (x - mean(x)) / sqrt(var(x) + eps) · weight [+ bias], with statistics in float32 for every dtype of x.
    """

    def __init__(self, width: int, *, bias: bool, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.eps = eps
        self.kernel = apex_kernel()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = self.weight.shape
        if self.kernel is None or not x.is_cuda:
            return F.layer_norm(x, shape, self.weight, self.bias, self.eps)
        bias = torch.zeros_like(self.weight) if self.bias is None else self.bias  # apex always takes a bias
        return self.kernel(x, self.weight, bias, shape, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, bias={self.bias is not None}, kernel={'apex' if self.kernel else 'torch'}"


class MLP(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(
        self, n_embd: int, d_ff: int, *, bias: bool, gelu: str = "tanh", tensor: TensorGroup | None = None
    ) -> None:
        super().__init__()
        self.gelu = gelu  # "tanh": GPT-2's approximation, gelu_new; "none": the exact function
        self.up = column_linear(n_embd, d_ff, bias=bias, tensor=tensor, what="model.d_ff")
        self.down = row_linear(d_ff, n_embd, bias=bias, tensor=tensor, what="model.d_ff")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.gelu))

    def chained(self) -> tuple[nn.Linear, nn.Linear, int, int]:
        """Return two layers between which neurons do not mix, for `sparse_linear.narrow`."""
        return self.up, self.down, 1, 1


class Block(nn.Module):
    """A pre-norm block: attention and an MLP, each added to its input."""

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


def run_block(block: nn.Module, x: torch.Tensor, *, recompute: bool) -> torch.Tensor:
    """Return `block(x)`; with `recompute`, training stores only the input of the block and recomputes the rest.

    A block then stores 2·batch·length·n_embd bytes (in bf16), at the cost of one more forward pass.
    `deepspeed.checkpointing.configure` can add partitioning and CPU offload.
    """
    if not (recompute and block.training and torch.is_grad_enabled()):
        result: torch.Tensor = block(x)
        return result
    from deepspeed import checkpointing  # takes seconds to import

    if not x.requires_grad and any(p.requires_grad for p in block.parameters()):
        x = x.detach().requires_grad_()  # of frozen embeddings: the block would get no gradients
    return checkpointing.checkpoint(_under_same_autocast(block, x.device.type), x)


def _under_same_autocast(block: nn.Module, device: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the block, or if autocast is enabled now, a function that always computes it so."""
    if not torch.is_autocast_enabled(device):
        return block
    autocast = torch.autocast(device, torch.get_autocast_dtype(device))

    def compute(x: torch.Tensor) -> torch.Tensor:
        with autocast:
            result: torch.Tensor = block(x)
        return result

    return compute


def first_std(config: ModelConfig) -> Callable[[str], float]:
    """Return the standard deviation of a module's initial weights as a function of the module's name."""
    residual = config.init_std / math.sqrt(2 * config.n_layer)  # 2 additions per block keep the variance
    return lambda name: residual if name.endswith(("attention.proj", "mlp.down")) else config.init_std


class GPT(nn.Module):
    """A GPT of the given config; with `tensor`, this rank's slice of it."""

    def __init__(self, config: ModelConfig, tensor: TensorGroup | None = None) -> None:
        super().__init__()
        if config.arch != "gpt":
            raise UserError(f"model.arch is {config.arch!r}, and GPT needs 'gpt': use mst_scale.models.build")
        self.config = config
        self.part = SequenceShard()  # the whole sequence, unless `sequence_parallel` replaces it
        seed = draw_seed()
        if tensor is not None:
            check_no_dropout(config.dropout)
            seed = tensor.agreed(seed)
        self.wte = nn.Embedding(config.padded_vocab, config.n_embd)
        self.wpe = nn.Embedding(config.seq_length, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, tensor) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd, bias=config.bias)
        # sparse_linear replaces these: the product with a tied weight, and the head and loss in one kernel if possible
        self.head_product: Product = F.linear
        self.head_loss: Loss | None = None
        self.lm_head = None if config.tied_head else nn.Linear(config.n_embd, config.padded_vocab, bias=False)
        initialize(self, seed, first_std(config))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits (batch, length, padded_vocab), or with `targets` the mean loss in float32.

        `targets[b, t]` is the token that follows `tokens[b, t]`; positions with target -1 are ignored. If sequences are
        split over ranks, `tokens`, `targets` and logits are this rank's part, and the loss is that of whole sequences.
        """
        x = self.dropout(self.wte(tokens) + self.wpe(self.part.positions(tokens, self.config.seq_length)))
        for block in self.blocks:
            x = run_block(block, x, recompute=self.config.activation_checkpointing)
        x = self.ln_f(x)
        return self.head(x) if targets is None else self.part.mean(self._share_of_loss(x, targets))

    def _share_of_loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        count = self.part.count(targets != IGNORE)
        if self.head_loss is not None and self.lm_head is None:
            loss = self.head_loss(x, self.wte.weight, targets, count)
            if loss is not None:
                return loss
        return cross_entropy(self.head(x), targets, count)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of normalized states."""
        return self.head_product(x, self.wte.weight) if self.lm_head is None else self.lm_head(x)

    def get_output_embeddings(self) -> nn.Module:
        """Return the module whose weight the head multiplies by (`wte` for a tied head), as in transformers."""
        return self.wte if self.lm_head is None else self.lm_head
