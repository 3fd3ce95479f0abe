"""The dense store: live views of this rank's shard of each parameter, its master weights, gradient and states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from mst_scale.errors import UserError
from mst_scale.mixed_growing import packed_bits
from mst_scale.shard import Shard
from mst_scale.zero_shards.groups import groups_of, tensor_slices
from mst_scale.zero_shards.logical import is_empty, stored_cut_of
from mst_scale.zero_shards.step import base_optimizer, total_norm


class DenseStore(ABC):
    """The common part of the three layouts: a parameter's master weights, and everything that is stored like them.

    A frozen parameter has no master copy: the forward pass reads its weights directly, and no optimizer updates them.
    """

    def __init__(self, engine: Any, parameters: dict[str, nn.Parameter], alone: bool = False):
        self.zero, self.optimizer = engine.optimizer, base_optimizer(engine)
        self.group = self.zero.dp_process_group if engine.zero_optimization_stage() else None
        """Ranks over which parameters are partitioned; None at stage 0."""
        self.parameters = list(parameters.values())
        self.slices = [self._slice(name, p) for name, p in parameters.items()]
        self._frozen = [not p.requires_grad for p in self.parameters]

    def device_of(self, i: int) -> torch.device:
        """Return the device of a parameter's master weights; with offload, frozen ones have another."""
        return self.weight(i).device

    def frozen(self, i: int) -> bool:
        """Whether the parameter was frozen when the engine was made: it has no gradient and no optimizer state."""
        return self._frozen[i]

    def owner(self, i: int) -> torch.Tensor:
        """Return the parameter of the base optimizer that this parameter's master weights are part of."""
        return self._place(i)[0]

    def weight(self, i: int) -> torch.Tensor:
        """Live fp32 master weights of this rank's slice, flat; weights of the forward pass if it is frozen."""
        return self.part(i, self.owner(i))

    def stored(self, i: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return None, because every weight of the slice is stored; see `CompactStore.stored`."""
        return None

    def has_master(self, i: int) -> bool:
        """Whether the forward pass reads a copy, which each step overwrites with the rounded master weights."""
        return not self.frozen(i)

    def read(self, i: int) -> torch.Tensor:
        """Live weights of the forward pass in this rank's slice, flat; `weight` if there is no master copy."""
        parameter: Any = self.parameters[i]
        return parameter.detach().view(-1).narrow(0, self.slices[i].start, self.slices[i].length)

    def matches_master(self, i: int) -> bool:
        """Whether weights of the forward pass equal the rounded master weights of this rank's slice, bit for bit."""
        if not self.has_master(i):
            return True
        read, weight = self.read(i), self.weight(i)
        same = packed_bits.INTEGER_OF_SIZE[read.element_size()]  # a NaN is the same as itself here
        return torch.equal(read.view(same), weight.to(read.device, read.dtype).view(same))

    def states(self, i: int) -> dict[str, torch.Tensor]:
        """Live optimizer states of this rank's slice, flat, by their key ("exp_avg", "exp_avg_sq")."""
        owner = self.owner(i)
        return {
            key: self.part(i, value)
            for key, value in self.optimizer.state.get(owner, {}).items()
            if torch.is_tensor(value) and value.numel() == owner.numel() and value.dim() > 0
        }

    def second_moment(self, i: int) -> torch.Tensor | None:
        """Return Adam's live second moment of this rank's slice, flat; None for other optimizers.

        DeepSpeed's Adagrad for the CPU keeps its sum under the same key.
        """
        of_adam = any("betas" in group for group in self.optimizer.param_groups)
        return self.states(i).get("exp_avg_sq") if of_adam else None

    def within(self, tensors: Collection[int]) -> list[int]:
        """Return the parameters whose master weights are part of the tensors with these ids."""
        return [i for i in range(len(self.parameters)) if id(self.owner(i)) in tensors]

    def param_group(self, i: int) -> dict[str, Any]:
        """Return the base optimizer's group that updates this parameter; between updates ZeRO-3 keeps groups empty."""
        owner, groups = self.owner(i), self.optimizer.param_groups
        return next((group for group in groups if any(p is owner for p in group["params"])), {"params": [owner]})

    def updates(self, i: int) -> int:
        """Return how many updates Adam counts for this parameter: fewer than steps after an overflow or a warm start.

        DeepSpeed's FusedAdam counts a group's updates in the state of its last parameter.
        """
        state = self.optimizer.state
        return max(int(state.get(p, {}).get("step", 0)) for p in self.param_group(i)["params"])

    def second_moment_share(self, i: int) -> float:
        """Return 1 - β₂ᵗ: Adam's second moment relative to the squared gradient, if the gradient had never changed."""
        return float(1.0 - self.param_group(i)["betas"][1] ** self.updates(i))

    @abstractmethod
    def gradient(self, i: int) -> torch.Tensor | None:
        """Return the reduced, still loss-scaled gradient of this rank's slice, flat; write back with `put_gradient`."""

    def put_gradient(self, i: int, gradient: torch.Tensor) -> None:
        """Write the gradient back."""
        live = self.gradient(i)
        assert live is not None
        if live.data_ptr() != gradient.data_ptr():
            live.copy_(gradient)

    @abstractmethod
    def zero_read(self, i: int, active: torch.Tensor) -> None:
        """Zero the inactive weights that the forward pass reads, on all ranks together.

        Args:
            i: the parameter.
            active: flags of this rank's slice (bool). Where every rank reads the whole parameter (ZeRO-1 and 2, and
                what ZeRO-3 keeps whole) the flags of all ranks are brought together: one byte per weight, when weights
                are put in place and not in every step.
        """

    def part(self, i: int, like_owner: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice, flat, of a tensor with the layout of the master weights."""
        return like_owner.detach().view(-1).narrow(0, self._place(i)[1], self.slices[i].length)

    @abstractmethod
    def _place(self, i: int) -> tuple[torch.Tensor, int]:
        """(owner, where the slice begins in it)."""

    @abstractmethod
    def _slice(self, name: str, parameter: Any) -> Shard:
        """Return this rank's slice of a parameter."""


class Replicated(DenseStore):
    """Stage 0: every rank holds every parameter whole, so there is nothing to reconcile."""

    def __init__(self, engine: Any, parameters: dict[str, nn.Parameter], alone: bool = False):
        super().__init__(engine, parameters, alone)
        self._masters = stage0_masters(engine.optimizer)
        self._any = next(iter(self._masters.values()), None)  # all masters are updated at once

    def has_master(self, i: int) -> bool:
        return id(self.parameters[i]) in self._masters

    def gradient(self, i: int) -> torch.Tensor | None:
        gradient = self.parameters[i].grad
        return None if gradient is None else gradient.view(-1)

    def zero_read(self, i: int, active: torch.Tensor) -> None:
        parameter: Any = self.parameters[i]
        parameter.data.view(-1).masked_fill_(~active.to(parameter.device), 0)

    def _place(self, i: int) -> tuple[torch.Tensor, int]:
        if self._any is not None and is_empty(self.parameters[i]):
            return self._any[0], 0
        return self._masters.get(id(self.parameters[i]), (self.parameters[i], 0))

    def _slice(self, name: str, parameter: Any) -> Shard:
        return Shard(name, stored_cut_of(parameter), 0, parameter.numel())


class Partitioned(DenseStore):
    """The common part of stages 1 to 3, in which a rank has a part of the master weights."""

    offloaded: bool
    """Whether gradients and optimizer states are on the CPU."""

    def put_gradient(self, i: int, gradient: torch.Tensor) -> None:
        super().put_gradient(i, gradient)
        if self.offloaded and self.slices[i].length:
            # its norm was recorded during backward, from the gradient as it was then; on the accelerator, like those
            # of the parameters that are not sparse, to which ZeRO-3 adds it
            where = get_accelerator().current_device_name()
            norm = torch.tensor(total_norm([gradient]), dtype=torch.float64, device=where)
            self.zero.norm_for_param_grads[self.zero.get_param_id(self.parameters[i])] = norm

    def zero_read(self, i: int, active: torch.Tensor) -> None:
        """Zero the inactive weights of a parameter that every rank holds whole; `active` flags this rank's slice."""
        parameter: Any = self.parameters[i]
        start = self.slices[i].start
        whole = torch.zeros(parameter.numel(), dtype=torch.uint8, device=parameter.device)
        whole[start : start + active.numel()] = active.to(parameter.device)
        dist.all_reduce(whole, group=self.group)
        parameter.data.view(-1).masked_fill_(~whole.bool(), 0)


class FlatPartitions(Partitioned):
    """Stages 1 and 2: a parameter group is one flat buffer, split evenly; a parameter may span several ranks.

    A rank that owns no part of a parameter has an empty slice. Nothing is cached: DeepSpeed rebinds states on load.
    """

    def __init__(self, engine: Any, parameters: dict[str, nn.Parameter], alone: bool = False):
        super().__init__(engine, parameters, alone)
        self.offloaded = self.zero.cpu_offload
        groups = {id(p): g for g, group in enumerate(self.zero.bit16_groups) for p in group}
        self._group_of = _agreed_groups(engine, self.parameters, groups, alone)

    def gradient(self, i: int) -> torch.Tensor | None:
        parameter: Any = self.parameters[i]
        if self.frozen(i):
            return None
        if _mapping(parameter) is None:
            return self.weight(i)  # empty
        if self.offloaded:  # gradients travel to the CPU during the backward pass
            self.zero._wait_for_offload_copies()
        return parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group).view(-1)

    def _slice(self, name: str, parameter: Any) -> Shard:
        if not parameter.requires_grad:  # whole on every rank, which looks after an equal part of its mask
            part = -(-parameter.numel() // dist.get_world_size(self.group))
            return Shard.equal_part(name, stored_cut_of(parameter), part, dist.get_rank(self.group))
        mapping = _mapping(parameter)
        address = None if mapping is None else mapping.lp_fragment_address
        start, length = (0, 0) if address is None else (address.start, address.numel)
        return Shard(name, stored_cut_of(parameter), start, length)

    def _place(self, i: int) -> tuple[torch.Tensor, int]:
        if self.frozen(i):
            return self.parameters[i], self.slices[i].start
        mapping = _mapping(self.parameters[i])
        start = 0 if mapping is None else mapping.hp_fragment_address.start
        return self.zero.single_partition_of_fp32_groups[self._group_of[i]], start


class CutParameters(Partitioned):
    """Stage 3: each parameter is split into equal parts; the padding that the last parts may have is left out here."""

    def __init__(self, engine: Any, parameters: dict[str, nn.Parameter], alone: bool = False):
        super().__init__(engine, parameters, alone)
        self.offloaded = self.zero.offload_optimizer
        at = {
            id(p): self.zero.grad_position.get(self.zero.get_param_id(p))
            for p in self.parameters
            if p.requires_grad and not is_empty(p)
        }
        groups = {key: place[0] for key, place in at.items() if place is not None}
        self._group_of = _agreed_groups(engine, self.parameters, groups, alone)

    def gradient(self, i: int) -> torch.Tensor | None:
        if self.frozen(i):
            return None
        if is_empty(self.parameters[i]):
            return self.weight(i)
        # DeepSpeed's safe_get_local_grad would copy it, and from the CPU to the accelerator where it is offloaded
        live, _ = self.zero._get_fp32_grad_state_partition(self.parameters[i], release_swap_buffers=True)
        return live.view(-1)[: self.slices[i].length]

    def read(self, i: int) -> torch.Tensor:
        parameter: Any = self.parameters[i]
        if is_whole(parameter):  # the copy that the forward reads
            return super().read(i)
        return parameter.ds_tensor.detach().view(-1)[: self.slices[i].length]

    def zero_read(self, i: int, active: torch.Tensor) -> None:
        parameter: Any = self.parameters[i]
        parameter.ds_tensor.data.view(-1)[: active.numel()].masked_fill_(~active.to(parameter.ds_tensor.device), 0)
        if is_whole(parameter):
            super().zero_read(i, active)

    def _place(self, i: int) -> tuple[torch.Tensor, int]:
        parameter: Any = self.parameters[i]
        if self.frozen(i):
            return parameter.ds_tensor, 0
        if is_empty(parameter):
            return self.zero.fp32_partitioned_groups_flat[self._group_of[i]], 0
        group, offset, _ = self.zero.grad_position[self.zero.get_param_id(self.parameters[i])]
        return self.zero.fp32_partitioned_groups_flat[group], offset

    def _slice(self, name: str, parameter: Any) -> Shard:
        part = parameter.partition_numel()
        return Shard.equal_part(name, stored_cut_of(parameter), part, dist.get_rank(self.group))


def is_whole(parameter: Any) -> bool:
    """Whether ZeRO-3 has the whole parameter on every rank now, as it keeps small ones."""
    return hasattr(parameter, "ds_tensor") and parameter.ds_status.name == "AVAILABLE"


def _mapping(parameter: Any) -> Any:
    """Where ZeRO-1 or 2 keeps this rank's part of a parameter; None where it owns none of it."""
    return getattr(parameter, "_hp_mapping", None)


def _agreed_groups(engine: Any, parameters: list[nn.Parameter], groups: dict[int, int], alone: bool) -> list[int]:
    """Which group of the optimizer updates each parameter, by its place in the list; `groups` says it by id.

    Groups are updated one after the other, and masks of a cut layer change on all ranks of its slices together. So they
    must agree on the group, where one has an empty slice, which is in no group of its optimizer, too.
    """
    mine = torch.tensor([groups.get(id(p), -1) for p in parameters], dtype=torch.int64, device=engine.device)
    if tensor_slices(engine) == 1 or not parameters or alone:
        return mine.tolist()
    together, most = groups_of(engine).same_layers, mine.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=together)
    differs = ((mine >= 0) & (mine != most)).any().to(torch.int64)
    dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=together)
    if differs:
        raise UserError(
            "layers are split unevenly, so DeepSpeed would update them in different sub-groups on different ranks: set "
            "zero_optimization.sub_group_size to more than the number of weights of the model"
        )
    return most.tolist()


def dense_store(engine: Any, parameters: dict[str, nn.Parameter], alone: bool = False) -> DenseStore:
    """Return the dense store of these parameters at the engine's ZeRO stage.

    Args:
        engine: the engine.
        parameters: the parameters by name.
        alone: whether one rank reads weights alone; the order in which groups are updated is not agreed on then.
    """
    kinds: tuple[type[DenseStore], ...] = (Replicated, FlatPartitions, FlatPartitions, CutParameters)
    return kinds[engine.zero_optimization_stage()](engine, parameters, alone)


def stage0_masters(optimizer: Any) -> dict[int, tuple[torch.Tensor, int]]:
    """Return, by a parameter's id, (fp32 tensor, offset) under DeepSpeed's two stage-0 mixed-precision optimizers."""
    masters: dict[int, tuple[torch.Tensor, int]] = {}
    if hasattr(optimizer, "fp32_groups_flat"):  # fused: one flat master per group
        for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            offset = 0
            for parameter in group:
                masters[id(parameter)] = (flat, offset)
                offset += parameter.numel()
    elif hasattr(optimizer, "fp32_groups"):  # unfused: one master per parameter
        for group, copies in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            masters.update({id(p): (copy, 0) for p, copy in zip(group, copies, strict=True)})
    return masters
