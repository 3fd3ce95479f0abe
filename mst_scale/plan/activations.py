"""Counts the bytes per micro-batch that backward keeps of a forward pass.

For b sequences of L tokens, width d, inner width f, h heads, vocabulary V and w bytes per value, one block keeps

    inputs of ln_1 and ln_2, their outputs, q, k, v and attention's output        8 · bLd · w
    the MLP's inner values before and after GELU                                  2 · bLf · w
    statistics of two norms and one number per attention row, in fp32             bL · (16 + 4h)

and the head its input, its normalised input and the logits; their gradient stands beside them at the peak. BERT's
blocks keep as much, and its head works on the masked positions only. Sparse attention keeps the same tensors as dense
flash attention, and a second number per row, which is not counted. With recomputation a block keeps its input alone,
and one block at a time is whole.

A rank of a tensor-parallel group of t keeps a t-th of q, k, v, of attention's output and rows and of the MLP's inner
values; norms, embeddings, head and logits are whole on each. One of s that share a sequence keeps everything of L/s
tokens. A pipeline's stage keeps its own blocks, once for every micro-batch that is on its way: the stages that are
still to come and itself, at first, and never more than there are.

`tests/plan/test_activations.py` compares `kept` with what autograd keeps. `working` was read from the modules: what is
alive for an instant inside autograd's C++ is not seen there, and it has not been compared with a GPU's allocator.
"""

from __future__ import annotations

from dataclasses import dataclass

from mst_scale.config import ModelConfig

FP32 = 4
PIECES = 3 * 128 * 2**20  # the loss works through the logits in fp32 pieces of 128 MiB on a GPU


@dataclass(frozen=True)
class Activations:
    """Bytes, for one micro-batch."""

    kept: int
    """Saved for backward, when the forward pass is done."""
    working: int
    """On top of that at the fullest moment: gradients of activations, and with recomputation one whole block."""

    @property
    def total(self) -> int:
        return self.kept + self.working


@dataclass(frozen=True)
class Share:
    """The part of a forward pass that one rank computes."""

    tensor: int = 1
    sequence: int = 1
    layers: int | None = None
    """None: all of them."""
    head: bool = True
    """With the last norm, the head and the loss."""
    on_their_way: int = 1
    """Micro-batches whose backward is still to come, at most."""
    piped: bool = False
    """Activations come from another rank, or go to one."""


WHOLE = Share()


def block_bytes(model: ModelConfig, micro: int, width: int, share: Share = WHOLE) -> int:
    """What one block keeps."""
    tokens, t = micro * model.seq_length // share.sequence, share.tensor
    wide = (4 * model.n_embd + (4 * model.n_embd + 2 * model.ffw) // t) * width
    return tokens * (wide + 4 * FP32 + FP32 * model.n_head // t)


def ends_bytes(model: ModelConfig, micro: int, width: int, share: Share = WHOLE) -> int:
    """What embeddings, the last norm, the head and the loss keep."""
    tokens, predicted = micro * model.seq_length // share.sequence, micro * model.predicted // share.sequence
    norm = 2 * model.n_embd * width + 2 * FP32
    loss = model.padded_vocab * width + 8 + 2 * FP32  # logits; target, log-sum-exp and weight of each position
    if model.causal:
        return tokens * (norm + loss + 8)  # and the token itself
    # BERT: a norm behind the embeddings; the head transforms and normalises the predicted positions alone
    return tokens * (model.n_embd * width + 2 * FP32 + 3 * 8) + predicted * (2 * model.n_embd * width + norm + loss)


def activations(model: ModelConfig, micro: int, width: int, recompute: bool, share: Share = WHOLE) -> Activations:
    """Of one rank, at its fullest."""
    tokens, predicted = micro * model.seq_length // share.sequence, micro * model.predicted // share.sequence
    layers = model.n_layer if share.layers is None else share.layers
    block = block_bytes(model, micro, width, share)
    ends = ends_bytes(model, micro, width, share) if share.head else 8 * tokens
    logits = predicted * model.padded_vocab * width  # their gradient
    inner = tokens * (2 * model.ffw // share.tensor + 2 * model.n_embd) * width  # gradients inside an MLP
    head = logits + min(PIECES, 3 * FP32 * predicted * model.padded_vocab) if share.head else 0
    stream = tokens * model.n_embd * width
    # q, k and v before they are exchanged for whole sequences of fewer heads; what comes from other stages and returns
    beside = (3 * stream // share.tensor if share.sequence > 1 else 0) + (2 * stream if share.piped else 0)
    if not recompute:
        return Activations(share.on_their_way * layers * block + ends, max(head, inner) + beside)
    kept = share.on_their_way * layers * stream + ends
    # the head's peak comes while every block still keeps its input alone; what the head kept is gone when blocks return
    return Activations(kept, max(head, block + inner - ends) + beside)
