"""Hooks into DeepSpeed's optimizer step, reads its norm and loss scale, and adds what stage 0 lacks."""

from __future__ import annotations

import contextlib
import functools
import math
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed.comm as ds_comm
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

from mst_scale.errors import UserError
from mst_scale.zero_shards.logical import is_cut, is_empty

_OF_ENGINES: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def base_optimizer(engine: Any) -> Any:
    """Return the optimizer that updates master weights, without DeepSpeed's wrappers."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def master_weights(engine: Any) -> list[torch.Tensor]:
    """Return the tensors that the base optimizer updates; ZeRO-3 lends them to it in turn."""
    masters = getattr(engine.optimizer, "fp32_partitioned_groups_flat", None)
    return masters or [p for group in base_optimizer(engine).param_groups for p in group["params"]]


def optimizer_name(engine: Any) -> str:
    """Return the class name of the base optimizer."""
    return type(base_optimizer(engine)).__name__


TORCH_FUSED = ("torch.AdamW, fused", "torch.Adam, fused")


def adam_of(engine: Any) -> str:
    """Return the optimizer's package and class, and whether it is torch's fused kernel: what a checkpoint records."""
    optimizer = base_optimizer(engine)
    fused = ", fused" if optimizer.defaults.get("fused") else ""
    return f"{type(optimizer).__module__.partition('.')[0]}.{type(optimizer).__name__}{fused}"


def on_cpu() -> bool:
    """Return whether DeepSpeed computes on the CPU."""
    return str(get_accelerator().device_name()) == "cpu"


def groups_of_parameters(engine: Any) -> list[list[Any]]:
    """Return the parameters of each group of the optimizer."""
    optimizer = engine.optimizer
    named = ("bit16_groups", "bf16_groups", "fp16_groups")  # DeepSpeed's wrappers put flat copies into param_groups
    groups = next((getattr(optimizer, name) for name in named if hasattr(optimizer, name)), None)
    groups = [group["params"] for group in optimizer.param_groups] if groups is None else groups
    number = getattr(optimizer, "sub_group_to_group_id", {})  # stage 3 cuts groups up
    found: dict[int, list[Any]] = {}
    for i, parameters in enumerate(groups):
        found.setdefault(number.get(i, i), []).extend(parameters)
    return list(found.values())


def optimized(engine: Any) -> set[int]:
    """Return the ids of parameters that are in a group of the optimizer, and of those that have no weights here."""
    empty = {id(p) for p in engine.module.parameters() if p.requires_grad and is_empty(p)}
    return {id(p) for group in groups_of_parameters(engine) for p in group} | empty


def check_optimized(engine: Any, targets: dict[str, torch.nn.Parameter]) -> None:
    """Check that every target is in a group of the optimizer; without updates, it could not follow its mask."""
    updated = optimized(engine)
    left_out = [name for name, p in targets.items() if id(p) not in updated]
    if left_out:
        raise UserError(
            f"{left_out[0]} cannot become sparse, because it is in no parameter group of the optimizer (like "
            f"{len(left_out)} of {len(targets)} matrices): add it to model_parameters or to the optimizer, freeze it "
            "with requires_grad_(False), or exclude it with mst.targets.exclude"
        )


def has_moments(engine: Any) -> bool:
    """Return whether the optimizer keeps moving averages of gradients, as Adam does."""
    return all("betas" in group for group in base_optimizer(engine).param_groups)


def before_call(owner: Any, name: str, call: Callable[[], object]) -> None:
    """Call `call` before every call of a method of `owner`."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def method(*args: Any, **named: Any) -> Any:
        call()
        return inner(*args, **named)

    setattr(owner, name, method)


def around_model_step(engine: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call `before` once per accumulation boundary, with reduced gradients, before clipping; `after` at its end."""
    inner = engine._take_model_step

    def step(lr_kwargs: Any) -> None:
        before()
        inner(lr_kwargs)
        after()

    engine._take_model_step = step


def has_gradients(engine: Any) -> bool:
    """Return whether a backward pass has left gradients for the step, the same on every rank."""
    zero, stage = engine.optimizer, engine.zero_optimization_stage()
    if type(zero).__name__ == "BF16_Optimizer":  # of dense runs, which keeps them elsewhere
        return True
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    if stage == 0:
        return not trained or any(p.grad is not None for p in trained)
    if stage == 3:
        return bool(zero._epilogue_ran_this_backward or zero.micro_step_id > 0)
    if zero.cpu_offload:  # a micro-batch has begun, and the end of its backward pass has reduced what is left
        return not trained or (zero.micro_step_id > INITIAL_MICRO_STEP_ID and not zero.ready_for_gradients)
    return any(found is not None for found in zero.averaged_gradients.values())


def watch_losses(engine: Any, see: Callable[[torch.Tensor, bool], None]) -> None:
    """Call `see` with each loss that goes backward, and whether DeepSpeed divides it by the micro-batches of a step."""
    inner = engine.backward

    @functools.wraps(inner)
    def backward(loss: torch.Tensor, *args: Any, **named: Any) -> Any:
        see(loss.detach(), bool(named.get("scale_wrt_gas", True)))
        return inner(loss, *args, **named)

    engine.backward = backward


def sets_boundaries(engine: Any) -> bool:
    """Return whether the loop sets accumulation boundaries, as Accelerate does: it may take steps only there."""
    return engine._is_gradient_accumulation_boundary is not None


def around_passes(engine: Any, around: Callable[[], contextlib.AbstractContextManager[Any] | None]) -> None:
    """Run every forward and backward pass of the engine inside the context that `around` returns."""
    for name in ("forward", "backward", *(("train_batch",) if hasattr(engine, "train_batch") else ())):
        inner = getattr(engine, name)

        @functools.wraps(inner)
        def run(*args: Any, inner: Callable[..., Any] = inner, **named: Any) -> Any:
            with around() or contextlib.nullcontext():
                return inner(*args, **named)

        setattr(engine, name, run)


def on_zero_grad(engine: Any, call: Callable[[], None]) -> None:
    """Call `call` whenever gradients are discarded: by the loop, which leaves out a batch, or in each step.

    At stage 2 with several micro-batches per step, DeepSpeed keeps what was reduced, so `call` is not called. At stage
    3, and where gradients are accumulated in another dtype, only the optimizer's method discards them.
    """
    stage, several = engine.zero_optimization_stage(), engine.gradient_accumulation_steps() > 1
    if several and stage == 2:
        return
    elsewhere = several and getattr(engine.optimizer, "use_grad_accum_attribute", False)
    for owner in (engine.optimizer,) if stage == 3 or elsewhere else (engine, engine.optimizer, engine.module):
        before_call(owner, "zero_grad", call)


def has_engine(optimizer: Any) -> bool:
    """Return whether an engine already masks what this optimizer updates."""
    return isinstance(optimizer, torch.optim.Optimizer) and optimizer in _OF_ENGINES


def before_master_update(engine: Any, hook: Callable[[], None]) -> None:
    """Call `hook` before each update of master weights (see after_master_update); the norm is known by then."""

    def pre(*_: Any) -> None:  # torch would take a value for the step's arguments
        hook()

    base_optimizer(engine).register_step_pre_hook(pre)
    _OF_ENGINES.add(base_optimizer(engine))


def after_master_update(engine: Any, hook: Callable[[set[int]], None]) -> None:
    """Call `hook` after each update of master weights, before the low-precision copy and gather.

    It gets the ids of the tensors just updated: ZeRO-1/2 update once per parameter group, ZeRO-3 per sub-group, in the
    same order on all ranks. After an overflow the base optimizer is not called, and so neither is the hook.
    """
    base_optimizer(engine).register_step_post_hook(
        lambda optimizer, *_: hook({id(p) for group in optimizer.param_groups for p in group["params"]})
    )


def hold_updates(engine: Any, when: Callable[[], bool]) -> None:
    """Hide gradients from the optimizer while `when()`, so that weights, moments and its update count do not change."""
    held: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def take(optimizer: Any, args: Any, kwargs: Any) -> None:
        if when():
            held.extend((p, p.grad) for group in optimizer.param_groups for p in group["params"])
            for p, _ in held:
                p.grad = None

    def give_back(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p, gradient in held:  # offloaded ones are DeepSpeed's own buffers
            p.grad = gradient
        held.clear()

    base_optimizer(engine).register_step_pre_hook(take)
    base_optimizer(engine).register_step_post_hook(give_back)


def pipeline_losses(engine: Any, batches: Iterator[Any], count: int) -> list[torch.Tensor]:
    """Return the losses of some micro-batches on the last stage, and none on the others (collective).

    `eval_batch` returns their mean over replicas; it leaves the losses of this replica in `fwd_outputs`.
    """
    engine.eval_batch(batches, num_micro_batches=count)
    engine.module.train()
    return list(engine.fwd_outputs) if engine.is_last_stage() else []


class NamedCollectives:
    """DeepSpeed's collectives under a separate name, by which its comms_logger distinguishes them."""

    def __init__(self, name: str):
        self.all_reduce = functools.partial(ds_comm.all_reduce, log_name=f"{name}_all_reduce")
        self.broadcast = functools.partial(ds_comm.broadcast, log_name=f"{name}_broadcast")
        self.all_to_all = functools.partial(ds_comm.all_to_all_single, log_name=f"{name}_all_to_all")
        self.reduce_scatter = functools.partial(ds_comm.reduce_scatter_tensor, log_name=f"{name}_reduce_scatter")


def place_scheduler(engine: Any, state: dict[str, Any]) -> None:
    """Restore the position of the engine's scheduler, and write its learning rates into the optimizer's groups."""
    scheduler = engine.lr_scheduler
    scheduler.load_state_dict(state)
    if hasattr(scheduler, "last_batch_iteration"):  # DeepSpeed's own, which keep only this
        scheduler.step(scheduler.last_batch_iteration)
        return
    for group, rate in zip(base_optimizer(engine).param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = rate


# --- its norm and its scale ---


def grad_norm(engine: Any) -> float | None:
    """Return the norm of the last update's gradient before clipping; None if DeepSpeed does not compute one."""
    norm = engine.get_global_grad_norm()
    return None if norm is None else float(norm) / _norm_scale(engine)


def clip_factor(engine: Any) -> float:
    """Return the factor by which clipping multiplied the last gradient."""
    clip, norm = engine.gradient_clipping(), getattr(engine.optimizer, "_global_grad_norm", None)
    if not clip or norm is None:
        return 1.0
    return min(1.0, clip / (float(norm) / _norm_scale(engine) + 1e-6))


def loss_scale(engine: Any) -> float:
    """Return the loss scale, by which the gradients are multiplied before the optimizer's step (1 without fp16)."""
    if not engine.fp16_enabled():
        return 1.0
    optimizer = engine.optimizer
    config = getattr(optimizer, "loss_scale_config", None)
    return float(config.cur_scale if config is not None else optimizer.loss_scale)


def has_constant_scale(engine: Any) -> bool:
    """Return whether the loss scale is not reduced after an overflow (fp16.loss_scale)."""
    return bool(engine.fp16_enabled()) and not engine.dynamic_loss_scale()


def _norm_scale(engine: Any) -> float:
    """Return the loss scale if the optimizer reports the norm of the scaled gradient; the others divide by it first."""
    return loss_scale(engine) if type(engine.optimizer).__name__ == "FP16_UnfusedOptimizer" else 1.0


# --- what stage 0 lacks ---


def steps_plainly(engine: Any, _: Any = None) -> bool:
    """Return whether DeepSpeed calls the client's optimizer directly: at stage 0 in fp32."""
    return base_optimizer(engine) is engine.optimizer


def guard_plain_step(engine: Any) -> None:
    """At stage 0 in fp32, where DeepSpeed calls the client's optimizer directly, add what its own optimizers do.

    The norm is recorded and the same on every rank (gradients are replicated, and slices and stages are added up), and
    an update with a gradient that is not finite is skipped and reported as overflow.
    """
    optimizer: Any = engine.optimizer
    step, clip = optimizer.step, engine.gradient_clipping()
    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    engine.clip_fp32_gradients = lambda: None  # done below, where the norm is kept

    @functools.wraps(step)  # also torch's mark of an optimizer that a scheduler follows
    def guarded(optimizer: Any) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = _over_the_model([p for p in parameters if p.grad is not None], engine)
        optimizer.overflow = not math.isfinite(norm)
        optimizer._global_grad_norm = norm
        if optimizer.overflow:
            return
        if 0 < clip < norm:
            for some in ([g for g in gradients if not g.is_sparse], [g for g in gradients if g.is_sparse]):
                if some:
                    torch._foreach_mul_(some, clip / (norm + 1e-6))
        step()

    optimizer.step = types.MethodType(guarded, optimizer)  # torch's schedulers, made later, want a method to wrap


FLOAT64 = "mst_norm_in_float64"  # on an engine


def norm_in_float64(engine: Any) -> None:
    """Sum the norm of gradients in float64 on all ranks and at every stage; stage 3 does so by itself.

    The sum then does not depend, to float32's precision, on where parameters are cut over ranks. As in DeepSpeed's own,
    a tied parameter of a pipeline counts on one of its stages.
    """
    setattr(engine, FLOAT64, True)
    if not hasattr(engine.optimizer, "get_grad_norm_direct") or engine.zero_optimization_stage() == 3:
        return
    zero, device = engine.optimizer, engine.device

    def norm_of(gradients: list[torch.Tensor], parameters: Any, norm_type: float = 2) -> torch.Tensor:
        assert norm_type == 2, "DeepSpeed clips by the L2 norm"
        found = (g for g in gradients if not getattr(g, "_zero_padding", False))
        own = [g for g, p in zip(found, parameters, strict=False) if not getattr(p, "ds_pipe_replicated", False)]
        norms = torch._foreach_norm([g.data for g in own], 2, torch.float64) if own else ()
        total = torch.stack(norms).square().sum() if own else torch.zeros((), dtype=torch.float64, device=device)
        ds_comm.all_reduce(total, group=zero.dp_process_group)
        zero._model_parallel_all_reduce(total, op=ds_comm.ReduceOp.SUM)
        norm = total.sqrt().float()
        return torch.where(norm.isfinite(), norm, norm.new_tensor(-1.0))  # DeepSpeed's mark of an overflow

    engine.optimizer.get_grad_norm_direct = norm_of


def _over_the_model(parameters: list[Any], engine: Any) -> float:
    """Return the norm of the whole model's gradient, of which a rank may hold only some slices and layers.

    Parameters that slices or stages share count once: on the first slice, and on the stage that DeepSpeed names.
    """
    mpu, dtype = engine.mpu, torch.float64 if getattr(engine, FLOAT64, False) else None
    if not hasattr(mpu, "get_tensor_model_parallel_rank"):  # none, or one that knows of sequences alone
        return total_norm([p.grad for p in parameters], dtype)
    first = mpu.get_tensor_model_parallel_rank() == 0
    own = [p.grad for p in parameters if (first or is_cut(p)) and not getattr(p, "ds_pipe_replicated", False)]
    device = parameters[0].device if parameters else get_accelerator().current_device_name()
    square = torch.tensor(total_norm(own, dtype) ** 2, dtype=torch.float64, device=device)
    ds_comm.all_reduce(square, group=mpu.get_model_parallel_group())
    return math.sqrt(square.item())


def scales_plainly(engine: Any, _: Any = None) -> bool:
    """Return whether a loss scale is used without ZeRO."""
    return engine.fp16_enabled() and not engine.zero_optimization()


def scale_plain_loss(engine: Any) -> None:
    """Multiply the loss by the loss scale at stage 0 in fp16, where DeepSpeed 0.19.8 only divides the gradients by it.

    Without this, small gradients would underflow, and the norm and its clipping would be off by the scale. A loss that
    is already scaled, as a later version may do, is left as it is.
    """
    inner = engine.backward

    def backward(loss: torch.Tensor, *args: Any, **others: Any) -> Any:
        scale = loss_scale(engine)
        loss.register_hook(lambda gradient: torch.where(gradient <= 1, gradient * scale, gradient))
        return inner(loss, *args, **others)

    engine.backward = backward


# --- what stage 3 lacks ---

SCATTER = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"


def averages_parts(engine: Any, _: Any = None) -> bool:
    """Return whether stage 3 would average the gradients of the parts of one sequence, which must be summed.

    Under the mpu of UlyssesSPAttentionHF averaging is right: the gradient of its loss is larger by the number of parts.
    """
    theirs = hasattr(engine.mpu, "initialize_sequence_parallel")
    return engine.zero_optimization_stage() == 3 and engine.sequence_parallel_size > 1 and not theirs


def add_up_parts(engine: Any) -> None:
    """Sum the gradients of a sequence's parts at stage 3, where DeepSpeed 0.19.8 averages over all ranks."""
    inner, parts = getattr(engine.optimizer, SCATTER), engine.sequence_parallel_size

    def scatter(*args: Any) -> list[torch.Tensor]:
        return [gradient.mul_(parts) for gradient in inner(*args)]

    setattr(engine.optimizer, SCATTER, scatter)


NORM_PIECE = 1 << 16  # values whose squares are added in float32, as torch does for a whole tensor


def total_norm(gradients: list[torch.Tensor], dtype: torch.dtype | None = None) -> float:
    """Return the L2 norm over all tensors: float32 (or `dtype`) within pieces, and float64 only over the pieces."""
    values = [g.detach().coalesce().values() if g.is_sparse else g.detach() for g in gradients]
    pieces = [piece for each in values for piece in each.reshape(-1).split(NORM_PIECE) if piece.numel()]
    if not pieces:
        return 0.0
    norms = torch._foreach_norm(pieces, 2, dtype or torch.promote_types(pieces[0].dtype, torch.float32))
    return math.sqrt(torch.stack(norms).double().square().sum().item())
