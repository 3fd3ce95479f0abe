"""Computes a GPT token by token: the network of `mst_scale.models.gpt`, from matrices that may be sparse.

    x ← wte[tokens] + wpe[positions]
    x ← x + proj(attend(qkv(ln_1(x))));   x ← x + down(gelu(up(ln_2(x))))        for each block
    logits = ln_f(x) Wᵀ,  W = wte or lm_head

Activations are float32. `GPT.forward` is the oracle: the logits are equal up to rounding at every position, with any
attention pattern.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from mst_scale.compact_files.weights import ModelWeights
from mst_scale.config import ModelConfig
from mst_scale.errors import UserError
from mst_scale.generation.cache import Cache, visible_keys
from mst_scale.generation.fused import FusedBlocks, can_fuse
from mst_scale.generation.sparse_matrix import DENSE_FROM, DTYPES, Matrix, SparseMatrix, matrix_of
from mst_scale.heap import give_back
from mst_scale.hybrid_sparse_attention import Pattern

EPS = 1e-5  # of the norms


class Decoder:
    """A GPT that predicts the next token of sequences, which it keeps in a cache.

    Attributes:
        matrices: By the name of the weight, sparse or dense.
        vectors: Norms and biases by name, in float32.
        fused: Whether single tokens are computed by one call of the kernel.
    """

    def __init__(
        self,
        config: ModelConfig,
        matrices: Mapping[str, Matrix],
        vectors: Mapping[str, torch.Tensor],
        pattern: Pattern,
    ) -> None:
        self.config, self.matrices, self.vectors, self.pattern = config, matrices, vectors, pattern
        self.fused = can_fuse(matrices)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory, the places of sparse ones included."""
        return sum(m.n_bytes for m in self.matrices.values()) + sum(v.nbytes for v in self.vectors.values())

    def new_cache(self, batch: int, room: int) -> Cache:
        """Return an empty cache for sequences of up to `room` tokens."""
        config = self.config
        return Cache(config.n_layer, batch, config.n_head, room, config.n_embd // config.n_head)

    @torch.inference_mode()
    def logits(self, tokens: torch.Tensor, cache: Cache, *, last: bool = True) -> torch.Tensor:
        """Compute new tokens of the cached sequences, and add them to the cache.

        Args:
            tokens: (batch, new) ids: the first tokens of the sequences, or one more for each.
            cache: What `new_cache` returned.
            last: Whether only the logits of the last token are wanted.

        Returns:
            Logits (batch, new or 1, padded_vocab) in float32.
        """
        batch, new = tokens.shape
        assert cache.length + new <= cache.room, (cache.length, new, cache.room)
        cache.visible = visible_keys(self.pattern, cache.length)
        d = self.config.n_embd
        positions = torch.arange(cache.length, cache.length + new)
        x = (self.matrices["wte.weight"].rows(tokens) + self.matrices["wpe.weight"].rows(positions)).view(-1, d)
        if new == 1 and self.fused:
            cache.blocks = cache.blocks or FusedBlocks(self.matrices, self.vectors, cache, EPS)
            cache.blocks(x)
        else:
            for layer in range(self.config.n_layer):
                x = self._block(layer, x, batch, cache)
        cache.length += new
        if last:
            x = x.view(batch, new, d)[:, -1]
        head = self.matrices["wte.weight" if self.config.tied_head else "lm_head.weight"]
        return head.multiply(self._norm("ln_f", x)).view(batch, 1 if last else new, -1)

    def _block(self, layer: int, x: torch.Tensor, batch: int, cache: Cache) -> torch.Tensor:
        name = f"blocks.{layer}."
        x = x + self._attention(layer, self._norm(name + "ln_1", x), batch, cache)
        up = self._linear(name + "mlp.up", self._norm(name + "ln_2", x))
        return x + self._linear(name + "mlp.down", F.gelu(up, approximate="tanh"))

    def _attention(self, layer: int, x: torch.Tensor, batch: int, cache: Cache) -> torch.Tensor:
        new, heads = x.shape[0] // batch, self.config.n_head
        qkv = self._linear(f"blocks.{layer}.attention.qkv", x).view(batch, new, 3, heads, -1)
        # (batch, heads, new, head_dim), without a copy
        q, k, v = (qkv.view(batch, 3, heads, 1, -1) if new == 1 else qkv.permute(0, 2, 3, 1, 4)).unbind(1)
        out = cache.attend(layer, q, k, v, self.pattern)
        return self._linear(f"blocks.{layer}.attention.proj", out.transpose(1, 2).reshape(x.shape[0], -1))

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.matrices[name + ".weight"].multiply(x, self.vectors.get(name + ".bias"))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.vectors[name + ".weight"]
        return F.layer_norm(x, weight.shape, weight, self.vectors.get(name + ".bias"), EPS)


def load_decoder(weights: ModelWeights, dtype: torch.dtype | None = None) -> Decoder:
    """Load the matrices of a model, one after the other, in their sparse form where that is faster.

    Args:
        weights: Those of a GPT.
        dtype: float32 or bfloat16; by default as they are stored.

    Raises:
        UserError: if the dtype cannot be computed.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"{dtype} cannot be computed here: use float32 or bfloat16")
    matrices: dict[str, Matrix] = {}
    vectors: dict[str, torch.Tensor] = {}
    for name in weights.names:  # whatever is kept is a copy: a view would keep the whole file in memory
        found = None if weights.compact is None else weights.compact.sparse(name)
        if found is not None and len(found[2]) == 2 and len(found[0]) < DENSE_FROM * math.prod(found[2]):
            values, bits, shape = found
            own = values.to(dtype or _computed(values.dtype), copy=True)
            matrices[name] = SparseMatrix(own, bits, (shape[0], shape[1]))
            continue
        tensor = weights.read(name)
        if tensor.dim() == 1:
            vectors[name] = tensor.to(torch.float32, copy=True)
        else:
            matrices[name] = matrix_of(tensor.to(dtype or _computed(tensor.dtype), copy=True))
    give_back()
    return Decoder(weights.config, matrices, vectors, weights.pattern)


def _computed(stored: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: that of the values, except that float16 is computed as float32."""
    return stored if stored in DTYPES else torch.float32
