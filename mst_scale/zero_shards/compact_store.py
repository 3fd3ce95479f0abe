"""The compact store: parameters that store only their active weights, addressed by the coordinates of their matrices.

DeepSpeed shards, reduces, gathers, clips and optimizes the K values of such a parameter as it does any vector, so the
dense store of these vectors (`values`) is where weights, gradients and optimizer states live. Masks and topology steps
work on equal ranges of the flattened matrix (`slices`), which are independent of how DeepSpeed partitions the values:
the values that they read are gathered, one parameter at a time, and expanded to a copy. Parameters that are not
compact, in the same run, are those of the dense store.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import deepspeed.comm as ds_comm
import torch
from torch import Tensor, nn

from mst_scale.shard import Cut, Shard
from mst_scale.zero_shards.compact_index import CompactIndex, index_of
from mst_scale.zero_shards.dense_store import dense_store
from mst_scale.zero_shards.groups import groups_of
from mst_scale.zero_shards.step import NamedCollectives


class CompactStore:
    """Methods that say "collective" are called on all ranks together."""

    def __init__(self, engine: Any, parameters: dict[str, nn.Parameter]):
        self.values = dense_store(engine, parameters)
        """Where the values of each parameter lie; its slices are ranges of what it stores."""
        self.parameters = self.values.parameters
        self.group = self.values.group
        self.collectives = NamedCollectives("mst_compact")
        self.replicas = groups_of(engine).replicas
        self.parts = int(engine.sequence_parallel_size)
        self.index: list[CompactIndex | None] = [index_of(p) for p in self.parameters]
        self.slices: list[Shard] = []
        for name, index, own in zip(parameters, self.index, self.values.slices, strict=True):
            self.slices.append(own if index is None else self._equal_part(name, index))

    def _equal_part(self, name: str, index: CompactIndex) -> Shard:
        ranks, rank = (1, 0) if self.group is None else _place_in(self.group)
        part = -(-index.numel // ranks)
        start = min(part * rank, index.numel)
        return Shard(name, Cut.whole(index.shape), start, min(part, index.numel - start))

    @property
    def device(self) -> torch.device:
        """The device of the master weights."""
        return self.values.device

    # --- what lies as the values do ---

    def frozen(self, i: int) -> bool:
        """Whether the parameter was not trained when the engine was made."""
        return self.values.frozen(i)

    def states(self, i: int) -> dict[str, Tensor]:
        """Live optimizer states of this rank's range of the values."""
        return self.values.states(i)

    def gradient(self, i: int) -> Tensor | None:
        """Return the reduced, still loss-scaled gradient of this rank's range of the values; see `put_gradient`."""
        return self.values.gradient(i)

    def put_gradient(self, i: int, gradient: Tensor) -> None:
        """Write the gradient back."""
        self.values.put_gradient(i, gradient)

    def within(self, tensors: Collection[int]) -> list[int]:
        """Return the parameters whose master weights are part of the tensors with these ids."""
        return self.values.within(tensors)

    def owner(self, i: int) -> Tensor:
        """Return the parameter of the base optimizer that this parameter's master weights are part of."""
        return self.values.owner(i)

    def second_moment_share(self, i: int) -> float:
        """Return 1 - β₂ᵗ, as `DenseStore.second_moment_share` does."""
        return self.values.second_moment_share(i)

    def matches_master(self, i: int) -> bool:
        """Whether the forward reads what the master weights of this rank were rounded to, bit for bit."""
        return self.values.matches_master(i)

    def read(self, i: int) -> Tensor:
        """Live values that the forward reads of this rank's range of them."""
        return self.values.read(i)

    def zero_read(self, i: int, active: Tensor) -> None:
        """Zero inactive weights in what the forward reads; of a compact parameter there are none."""
        if self.index[i] is None:
            self.values.zero_read(i, active)

    # --- in the coordinates of the matrix ---

    def weight(self, i: int) -> Tensor:
        """Return this rank's slice of the matrix, a copy if the parameter is compact (collective)."""
        return self.values.weight(i) if self.index[i] is None else self.expanded(i, self.values.weight(i))

    def expanded(self, i: int, values: Tensor) -> Tensor:
        """Return this rank's slice of a matrix, given this rank's range of its values (collective)."""
        index, part = self._index(i), self.slices[i]
        whole = self.gathered(i, values)
        positions, first, last = self._in_slice(i, whole.device)
        dense = whole.new_zeros(part.length)
        assert index.count == whole.numel()
        return dense.scatter_(0, positions[first:last].long() - part.start, whole[first:last])

    def taken(self, i: int, dense: Tensor) -> Tensor:
        """Return this rank's range of the values, given this rank's slice of a matrix (collective)."""
        index, part, own = self._index(i), self.slices[i], self.values.slices[i]
        positions, first, last = self._in_slice(i, dense.device)
        whole = dense.new_zeros(index.stored)
        whole[first:last] = dense.index_select(0, positions[first:last].long() - part.start)
        return self._joined(whole)[own.start : own.start + own.length]

    def gathered(self, i: int, values: Tensor) -> Tensor:
        """Return all values of a parameter, given this rank's range of them (collective)."""
        if self.group is None:
            return values.detach()[: self._index(i).count]
        own = self.values.slices[i]
        whole = values.detach().new_zeros(self._index(i).stored)
        whole[own.start : own.start + own.length] = values.detach()
        return self._joined(whole)[: self._index(i).count]

    def move(self, i: int, positions: Tensor) -> Tensor:
        """Take a new index: values and states of weights that stay active move to their place, others start at 0.

        Few of them change rank: those that cross the border between two ranks' ranges (collective).

        Args:
            i: the parameter.
            positions: the new index, as long as the old one.

        Returns:
            Flags of this rank's range of what is stored: True unless a weight has grown there.
        """
        index, own = self._index(i), self.values.slices[i]
        weight = self.values.weight(i)
        old = index.positions.to(weight.device).long()
        mine = positions.to(weight.device)[own.start : own.start + own.length]
        before = torch.searchsorted(old, mine).clamp_(max=max(0, old.numel() - 1))
        stayed = old[before] == mine
        for live in (weight, *self.values.states(i).values()):
            moved = self.gathered(i, live)[before]
            live[: len(mine)] = torch.where(stayed, moved, torch.zeros_like(moved))
        index.replace(positions)
        return nn.functional.pad(stayed, (0, own.length - len(mine)), value=True)

    def reduced(self, i: int, gradient: Tensor) -> Tensor:
        """Return this rank's slice, in float32, of a dense gradient: its mean over sequences (collective).

        The parts of one sequence add up, as in the gradients that DeepSpeed reduces.
        """
        part = self.slices[i]
        ranks = ds_comm.get_world_size(self.replicas)
        sequences = ranks / self.parts
        if ranks == 1:
            return gradient[part.start : part.start + part.length].to(torch.float32, copy=True)
        if self.group is None:
            whole = gradient / sequences
            self.collectives.all_reduce(whole, group=self.replicas)
            return whole.to(torch.float32)
        each = -(-gradient.numel() // ranks)
        padded = gradient.new_zeros(each * ranks)
        torch.div(gradient, sequences, out=padded[: gradient.numel()])
        mine = gradient.new_empty(each)
        self.collectives.reduce_scatter(mine, padded, group=self.group)
        return mine[: part.length].to(torch.float32)

    def _in_slice(self, i: int, device: torch.device) -> tuple[Tensor, int, int]:
        """Return the index, and the start and end of the part of it in this rank's slice of the matrix."""
        part, positions = self.slices[i], self._index(i).positions.to(device)
        ends = torch.tensor([part.start, part.start + part.length], dtype=positions.dtype, device=device)
        first, last = torch.searchsorted(positions, ends).tolist()
        return positions, first, last

    def _index(self, i: int) -> CompactIndex:
        index = self.index[i]
        assert index is not None, f"{self.slices[i].name} is not compact"
        return index

    def _joined(self, whole: Tensor) -> Tensor:
        """Combine values of which each rank has some, and 0 elsewhere: added as bytes, so that every bit is kept."""
        if self.group is not None:
            self.collectives.all_reduce(whole.view(torch.uint8), group=self.group)
        return whole


def _place_in(group: Any) -> tuple[int, int]:
    return ds_comm.get_world_size(group), ds_comm.get_rank(group)
