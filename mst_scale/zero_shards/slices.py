"""This rank's shard of each parameter, with live views of its master weight, gradient and optimizer states."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from torch import nn

from mst_scale.comm import Mesh
from mst_scale.errors import UserError
from mst_scale.shard import Shard
from mst_scale.zero_shards.groups import groups_of, is_cut_up, stage_count, tensor_slices
from mst_scale.zero_shards.logical import cut_of, is_cut, is_empty, named_parameters
from mst_scale.zero_shards.step import base_optimizer, total_norm

_INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Slices(ABC):
    """What the three layouts share: where a parameter's master weights lie, and all that lies as they do.

    A frozen parameter has no master copy: the forward reads its weights where they are, and no optimizer knows them.
    """

    optimizer: Any
    slices: list[Shard]

    def __init__(self, engine: Any, parameters: dict[str, nn.Parameter]):
        self.optimizer = base_optimizer(engine)
        self.parameters = list(parameters.values())
        self._frozen = [not p.requires_grad for p in self.parameters]

    def frozen(self, i: int) -> bool:
        """Whether the parameter was not trained when the engine was made: no optimizer state and no gradient is its."""
        return self._frozen[i]

    def owner(self, i: int) -> torch.Tensor:
        """The tensor among the base optimizer's parameters that this parameter's master weights are part of."""
        return self._place(i)[0]

    def weight(self, i: int) -> torch.Tensor:
        """Live fp32 master weights of this rank's slice, flat; of a frozen parameter, what the forward reads."""
        return self.part(i, self.owner(i))

    def has_master(self, i: int) -> bool:
        """Whether the forward reads a copy, which each step writes anew from the master weights."""
        return not self.frozen(i)

    def read(self, i: int) -> torch.Tensor:
        """Live weights that the forward reads of this rank's slice, flat; without a master copy, `weight` itself."""
        parameter: Any = self.parameters[i]
        return parameter.detach().view(-1).narrow(0, self.slices[i].start, self.slices[i].length)

    def matches_master(self, i: int) -> bool:
        """Whether the forward reads what the master weights of this rank's slice were rounded to, bit for bit."""
        if not self.has_master(i):
            return True
        read, weight = self.read(i), self.weight(i)
        same = _INTEGER_OF_SIZE[read.element_size()]  # a NaN is the same as itself here
        return torch.equal(read.view(same), weight.to(read.device, read.dtype).view(same))

    def states(self, i: int) -> dict[str, torch.Tensor]:
        """Live optimizer states of this rank's slice, flat, by their key ("exp_avg", "exp_avg_sq")."""
        owner = self.owner(i)
        return {
            key: self.part(i, value)
            for key, value in self.optimizer.state.get(owner, {}).items()
            if torch.is_tensor(value) and value.numel() == owner.numel() and value.dim() > 0
        }

    def within(self, tensors: Collection[int]) -> list[int]:
        """Return the parameters whose master weights are part of the tensors with these ids."""
        return [i for i in range(len(self.parameters)) if id(self.owner(i)) in tensors]

    def param_group(self, i: int) -> dict[str, Any]:
        """Return the base optimizer's group that updates this parameter; between updates ZeRO-3 keeps groups empty."""
        owner = self.owner(i)
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return next((group for group in groups if any(p is owner for p in group["params"])), {"params": [owner]})

    def updates(self, i: int) -> int:
        """Return how many updates Adam counts for this parameter: fewer than steps after an overflow or a warm start.

        DeepSpeed's FusedAdam counts a group's updates in the state of its last parameter.
        """
        state = self.optimizer.state
        return max(int(state.get(p, {}).get("step", 0)) for p in self.param_group(i)["params"])

    def second_moment_share(self, i: int) -> float:
        """Return 1 - β₂ᵗ: what Adam's second moment is by now of a squared gradient that never changed."""
        return float(1.0 - self.param_group(i)["betas"][1] ** self.updates(i))

    @abstractmethod
    def zero_read(self, i: int, active: torch.Tensor) -> None:
        """Zero what is inactive in what the forward pass reads, on all ranks together.

        Args:
            i: the parameter.
            active: flags of this rank's slice (bool). Where every rank reads the whole parameter (ZeRO-1 and 2, and
                what ZeRO-3 keeps whole) the flags of all ranks are brought together: one byte per weight, when weights
                are put in place and not in every step.
        """

    def part(self, i: int, like_owner: torch.Tensor) -> torch.Tensor:
        """This rank's slice, flat, of a tensor that lies as the master weights do."""
        return like_owner.detach().view(-1).narrow(0, self._place(i)[1], self.slices[i].length)

    @abstractmethod
    def _place(self, i: int) -> tuple[torch.Tensor, int]:
        """(owner, where the slice begins in it)."""


class Replicated(Slices):
    """Stage 0: every rank holds every parameter whole, so there is nothing to reconcile (`group` is None)."""

    group = None

    def __init__(self, engine: Any, parameters: dict[str, nn.Parameter]):
        super().__init__(engine, parameters)
        self.slices = [Shard(name, cut_of(p), 0, p.numel()) for name, p in parameters.items()]
        self._masters = _stage0_masters(engine.optimizer)
        self._any = next(iter(self._masters.values()), None)  # all masters are updated at once

    def has_master(self, i: int) -> bool:
        return id(self.parameters[i]) in self._masters

    def gradient(self, i: int) -> torch.Tensor | None:
        """The reduced, still loss-scaled gradient of this rank's slice, flat; write back with `put_gradient`."""
        gradient = self.parameters[i].grad
        return None if gradient is None else gradient.view(-1)

    def put_gradient(self, i: int, gradient: torch.Tensor) -> None:
        live = self.gradient(i)
        assert live is not None
        if live.data_ptr() != gradient.data_ptr():
            live.copy_(gradient)

    def zero_read(self, i: int, active: torch.Tensor) -> None:
        parameter: Any = self.parameters[i]
        parameter.data.view(-1).masked_fill_(~active.to(parameter.device), 0)

    def _place(self, i: int) -> tuple[torch.Tensor, int]:
        if self._any is not None and is_empty(self.parameters[i]):
            return self._any[0], 0
        return self._masters.get(id(self.parameters[i]), (self.parameters[i], 0))


class FlatPartitions(Slices):
    """Stages 1 and 2: a parameter group is one flat buffer cut evenly; a parameter may straddle ranks.

    What a rank owns nothing of has an empty slice there. Nothing is cached: DeepSpeed rebinds states on load.
    """

    def __init__(self, engine: Any, parameters: dict[str, nn.Parameter]):
        super().__init__(engine, parameters)
        self.zero = engine.optimizer
        self.group = self.zero.dp_process_group
        self.slices = [self._slice(name, p) for name, p in parameters.items()]
        groups = {id(p): g for g, group in enumerate(self.zero.bit16_groups) for p in group}
        self._group_of = agreed_groups(engine, self.parameters, groups)

    def gradient(self, i: int) -> torch.Tensor | None:
        parameter: Any = self.parameters[i]
        if self.frozen(i):
            return None
        if _mapping(parameter) is None:
            return self.weight(i)  # empty
        if self.zero.cpu_offload:  # gradients travel to the CPU while backward goes on
            self.zero._wait_for_offload_copies()
        flat: torch.Tensor = parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group).view(-1)
        return flat

    def put_gradient(self, i: int, gradient: torch.Tensor) -> None:
        _put(self, i, gradient, self.zero.cpu_offload)

    def zero_read(self, i: int, active: torch.Tensor) -> None:
        _zero_whole(self, i, active)

    def _slice(self, name: str, parameter: nn.Parameter) -> Shard:
        if not parameter.requires_grad:  # whole on every rank, which looks after an equal part of its mask
            part = -(-parameter.numel() // dist.get_world_size(self.group))
            start = min(part * dist.get_rank(self.group), parameter.numel())
            return Shard(name, cut_of(parameter), start, min(part, parameter.numel() - start))
        mapping = _mapping(parameter)
        address = None if mapping is None else mapping.lp_fragment_address
        start, length = (0, 0) if address is None else (address.start, address.numel)
        return Shard(name, cut_of(parameter), start, length)

    def _place(self, i: int) -> tuple[torch.Tensor, int]:
        if self.frozen(i):
            return self.parameters[i], self.slices[i].start
        mapping = _mapping(self.parameters[i])
        start = 0 if mapping is None else mapping.hp_fragment_address.start
        return self.zero.single_partition_of_fp32_groups[self._group_of[i]], start


class CutParameters(Slices):
    """Stage 3: each parameter is cut on its own into equal parts; the last parts may hold padding, left out here."""

    def __init__(self, engine: Any, parameters: dict[str, nn.Parameter]):
        super().__init__(engine, parameters)
        self.zero = engine.optimizer
        self.group = self.zero.dp_process_group
        self.slices = [self._slice(name, p) for name, p in parameters.items()]
        at = {
            id(p): self.zero.grad_position.get(self.zero.get_param_id(p))
            for p in self.parameters
            if p.requires_grad and not is_empty(p)
        }
        groups = {key: place[0] for key, place in at.items() if place is not None}
        self._group_of = agreed_groups(engine, self.parameters, groups)

    def gradient(self, i: int) -> torch.Tensor | None:
        if self.frozen(i):
            return None
        if is_empty(self.parameters[i]):
            return self.weight(i)
        # DeepSpeed's safe_get_local_grad would copy it, and from the CPU to the accelerator where it is offloaded
        live, _ = self.zero._get_fp32_grad_state_partition(self.parameters[i], release_swap_buffers=True)
        flat: torch.Tensor = live.view(-1)[: self.slices[i].length]
        return flat

    def put_gradient(self, i: int, gradient: torch.Tensor) -> None:
        _put(self, i, gradient, self.zero.offload_optimizer)

    def read(self, i: int) -> torch.Tensor:
        parameter: Any = self.parameters[i]
        if _is_whole(parameter):  # the copy that the forward reads
            return super().read(i)
        part: torch.Tensor = parameter.ds_tensor
        return part.detach().view(-1)[: self.slices[i].length]

    def zero_read(self, i: int, active: torch.Tensor) -> None:
        parameter: Any = self.parameters[i]
        parameter.ds_tensor.data.view(-1)[: active.numel()].masked_fill_(~active.to(parameter.ds_tensor.device), 0)
        if _is_whole(parameter):
            _zero_whole(self, i, active)

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
        start = min(part * dist.get_rank(self.group), parameter.ds_numel)
        return Shard(name, cut_of(parameter), start, min(part, parameter.ds_numel - start))


def _zero_whole(shards: FlatPartitions | CutParameters, i: int, active: torch.Tensor) -> None:
    """Zero what is inactive in a parameter that every rank holds whole; `active` flags this rank's slice."""
    parameter: Any = shards.parameters[i]
    start = shards.slices[i].start
    whole = torch.zeros(parameter.numel(), dtype=torch.uint8, device=parameter.device)
    whole[start : start + active.numel()] = active.to(parameter.device)
    dist.all_reduce(whole, group=shards.group)
    parameter.data.view(-1).masked_fill_(~whole.bool(), 0)


def _is_whole(parameter: Any) -> bool:
    """Whether ZeRO-3 has the whole parameter on every rank now, as it keeps small ones."""
    return hasattr(parameter, "ds_tensor") and parameter.ds_status.name == "AVAILABLE"


def _mapping(parameter: Any) -> Any:
    """Where ZeRO-1 or 2 keeps this rank's part of a parameter; None where it owns none of it."""
    return getattr(parameter, "_hp_mapping", None)


def agreed_groups(engine: Any, parameters: list[nn.Parameter], groups: dict[int, int]) -> list[int]:
    """Which group of the optimizer updates each parameter, by its place in the list; `groups` says it by id.

    Groups are updated one after the other, and masks of a cut layer change on all ranks of its slices together. So they
    must agree on the group, where one has an empty slice, which is in no group of its optimizer, too.
    """
    mine = torch.tensor([groups.get(id(p), -1) for p in parameters], dtype=torch.int64, device=engine.device)
    if tensor_slices(engine) == 1 or not parameters:
        found: list[int] = mine.tolist()
        return found
    together, most = groups_of(engine).same_layers, mine.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=together)
    differs = ((mine >= 0) & (mine != most)).any().to(torch.int64)
    dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=together)
    if differs:
        raise UserError(
            "layers are cut unevenly, and DeepSpeed updates them in other sub-groups on some ranks than on others: set "
            "zero_optimization.sub_group_size higher than the model has weights"
        )
    agreed: list[int] = most.tolist()
    return agreed


def _put(shards: FlatPartitions | CutParameters, i: int, gradient: torch.Tensor, offloaded: bool) -> None:
    live = shards.gradient(i)
    assert live is not None
    if live.data_ptr() != gradient.data_ptr():
        live.copy_(gradient)
    if offloaded and shards.slices[i].length:
        # its norm was recorded during backward, from the gradient as it was then; on the accelerator, like those of
        # the parameters that are not sparse, to which ZeRO-3 adds it
        where = get_accelerator().current_device_name()
        norm = torch.tensor(total_norm([gradient]), dtype=torch.float64, device=where)
        shards.zero.norm_for_param_grads[shards.zero.get_param_id(shards.parameters[i])] = norm


Shards = Replicated | FlatPartitions | CutParameters


def shards_of(engine: Any, parameters: dict[str, nn.Parameter]) -> Shards:
    """Where the slices of these parameters lie on this rank. What cannot be right is refused with the reason."""
    refuse_untested(engine)
    return laid_out(engine, parameters)


def laid_out(engine: Any, parameters: dict[str, nn.Parameter]) -> Shards:
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return Replicated(engine, parameters)
    return CutParameters(engine, parameters) if stage == 3 else FlatPartitions(engine, parameters)


def refuse_arguments(model: nn.Module, *more: Any, **others: Any) -> None:
    """Refuse what of `deepspeed.initialize`'s arguments, from the fifth on, masks cannot follow."""
    given = inspect.signature(deepspeed.initialize).bind(None, model, None, None, *more, **others).arguments
    if given.get("mesh_param") is not None:
        raise UserError(
            "mesh_param does not go with sparse training: DeepSpeed would leave the gradients of one sequence's ranks "
            "unreduced: give mpu=mst_scale.comm.Mesh(ParallelDims(sequence=…)) in its place, or train with method dense"
        )
    if given.get("mpu") is not None:
        _refuse_mpu(given["mpu"])


def refuse_untested(engine: Any) -> None:
    """Refuse what DeepSpeed has built other than masks know.

    What the config of a sparse run says is refused before (config/support). This looks at the engine itself: at what
    became of "auto" and of arguments, and at dense runs that take their weights from a checkpoint.
    """
    kind = type(engine.optimizer).__name__
    if kind == "BF16_Optimizer":
        raise UserError(
            "bf16 with ZeRO-1 and data_types.grad_accum_dtype = fp32 takes its gradient norm from full gradients, "
            "which no rank can mask with its shard of the masks: use ZeRO-2, or leave grad_accum_dtype out"
        )
    zero = engine._config.zero_config
    stage = engine.zero_optimization_stage()
    untested = {
        "zero_optimization.zenflow": zero.zenflow is not None,
        "compile.deepcompile": bool(engine._config.compile_config.deepcompile),
        "zero_optimization.mics_shard_size": getattr(zero, "mics_shard_size", -1) > 0,
        "zero_optimization.zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
        # DeepSpeed reduces gradients over data_parallel_size alone, so ranks of one sequence would part
        "sequence_parallel_size": engine.sequence_parallel_size > 1 and not _names_same_weights(engine.mpu),
        "a model-parallel unit (mpu)": not _known(engine),
        "Muon in layers or models cut over ranks": is_cut_up(engine) and uses_muon(engine),
        "mixture-of-experts layers": bool(engine.has_moe_layers),
        "torch_autocast": bool(engine.torch_autocast_enabled()),
        "per_head_muon": any(getattr(p, "muon_num_heads", None) for p in engine.module.parameters()),
    }
    for name, used in untested.items():
        if used:
            raise UserError(f"sparse training is not tested with {name}: remove it, or train with method dense")
    ours = isinstance(engine.mpu, Mesh) and engine.mpu.sizes.tensor > 1 and stage_count(engine) == 1
    if ours and not any(map(is_cut, engine.module.parameters())):
        raise UserError(
            f"the mesh cuts layers over {engine.mpu.sizes.tensor} ranks, and {type(engine.module).__name__} has none "
            "that is cut: build it with TensorGroup.of(mesh), or make the mesh without tensor"
        )
    if engine.bfloat16_enabled() and stage in (1, 2) and not engine._config.bfloat16_config.check_grad_overflow:
        raise UserError("bf16.check_grad_overflow = false would let bad gradients choose the topology: set it to true")
    if stage in (1, 2) and not zero.compute_grad_norm and not (engine.bfloat16_enabled() or engine.fp16_enabled()):
        raise UserError(
            "zero_optimization.compute_grad_norm = false in fp32 would let bad gradients choose the topology: set it "
            "to true"
        )
    if engine.zero_optimization() and engine.zero_round_robin_gradients():
        raise UserError(
            "zero_optimization.round_robin_gradients reorders shards so that masks cannot follow: set it to false"
        )
    offload = engine.zero_offload_optimizer() if engine.zero_optimization() else None
    if _on_nvme(offload):
        raise UserError("masks cannot follow optimizer states to NVMe: set offload_optimizer.device to cpu")
    if _on_nvme(zero.offload_param):
        raise UserError("masks cannot follow weights to NVMe: set offload_param.device to cpu")
    if offload is not None and getattr(offload, "super_offload", False) and stage == 3:
        raise UserError(
            "offload_optimizer.super_offload hands gradients to another process before they can be masked: set it to "
            "false"
        )
    if offload is not None and getattr(offload, "ratio", 1.0) != 1.0:
        raise UserError(f"offload_optimizer.ratio = {offload.ratio} is untested with sparse training: set it to 1.0")


def _refuse_mpu(mpu: Any) -> None:
    cure = "give mst_scale.comm.Mesh, or train with method dense"
    if not _names_same_weights(mpu):
        raise UserError(
            "this mpu does not go with sparse training: it has no get_sequence_data_parallel_group, which names the "
            f"ranks that hold the same weights: {cure}"
        )
    data = getattr(mpu, "get_data_parallel_group", None)
    same = mpu.get_sequence_data_parallel_group()
    if data is not None and dist.get_process_group_ranks(data()) != dist.get_process_group_ranks(same):
        raise UserError(
            "this mpu does not go with sparse training: its get_data_parallel_group, by which DeepSpeed cuts weights "
            "at stage 3 and names the files of checkpoints, must be the ranks of get_sequence_data_parallel_group: "
            f"{cure}"
        )


def _names_same_weights(mpu: Any) -> bool:
    return hasattr(mpu, "get_sequence_data_parallel_group")


def _known(engine: Any) -> bool:
    """Whether we know which ranks hold the same weights: from our mesh or one like it, from AutoTP, from a pipeline."""
    made_here = engine.autotp_size() > 1 or stage_count(engine) > 1 or isinstance(engine.module, PipelineModule)
    return engine.mpu is None or made_here or _names_same_weights(engine.mpu)


def uses_muon(engine: Any) -> bool:
    """Newton-Schulz wants a matrix whole."""
    return any("use_muon" in group for group in base_optimizer(engine).param_groups)


def _on_nvme(offload: Any) -> bool:
    return offload is not None and str(getattr(offload.device, "value", offload.device)) == "nvme"


def _stage0_masters(optimizer: Any) -> dict[int, tuple[torch.Tensor, int]]:
    """id(parameter) → (fp32 tensor, offset) under DeepSpeed's two stage-0 mixed-precision optimizers."""
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


# --- what the forward reads ---


def put_reads(engine: Any, name: str, parameter: Any, values: Callable[[Shard], torch.Tensor]) -> None:
    """Write what the forward reads of a parameter, trained or not; `values` gives those of a shard of it, flat."""
    cut = cut_of(parameter)

    def read(start: int, end: int) -> torch.Tensor:
        return values(Shard(name, cut, start, end - start))

    if not hasattr(parameter, "ds_tensor"):
        parameter.data.copy_(read(0, parameter.numel()).view(parameter.shape))
        return
    part, numel = parameter.partition_numel(), parameter.ds_numel
    start = min(part * dist.get_rank(engine.optimizer.dp_process_group), numel)
    length = min(part, numel - start)
    if length:
        parameter.ds_tensor.data.view(-1)[:length].copy_(read(start, start + length))
    if _is_whole(parameter):
        parameter.data.copy_(read(0, numel).view(parameter.ds_shape))


def put_weights(engine: Any, names: Collection[str], values: Callable[[Shard], torch.Tensor]) -> None:
    """Write parameters of the model, master weights and what the forward reads; `values` gives those of a shard, flat
    and in float32. Call it on every rank."""
    parameters = {name: p for name, p in named_parameters(engine.module) if name in names}
    shards = shards_of(engine, {name: p for name, p in parameters.items() if p.requires_grad})
    with torch.no_grad():
        for i, part in enumerate(shards.slices):
            if part.length:
                shards.weight(i).copy_(values(part))
        for name, parameter in parameters.items():
            put_reads(engine, name, parameter, values)


def stamp(parameter: Any) -> tuple[int, ...]:
    """Changes when somebody writes the parameter in place or puts another tensor in its place, not when ZeRO gathers
    it. What is written through `.data` escapes it."""
    part = getattr(parameter, "ds_tensor", None)
    if part is None:
        return parameter._version, parameter.data_ptr()
    return parameter._version, part._version
