"""Splits sequences over ranks: each rank holds one part of every sequence, and attention sees whole sequences.

    part r of P    tokens [r·n/P, (r+1)·n/P) of a sequence of n tokens, on rank r of the group
    attention      q, k, v are exchanged for whole sequences of heads/P heads, and the result is exchanged back
                   (DeepSpeed's Ulysses), so the pattern is that of the whole sequence
    positions      count from the start of the whole sequence
    the loss       is the mean over whole sequences, the same on every rank; its gradient is that of the rank's share

The gradients of a sequence's ranks add up to the gradient of the whole sequence. DeepSpeed adds them in this way if it
gets an mpu that names these ranks (`mst_scale.comm.Mesh`): it divides by the number of sequences, not of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention.module import Attend, SelfAttention
from mst_scale.transforms import check_not_transformed


class SequenceShard:
    """This rank's part of every sequence. Without a group, or in a group of one rank, sequences are whole."""

    def __init__(self, group: Any = None):
        self.group = group
        self.index, self.parts = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def positions(self, tokens: torch.Tensor, context: int) -> torch.Tensor:
        """Return the positions of these tokens (batch, length) in their sequences.

        Args:
            tokens: this rank's part of each sequence, (batch, length).
            context: the longest sequence that the model supports.

        Raises:
            UserError: if a sequence is longer than `context`, or if the ranks' parts have different sizes.
        """
        length = tokens.shape[-1]
        if self.parts > 1:
            self._check_equal_parts(tokens)
        if length * self.parts > context:
            raise UserError(
                f"a sequence of {length * self.parts} tokens does not fit model.seq_length = {context}: "
                "cut it, or train with a larger model.seq_length"
            )
        return torch.arange(self.index * length, (self.index + 1) * length, device=tokens.device)

    def count(self, counted: torch.Tensor) -> torch.Tensor | None:
        """Count the flagged positions in whole sequences, from this part's flags; None if sequences are not split.

        Args:
            counted: bool, true where a token's loss counts in this rank's part.
        """
        if self.parts == 1:
            return None
        total = counted.sum()
        dist.all_reduce(total, group=self.group)
        return total

    def mean(self, share: torch.Tensor) -> torch.Tensor:
        """Return the sum of all parts' shares (sum of losses / `count`); the gradient is that of this rank's share.

        Args:
            share: the sum of this rank's losses divided by `count`.
        """
        if self.parts == 1:
            return share
        check_not_transformed("sequence parallelism", "run the model on one rank", share)
        mean: torch.Tensor = _Sum.apply(share, self.group)
        return mean

    def _check_equal_parts(self, tokens: torch.Tensor) -> None:
        """Raise the same error on all ranks, since exchanging parts of different sizes would hang."""
        batch, length = tokens.shape[0], tokens.shape[-1]
        sizes = torch.tensor([length, -length, batch, -batch], device=tokens.device)
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=self.group)
        longest, shortest, most, least = sizes.mul(torch.tensor([1, -1, 1, -1], device=sizes.device)).tolist()
        if (longest, most) != (shortest, least):
            raise UserError(
                f"the ranks of one sequence hold {least} to {most} sequences in parts of {shortest} to {longest} "
                f"tokens: give each of the {self.parts} ranks an equal part of the same sequences"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceShard:
        return self

    def __reduce__(self) -> Any:
        """Store no ranks: a loaded model works on whole sequences."""
        return SequenceShard, ()


class Exchanged:
    """A layer's attention over whole sequences, which takes and returns this rank's part of them."""

    def __init__(self, attend: Attend, part: SequenceShard):
        self.attend, self.part = attend, part

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Compute attention; all tensors are (batch, length, heads, head_dim)."""
        if self.part.parts == 1:  # in a model that was stored and loaded
            return self.attend(q, k, v)
        from deepspeed.sequence.layer import DistributedAttention

        # created at each call, because it holds the group, which can be neither copied nor stored with the model
        exchange = DistributedAttention(self.attend, self.part.group, scatter_idx=2, gather_idx=1)
        out: torch.Tensor = exchange(q, k, v, 0)  # 0: the batch dimension
        return out


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, group: Any) -> torch.Tensor:
        total = share.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def whole_sequences(model: nn.Module) -> None:
    """Undo `sequence_parallel`: a model's ranks compute whole sequences again."""
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.across_ranks = None
        if isinstance(getattr(module, "part", None), SequenceShard):
            module.part = SequenceShard()  # type: ignore[assignment]


def sequence_parallel(model: nn.Module, group: dist.ProcessGroup | None = None) -> int:
    """Split a model's sequences over the ranks of `group` (None: all ranks); return the number of attention layers.

    Every SelfAttention exchanges its part for whole sequences of some heads: three all-to-alls of
    batch · length · n_embd / parts elements before it, one after it. GPT and BERT count positions and average their
    loss over the whole sequence; other models can do so with an attribute `part` that is a `SequenceShard`.
    """
    part = SequenceShard(group or dist.group.WORLD)
    layers = [module for module in model.modules() if isinstance(module, SelfAttention)]
    for layer in layers:
        if layer.n_head % part.parts:
            raise UserError(
                f"{layer.n_head} heads cannot be split over {part.parts} ranks: choose a size that divides them"
            )
    for layer in layers:
        layer.across_ranks = None if part.parts == 1 else Exchanged(layer.attend, part)
    for module in model.modules():
        if isinstance(getattr(module, "part", None), SequenceShard):
            module.part = part  # type: ignore[assignment]
    return len(layers)
