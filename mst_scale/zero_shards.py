"""Where does DeepSpeed keep what we need? The only file that reads its internals (0.19.x).

Construction under ZeRO-3; the optimizer step and its norm; for every sparse parameter this rank's slice, with live
views of its master weight, reduced gradient and optimizer states; hooks around the step; saves that fail together.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as ds_comm
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_local_grad, safe_set_local_grad
from torch import nn

from mst_scale import untrusted

# --- construction ---


def zero_stage(deepspeed_config: dict[str, Any]) -> int:
    return int(deepspeed_config.get("zero_optimization", {}).get("stage", 0))


def partitioned_construction(deepspeed_config: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """Under ZeRO-3 each parameter is cut up as soon as it is made, so that no rank ever holds the whole model."""
    if zero_stage(deepspeed_config) < 3:
        return contextlib.nullcontext()
    return deepspeed.zero.Init(config_dict_or_path=deepspeed_config)


@contextlib.contextmanager
def whole(parameter: nn.Parameter) -> Iterator[bool]:
    """The parameter with all its values, whether or not ZeRO-3 has cut it; what rank 0 writes into it reaches all.

    Yields whether this rank's values are those that count. Uncut parameters are replaced by rank 0's when DeepSpeed
    takes the model over.
    """
    if not hasattr(parameter, "ds_id"):
        yield True
        return
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        yield dist.get_rank() == 0


def shape_of(parameter: nn.Parameter) -> torch.Size:
    """The full shape; a parameter cut by ZeRO-3 is empty in itself."""
    return getattr(parameter, "ds_shape", parameter.shape)


def is_matrix(parameter: nn.Parameter) -> bool:
    return len(shape_of(parameter)) > 1


# --- the optimizer step ---


def base_optimizer(engine: Any) -> Any:
    """The optimizer that updates master weights, under whatever DeepSpeed has wrapped around it."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def has_moments(engine: Any) -> bool:
    """Whether the optimizer averages gradients as Adam does."""
    return all("betas" in group for group in base_optimizer(engine).param_groups)


def grad_norm(engine: Any) -> float | None:
    """Norm of the last update's gradient, before clipping; None where DeepSpeed does not compute one."""
    norm = engine.get_global_grad_norm()
    return None if norm is None else float(norm) / _norm_scale(engine)


def guard_plain_step(engine: Any) -> None:
    """Stage 0 in fp32: DeepSpeed calls the client's optimizer itself. Give that step what its own optimizers have.

    The norm is recorded and the same on every rank (gradients are replicated), and an update with a gradient that is
    not finite is skipped and reported as overflow.
    """
    optimizer: Any = engine.optimizer
    if base_optimizer(engine) is not optimizer or engine.mpu is not None:
        return
    step, clip = optimizer.step, engine.gradient_clipping()
    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    engine.clip_fp32_gradients = lambda: None  # done below, where the norm is kept

    def guarded() -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = total_norm(gradients)
        optimizer.overflow = not math.isfinite(norm)
        optimizer._global_grad_norm = norm
        if optimizer.overflow:
            return
        if 0 < clip < norm:
            torch._foreach_mul_(gradients, clip / (norm + 1e-6))
        step()

    optimizer.step = guarded


def scale_plain_loss(engine: Any) -> None:
    """Stage 0 in fp16: DeepSpeed 0.19.8 divides gradients by the loss scale without having multiplied the loss by it.

    Small gradients would underflow, the norm and its clipping would be off by the scale. What goes into backward is
    multiplied here, unless it is already: a later version may do so itself.
    """
    if engine.zero_optimization() or not engine.fp16_enabled():
        return
    inner = engine.backward

    def backward(loss: torch.Tensor, *args: Any, **others: Any) -> Any:
        scale = loss_scale(engine)
        loss.register_hook(lambda gradient: torch.where(gradient <= 1, gradient * scale, gradient))
        return inner(loss, *args, **others)

    engine.backward = backward


NORM_PIECE = 1 << 16  # values whose squares are added in float32, as torch does for a whole tensor


def total_norm(gradients: list[torch.Tensor]) -> float:
    """L2 norm over all tensors: float32 within pieces, float64 over them (a float64 copy of all costs 10 times)."""
    pieces = [piece for g in gradients for piece in g.detach().reshape(-1).split(NORM_PIECE) if piece.numel()]
    if not pieces:
        return 0.0
    return math.sqrt(torch.stack(torch._foreach_norm(pieces)).double().square().sum().item())


class NamedCollectives:
    """DeepSpeed's collectives under a name of ours, so that its comms_logger tells them from its own."""

    def __init__(self, name: str):
        self.all_reduce = functools.partial(ds_comm.all_reduce, log_name=f"{name}_all_reduce")


# --- where shards lie ---


@dataclass(frozen=True)
class Slice:
    """This rank's part [start, start + length) of a flattened parameter; the length may be 0."""

    name: str
    shape: tuple[int, ...]
    start: int
    length: int


class Replicated:
    """Stage 0: every rank holds every parameter whole, so there is nothing to reconcile (`group` is None)."""

    group = None

    def __init__(self, engine: Any, parameters: dict[str, nn.Parameter]):
        self.optimizer = base_optimizer(engine)
        self.parameters = list(parameters.values())
        self.slices = [Slice(name, tuple(p.shape), 0, p.numel()) for name, p in parameters.items()]
        self._masters = _stage0_masters(engine.optimizer)

    def owner(self, i: int) -> torch.Tensor:
        """The tensor among the base optimizer's parameters that this parameter's master weights are part of."""
        return self._master(i)[0]

    def weight(self, i: int) -> torch.Tensor:
        """Live fp32 master weights of this rank's slice, flat."""
        flat, offset = self._master(i)
        return flat.detach().view(-1).narrow(0, offset, self.slices[i].length)

    def states(self, i: int) -> dict[str, torch.Tensor]:
        """Live optimizer states of this rank's slice, flat, by their key ("exp_avg", "exp_avg_sq")."""
        flat, offset = self._master(i)
        return _states_of(self.optimizer, flat, offset, self.slices[i].length)

    def gradient(self, i: int) -> torch.Tensor | None:
        """The reduced, still loss-scaled gradient of this rank's slice, flat; write back with `put_gradient`."""
        gradient = self.parameters[i].grad
        return None if gradient is None else gradient.view(-1)

    def put_gradient(self, i: int, gradient: torch.Tensor) -> None:
        live = self.gradient(i)
        assert live is not None
        if live.data_ptr() != gradient.data_ptr():
            live.copy_(gradient)

    def _master(self, i: int) -> tuple[torch.Tensor, int]:
        return self._masters.get(id(self.parameters[i]), (self.parameters[i], 0))


class FlatPartitions:
    """Stages 1 and 2: a parameter group is one flat buffer cut evenly; a parameter may straddle ranks.

    What a rank owns nothing of has an empty slice there. Nothing is cached: DeepSpeed rebinds states on load.
    """

    def __init__(self, engine: Any, parameters: dict[str, nn.Parameter]):
        self.zero = engine.optimizer
        self.optimizer = base_optimizer(engine)
        self.group = self.zero.dp_process_group
        self.parameters = list(parameters.values())
        self.slices = [self._slice(name, p) for name, p in parameters.items()]
        self._group_of = {id(p): g for g, group in enumerate(self.zero.bit16_groups) for p in group}

    def owner(self, i: int) -> torch.Tensor:
        return self.zero.single_partition_of_fp32_groups[self._group_of[id(self.parameters[i])]]

    def weight(self, i: int) -> torch.Tensor:
        flat, start = self.owner(i), self._hp_start(i)
        return flat.detach().view(-1).narrow(0, start, self.slices[i].length)

    def states(self, i: int) -> dict[str, torch.Tensor]:
        return _states_of(self.optimizer, self.owner(i), self._hp_start(i), self.slices[i].length)

    def gradient(self, i: int) -> torch.Tensor | None:
        parameter = self.parameters[i]
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return self.weight(i)  # empty
        if self.zero.cpu_offload:  # gradients travel to the CPU while backward goes on
            self.zero._wait_for_offload_copies()
        return mapping.get_lp_grad_fragment(parameter._index_in_param_group).view(-1)  # type: ignore[attr-defined]

    def put_gradient(self, i: int, gradient: torch.Tensor) -> None:
        live = self.gradient(i)
        assert live is not None
        if live.data_ptr() != gradient.data_ptr():
            live.copy_(gradient)
        if self.zero.cpu_offload and self.slices[i].length:
            # with offload the norm was recorded during backward, from the gradient as it was then
            norm = gradient.double().norm(2)
            self.zero.norm_for_param_grads[self.zero.get_param_id(self.parameters[i])] = norm

    def _slice(self, name: str, parameter: nn.Parameter) -> Slice:
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        address = None if mapping is None else mapping.lp_fragment_address
        start, length = (0, 0) if address is None else (address.start, address.numel)
        return Slice(name, tuple(parameter.shape), start, length)

    def _hp_start(self, i: int) -> int:
        mapping = self.parameters[i]._hp_mapping  # type: ignore[attr-defined]
        return 0 if mapping is None else mapping.hp_fragment_address.start


class CutParameters:
    """Stage 3: each parameter is cut on its own into equal parts; the last parts may hold padding, left out here."""

    def __init__(self, engine: Any, parameters: dict[str, nn.Parameter]):
        self.zero = engine.optimizer
        self.optimizer = base_optimizer(engine)
        self.group = self.zero.dp_process_group
        self.parameters = list(parameters.values())
        self.slices = [self._slice(name, p) for name, p in parameters.items()]

    def owner(self, i: int) -> torch.Tensor:
        return self.zero.fp32_partitioned_groups_flat[self._position(i)[0]]

    def weight(self, i: int) -> torch.Tensor:
        return self.owner(i).detach().view(-1).narrow(0, self._position(i)[1], self.slices[i].length)

    def states(self, i: int) -> dict[str, torch.Tensor]:
        return _states_of(self.optimizer, self.owner(i), self._position(i)[1], self.slices[i].length)

    def gradient(self, i: int) -> torch.Tensor | None:
        whole = safe_get_local_grad(self.parameters[i])  # on the accelerator, also where the optimizer is offloaded
        return None if whole is None else whole.view(-1)[: self.slices[i].length].to(self.owner(i).device)

    def put_gradient(self, i: int, gradient: torch.Tensor) -> None:
        parameter = self.parameters[i]
        if gradient.numel() == parameter.partition_numel():  # type: ignore[attr-defined]
            safe_set_local_grad(parameter, gradient)
        else:
            padded = gradient.new_zeros(parameter.partition_numel())  # type: ignore[attr-defined]
            padded[: gradient.numel()] = gradient
            safe_set_local_grad(parameter, padded)

    def _position(self, i: int) -> tuple[int, int]:
        group, offset, _ = self.zero.grad_position[self.zero.get_param_id(self.parameters[i])]
        return group, offset

    def _slice(self, name: str, parameter: Any) -> Slice:
        part = parameter.partition_numel()
        start = min(part * dist.get_rank(self.group), parameter.ds_numel)
        return Slice(name, tuple(parameter.ds_shape), start, min(part, parameter.ds_numel - start))


Shards = Replicated | FlatPartitions | CutParameters


def shards_of(engine: Any, parameters: dict[str, nn.Parameter]) -> Shards:
    """Where the slices of these parameters lie on this rank. What cannot be right is refused with the reason."""
    _refuse_untested(engine)
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return Replicated(engine, parameters)
    return CutParameters(engine, parameters) if stage == 3 else FlatPartitions(engine, parameters)


def _refuse_untested(engine: Any) -> None:
    kind = type(engine.optimizer).__name__
    if kind == "BF16_Optimizer":
        raise ValueError(
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
        "tensor_parallel.autotp_size": engine.autotp_size() > 1,
        "a model-parallel unit (mpu)": engine.mpu is not None,
        "mixture-of-experts layers": bool(engine.has_moe_layers),
        "torch_autocast": bool(engine.torch_autocast_enabled()),
        # mixes rows and columns of a masked update, so that masked weights would move
        "Muon": any(group.get("use_muon") for group in base_optimizer(engine).param_groups),
    }
    for name, used in untested.items():
        if used:
            raise ValueError(f"sparse training is not tested with {name}: remove it, or train with method dense")
    if engine.bfloat16_enabled() and stage in (1, 2) and not engine._config.bfloat16_config.check_grad_overflow:
        raise ValueError("bf16.check_grad_overflow = false would let bad gradients choose the topology: set it to true")
    if engine.zero_optimization() and engine.zero_round_robin_gradients():
        raise ValueError(
            "zero_optimization.round_robin_gradients reorders shards so that masks cannot follow: set it to false"
        )
    offload = engine.zero_offload_optimizer() if engine.zero_optimization() else None
    if offload is not None and str(getattr(offload.device, "value", offload.device)) == "nvme":
        raise ValueError("masks cannot follow optimizer states to NVMe: set offload_optimizer.device to cpu")
    if offload is not None and getattr(offload, "ratio", 1.0) != 1.0:
        raise ValueError(f"offload_optimizer.ratio = {offload.ratio} is untested with sparse training: set it to 1.0")


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


def _states_of(optimizer: Any, flat: torch.Tensor, offset: int, length: int) -> dict[str, torch.Tensor]:
    return {
        key: value.view(-1).narrow(0, offset, length)
        for key, value in optimizer.state.get(flat, {}).items()
        if torch.is_tensor(value) and value.numel() == flat.numel() and value.dim() > 0
    }


# --- hooks ---


def around_model_step(engine: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call `before` once per accumulation boundary, with reduced gradients, before clipping; `after` at its end."""
    inner = engine._take_model_step

    def step(lr_kwargs: Any) -> None:
        before()
        inner(lr_kwargs)
        after()

    engine._take_model_step = step


def after_master_update(engine: Any, hook: Callable[[set[int]], None]) -> None:
    """Call `hook` after each update of master weights, before the low-precision copy and gather.

    It gets the ids of the tensors just updated: ZeRO-1/2 update once per parameter group, ZeRO-3 per sub-group, in the
    same order on all ranks. After an overflow the base optimizer is not called, and so neither is the hook.
    """

    def post(optimizer: Any, args: Any, kwargs: Any) -> None:
        hook({id(p) for group in optimizer.param_groups for p in group["params"]})

    base_optimizer(engine).register_step_post_hook(post)


def after_loading(engine: Any, hook: Callable[[], None]) -> None:
    """Call `hook` after each `engine.load_checkpoint`."""
    load = engine.load_checkpoint

    def load_checkpoint(*args: Any, **others: Any) -> Any:
        loaded = load(*args, **others)
        hook()
        return loaded

    engine.load_checkpoint = load_checkpoint


def loss_scale(engine: Any) -> float:
    """What the gradients are multiplied by before the optimizer's step (1 without fp16)."""
    if not engine.fp16_enabled():
        return 1.0
    optimizer = engine.optimizer
    config = getattr(optimizer, "loss_scale_config", None)
    return float(config.cur_scale if config is not None else optimizer.loss_scale)


def clip_factor(engine: Any) -> float:
    """What clipping multiplied the last gradient by."""
    clip, norm = engine.gradient_clipping(), getattr(engine.optimizer, "_global_grad_norm", None)
    if not clip or norm is None:
        return 1.0
    return min(1.0, clip / (float(norm) / _norm_scale(engine) + 1e-6))


def _norm_scale(engine: Any) -> float:
    """One of DeepSpeed's optimizers reports the norm of the gradient as it is scaled; the others divide first."""
    return loss_scale(engine) if type(engine.optimizer).__name__ == "FP16_UnfusedOptimizer" else 1.0


def zero_inactive(shards: Shards, i: int, active: torch.Tensor) -> None:
    """Zero what is inactive in what the forward reads; `active` flags this rank's slice (bool).

    Under ZeRO-1/2 every rank reads the whole parameter, so the flags of all ranks are brought together: one byte a
    weight, once, before the first step.
    """
    parameter: Any = shards.parameters[i]
    if isinstance(shards, CutParameters):
        parameter.ds_tensor.data.view(-1)[: active.numel()].masked_fill_(~active.to(parameter.ds_tensor.device), 0)
        return
    if isinstance(shards, FlatPartitions):
        start = shards.slices[i].start
        whole = torch.zeros(parameter.numel(), dtype=torch.uint8, device=parameter.device)
        whole[start : start + active.numel()] = active.to(parameter.device)
        dist.all_reduce(whole, group=shards.group)
        active = whole.bool()
    parameter.data.view(-1).masked_fill_(~active.to(parameter.device), 0)


def put_reads(engine: Any, parameter: Any, read: Callable[[int, int], torch.Tensor]) -> None:
    """Write what the forward reads of a parameter, trained or not; `read` gives its flattened values [start, end)."""
    if not hasattr(parameter, "ds_tensor"):
        parameter.data.copy_(read(0, parameter.numel()).view(parameter.shape))
        return
    part, numel = parameter.partition_numel(), parameter.ds_numel
    start = min(part * dist.get_rank(engine.optimizer.dp_process_group), numel)
    length = min(part, numel - start)
    if length:
        parameter.ds_tensor.data.view(-1)[:length].copy_(read(start, start + length))
    if parameter.ds_status.name == "AVAILABLE":  # small ones stay whole on every rank
        parameter.data.copy_(read(0, numel).view(parameter.ds_shape))


def data_parallel_group(engine: Any) -> Any:
    """The ranks that hold the same model."""
    return engine.seq_data_parallel_group


# --- checkpoints ---


@contextlib.contextmanager
def errors_after_saving(engine: Any) -> Iterator[None]:
    """Let a save run to its end on every rank, then raise what went wrong on this one.

    DeepSpeed meets at barriers while it saves: a rank that raises in between (its disk is full) would leave the others
    waiting there.
    """
    inner, recovery = engine.checkpoint_engine, engine._copy_recovery_script
    errors: list[Exception] = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def save(self, state_dict: Any, path: str) -> None:
            attempt(lambda: inner.save(state_dict, path))

    def attempt(what: Any) -> None:
        try:
            what()
        except (OSError, RuntimeError) as error:  # torch's writers report a full disk as RuntimeError
            errors.append(error)

    engine.checkpoint_engine = Recorder()
    engine._copy_recovery_script = lambda path: attempt(lambda: recovery(path))
    try:
        yield
    finally:
        engine.checkpoint_engine, engine._copy_recovery_script = inner, recovery
    if errors:
        raise errors[0]


def saved_classes() -> list[Any]:
    """What DeepSpeed's checkpoints hold beside data."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


def load_checkpoint(engine: Any, checkpoint: Path, universal: bool = False) -> dict[str, Any]:
    """Weights, optimizer and our own state; a checkpoint that does not fit is a ValueError that says so."""
    before = engine._config.load_universal_checkpoint
    engine._config.load_universal_checkpoint = universal
    try:
        with untrusted.data_only(saved_classes()):
            path, state = engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
    finally:
        engine._config.load_universal_checkpoint = before
    if path is None:
        raise ValueError(f"{checkpoint} does not hold a checkpoint for this model, ZeRO stage and number of ranks")
    return dict(state)


def fit_universal_checkpoints(engine: Any) -> None:
    """Let every stage load what `mst reshape` writes, and stage 0 write what it can convert.

    Beyond DeepSpeed's own loading ({"checkpoint": {"load_universal": true}}): at stage 0, which it has no loader for,
    everything is loaded here; at stage 3 each parameter group gets its own hyperparameters back, where DeepSpeed gives
    all groups those of the first (decaying norms and biases), and each sub-group a step count of its own; buffers are
    put back at every stage.
    """
    stage, load = engine.zero_optimization_stage(), engine.load_checkpoint
    if stage == 0:
        _name_parameters(engine)

    def load_checkpoint(load_dir: str, tag: str | None = None, **others: Any) -> Any:
        if not engine.load_universal_checkpoint():
            return load(load_dir, tag=tag, **others)
        if tag is None:
            tag = (Path(load_dir) / "latest_universal").read_text().strip()
        zero = Path(load_dir) / tag / "zero"
        common = untrusted.load(zero / "optimizer_state.pt", saved_classes())
        optimizer = base_optimizer(engine)
        if len(common["param_groups"]) != len(optimizer.param_groups):
            raise ValueError(
                f"{zero.parent} has {len(common['param_groups'])} parameter groups, this optimizer "
                f"{len(optimizer.param_groups)}: give it the same groups"
            )
        if stage == 0:
            path, state = engine._load_checkpoint(load_dir, tag, **{**others, "load_optimizer_states": False})
            _load_replicated(engine, zero)
        else:
            path, state = load(load_dir, tag=tag, **others)
        if path is None:
            return path, state
        for group, saved in zip(optimizer.param_groups, common["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for kept in optimizer.state.values():
            if torch.is_tensor(kept.get("step")):
                kept["step"] = kept["step"].clone()
        buffers = dict(engine.module.named_buffers())
        for name, value in state.pop("mst_buffers", {}).items():
            buffers[name].copy_(value)
        return path, state

    engine.load_checkpoint = load_checkpoint


def _name_parameters(engine: Any) -> None:
    """Stage 0 saves optimizer states by number: say whose they are, as torch does for `Optimizer(named_parameters)`."""
    names = {id(p): name for name, p in engine.module.named_parameters()}
    groups = base_optimizer(engine).param_groups
    parameters = getattr(engine.optimizer, "fp16_groups", None) or [group["params"] for group in groups]
    for group, mine in zip(groups, parameters, strict=True):
        group["param_names"] = [names[id(p)] for p in mine]


def _load_replicated(engine: Any, zero: Path) -> None:
    """Stage 0: every rank reads every parameter whole."""
    parameters = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    shards = Replicated(engine, parameters)
    for i, (name, parameter) in enumerate(parameters.items()):
        owner = shards.owner(i)
        state = shards.optimizer.state[owner]
        for path in sorted((zero / name).glob("*.pt")):
            key, saved = path.stem, untrusted.load(path, saved_classes())
            if key == "step":
                state[key] = saved
            elif key == "fp32":
                shards.weight(i).copy_(saved["param"].view(-1))
                parameter.data.copy_(saved["param"])
            else:
                if key not in state:
                    state[key] = torch.zeros_like(owner)
                shards.states(i)[key].copy_(saved["param"].view(-1))
