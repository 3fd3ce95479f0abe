"""The compact store: parameters that store only their active weights, addressed by the coordinates of their matrices.

DeepSpeed shards, reduces, gathers, clips and optimizes the K values of such a parameter as it does any vector, so the
dense store of these vectors (`values`) is where weights, gradients and optimizer states live. Masks and topology steps
work on equal ranges of the flattened matrix (`slices`), which are independent of how DeepSpeed partitions the values:
the values that they read are gathered, a few parameters at a time, and expanded to a copy. Parameters that are not
compact, in the same run, are those of the dense store.

`shards_of` chooses the store of an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed.comm as ds_comm
import torch
from torch import Tensor, nn

from mst_scale.shard import Cut, Shard
from mst_scale.sparse_linear.compact_index import CompactIndex
from mst_scale.zero_shards.borders import Sections, need
from mst_scale.zero_shards.compact_marks import index_of, is_compact
from mst_scale.zero_shards.dense_store import DenseStore, dense_store
from mst_scale.zero_shards.groups import groups_of, tied_groups
from mst_scale.zero_shards.step import NamedCollectives
from mst_scale.zero_shards.supported import check_engine
from mst_scale.zero_shards.tied_gradients import take_first_stages


class CompactStore:
    """Methods that say "collective" are called on all ranks together."""

    def __init__(self, engine: Any, parameters: dict[str, nn.Parameter]):
        self.values = dense_store(engine, parameters)
        """Where the values of each parameter lie; its slices are ranges of what it stores."""
        # methods of `DenseStore` that concern this rank's range of the values, or no range at all
        self.frozen, self.owner, self.within = self.values.frozen, self.values.owner, self.values.within
        self.read, self.matches_master = self.values.read, self.values.matches_master
        self.gradient, self.put_gradient = self.values.gradient, self.values.put_gradient
        self.states, self.second_moment = self.values.states, self.values.second_moment
        self.second_moment_share = self.values.second_moment_share
        self.parameters = self.values.parameters
        self.group, self.place = self.values.group, engine.device
        self.collectives = NamedCollectives("mst_compact")
        self.replicas = groups_of(engine).replicas
        self.parts = int(engine.sequence_parallel_size)
        self.averages = bool(engine.gradient_average)
        found = [(i, index_of(p)) for i, p in enumerate(self.parameters)]
        self.indexes: dict[int, CompactIndex] = {i: index for i, index in found if index is not None}
        """Of compact parameters, by their number."""
        ties = tied_groups(engine)
        self.tied = {i: ties[id(p)] for i, p in enumerate(self.parameters) if id(p) in ties}
        """Of parameters that other stages of a pipeline hold too, the ranks that hold them."""
        self.slices: list[Shard] = list(self.values.slices)
        ranks, rank = self._ranks_and_rank()
        for i, index in self.indexes.items():
            each = -(-index.numel // ranks)
            self.slices[i] = Shard.equal_part(self.slices[i].name, Cut.whole(index.shape), each, rank)

    def _ranks_and_rank(self) -> tuple[int, int]:
        """Return the number of ranks over which values are partitioned, and the number of this one among them."""
        if self.group is None:
            return 1, 0
        return ds_comm.get_world_size(self.group), ds_comm.get_rank(self.group)

    def device_of(self, i: int) -> torch.device:
        """Return the device of a parameter's master weights."""
        return self.values.device_of(i)

    def zero_read(self, i: int, active: Tensor) -> None:
        """Zero inactive weights in what the forward reads; of a compact parameter there are none."""
        if i not in self.indexes:
            self.values.zero_read(i, active)

    # --- in the coordinates of the matrix ---

    def weight(self, i: int) -> Tensor:
        """Return this rank's slice of the matrix, a copy if the parameter is compact (collective)."""
        own = self.values.weight(i)
        return self.expanded([(i, own)])[0] if i in self.indexes else own

    def stored(self, i: int) -> tuple[Tensor, Tensor] | None:
        """Return this rank's range of the values and their positions in the matrix; None if it is not compact."""
        if (index := self.indexes.get(i)) is None:
            return None
        own, values = self.values.slices[i], self.values.weight(i)
        positions = index.positions[own.start : own.start + own.length].to(values.device)
        return values[: len(positions)], positions

    def expanded(self, parts: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        """Return this rank's slices of matrices, given its ranges of their values, by parameter (one collective)."""
        return [self._placed(i, whole) for (i, _), whole in zip(parts, self.gathered(parts), strict=True)]

    def _placed(self, i: int, whole: Tensor) -> Tensor:
        part = self.slices[i]
        positions, first, last = self._in_slice(i, whole.device)
        dense = whole.new_zeros(part.length)
        assert self.indexes[i].count == whole.numel()
        return dense.scatter_(0, positions[first:last].long() - part.start, whole[first:last])

    def taken(self, parts: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        """Return this rank's ranges of the values, given its slices of matrices, by parameter (one collective)."""
        if not parts:
            return []
        wholes, joined = self._room([(i, dense.dtype) for i, dense in parts], parts[0][1].device)
        for (i, dense), whole in zip(parts, wholes, strict=True):
            positions, first, last = self._in_slice(i, dense.device)
            whole[first:last] = dense.index_select(0, positions[first:last].long() - self.slices[i].start)
        self._join(joined)
        own = [self.values.slices[i] for i, _ in parts]
        return [whole[at.start : at.start + at.length] for whole, at in zip(wholes, own, strict=True)]

    def gathered(self, parts: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        """Return all values of parameters, given this rank's ranges of them, by parameter (one collective)."""
        if self.group is None or not parts:
            return [values.detach()[: self.indexes[i].count] for i, values in parts]
        wholes, joined = self._room([(i, values.dtype) for i, values in parts], parts[0][1].device)
        for (i, values), whole in zip(parts, wholes, strict=True):
            own = self.values.slices[i]
            whole[own.start : own.start + own.length] = values.detach()
        self._join(joined)
        return [whole[: self.indexes[i].count] for (i, _), whole in zip(parts, wholes, strict=True)]

    def move(self, parts: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        """Take new indexes: values and states of weights that stay active move to their place, others start at 0.

        Few of them change rank: those that cross the border between two ranks' ranges (one small collective, and one
        per state).

        Args:
            parts: parameters and their new indexes, as long as the old ones.

        Returns:
            For each, flags of this rank's range of what is stored: True unless a weight has grown there.
        """
        if not parts:
            return []
        # this rank's ranges of the master weights, and of each optimizer state
        live = [[self.values.weight(i), *self.values.states(i).values()] for i, _ in parts]
        found = [
            self._places_before(i, positions.to(own[0].device)) for (i, positions), own in zip(parts, live, strict=True)
        ]
        sections = self._sections([i for i, _ in parts], found)
        for k in range(max(map(len, live), default=0)):
            having = [n for n, own in enumerate(live) if k < len(own)]
            old = self._with_neighbors([(live[n][k], sections[n]) for n in having])
            for n, values in zip(having, old, strict=True):
                before, stayed = found[n]
                moved = values[(before - sections[n].mine[0][0]).clamp_(0, max(0, len(values) - 1))]
                live[n][k][: len(before)] = torch.where(stayed, moved, torch.zeros_like(moved))
        for i, positions in parts:
            self.indexes[i].replace(positions)
        own_lengths = [self.values.slices[i].length for i, _ in parts]
        return [
            nn.functional.pad(stayed, (0, length - len(stayed)), value=True)
            for (_, stayed), length in zip(found, own_lengths, strict=True)
        ]

    def _places_before(self, i: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return where this rank's range of a new index is in the old one, and flags of what is there."""
        own, old = self.values.slices[i], self.indexes[i].positions.to(positions.device)
        mine = positions[own.start : own.start + own.length].to(old.dtype)
        before = torch.searchsorted(old, mine).clamp_(max=max(0, old.numel() - 1))
        return before, old[before] == mine

    def _sections(self, which: Sequence[int], found: Sequence[tuple[Tensor, Tensor]]) -> list[Sections]:
        """Return what ranks need of each other's old values, by parameter (one collective)."""
        ranks, rank = self._ranks_and_rank()
        needs = torch.zeros(len(which), ranks, 4, dtype=torch.int64)
        for row, i, (before, stayed) in zip(needs, which, found, strict=True):
            own = self.values.slices[i]
            row[rank] = torch.tensor(need(before, stayed, (own.start, own.start + own.length)))
        if ranks > 1:
            sent = needs.to(self.place)
            self.collectives.all_reduce(sent, group=self.group)
            needs = sent.cpu()
        return [Sections.of(row, rank) for row in needs]

    def _with_neighbors(self, parts: Sequence[tuple[Tensor, Sections]]) -> list[Tensor]:
        """Return this rank's ranges of old values, with what it needs beyond them (one collective)."""
        buffers, joined = _zeros([(at.length, values.dtype) for values, at in parts], parts[0][0].device)
        for (values, at), buffer in zip(parts, buffers, strict=True):
            at.give(values, buffer)
        if joined.numel():
            self._join(joined)
        return [at.take(values, buffer) for (values, at), buffer in zip(parts, buffers, strict=True)]

    def reduced(self, i: int, gradient: Tensor) -> Tensor:
        """Return this rank's slice, in float32, of a dense gradient: its mean or sum over sequences (collective).

        The parts of one sequence add up, as in the gradients that DeepSpeed reduces. So do the gradients of the stages
        that hold a tied matrix, before the mean is taken; `gradient` then has their sum. All of them get the mean of
        the first one, bit for bit.
        """
        part = self.slices[i]
        if i in self.tied:
            self.collectives.all_reduce(gradient, group=self.tied[i])
        ranks = ds_comm.get_world_size(self.replicas)
        sequences = ranks / self.parts if self.averages else 1
        if ranks == 1:
            return gradient[part.start : part.start + part.length].to(torch.float32, copy=True)
        if self.group is None:
            mine = gradient / sequences
            self.collectives.all_reduce(mine, group=self.replicas)
        else:
            mine = self._scattered(gradient, sequences)
        mine = mine[: part.length].to(torch.float32)
        if i in self.tied:
            take_first_stages(mine, self.tied[i], self.collectives)
        return mine

    def _scattered(self, gradient: Tensor, sequences: float) -> Tensor:
        """Return this rank's equal part of the sum of gradients over ranks, divided by `sequences` (collective)."""
        ranks = ds_comm.get_world_size(self.group)
        each = -(-gradient.numel() // ranks)
        padded = gradient.new_empty(each * ranks)
        padded[gradient.numel() :] = 0
        torch.div(gradient, sequences, out=padded[: gradient.numel()])
        if torch.distributed.get_backend(self.group) == "gloo":  # its reduce_scatter takes three times as long
            parts = torch.empty_like(padded)
            self.collectives.all_to_all(parts, padded, group=self.group)
            return parts.view(ranks, each).sum(0)
        mine = gradient.new_empty(each)
        self.collectives.reduce_scatter(mine, padded, group=self.group)
        return mine

    def _in_slice(self, i: int, device: torch.device) -> tuple[Tensor, int, int]:
        """Return the index, and the start and end of the part of it in this rank's slice of the matrix."""
        part, index = self.slices[i], self.indexes[i]
        return index.positions.to(device), *index.between(part.start, part.start + part.length)

    def _room(self, parts: Sequence[tuple[int, torch.dtype]], device: torch.device) -> tuple[list[Tensor], Tensor]:
        """Return zeros for all values of each parameter, and the integers that they are views of."""
        return _zeros([(self.indexes[i].stored, dtype) for i, dtype in parts], device)

    def _join(self, joined: Tensor) -> None:
        """Combine values, each of which is 0 on all ranks but one: added as integers, so every bit is kept."""
        if self.group is not None:
            sent = joined.to(self.place)  # offloaded states lie elsewhere
            self.collectives.all_reduce(sent, group=self.group)
            if sent is not joined:
                joined.copy_(sent)


def _zeros(wanted: Sequence[tuple[int, torch.dtype]], device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Return zeros of these lengths, which are multiples of 64, and the integers that they are views of."""
    lengths = [length * dtype.itemsize for length, dtype in wanted]
    joined = torch.zeros(sum(lengths) // 4, dtype=torch.int32, device=device)
    pieces = joined.view(torch.uint8).split(lengths)
    return [piece.view(dtype) for piece, (_, dtype) in zip(pieces, wanted, strict=True)], joined


Store = DenseStore | CompactStore


def shards_of(engine: Any, parameters: dict[str, nn.Parameter], alone: bool = False) -> Store:
    """Return the store of these parameters; `alone` as for `dense_store`.

    Raises:
        UserError: the engine has a feature with which sparse training is not exact.
    """
    check_engine(engine)
    if is_compact(engine.module):  # all ranks choose alike
        return CompactStore(engine, parameters)
    return dense_store(engine, parameters, alone)
