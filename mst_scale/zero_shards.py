"""Where does DeepSpeed keep what we need? The only file that reads its internals (0.19.x).

Construction under ZeRO-3, gradient norms, a plain fp32 optimizer step that records its norm and skips bad gradients as
every other optimizer of DeepSpeed does, and checkpoint saves that fail on all ranks or on none.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

# --- construction ---


def zero_stage(deepspeed_config: dict[str, Any]) -> int:
    return int(deepspeed_config.get("zero_optimization", {}).get("stage", 0))


def partitioned_construction(deepspeed_config: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """Under ZeRO-3 each parameter is cut up as soon as it is made, so that no rank ever holds the whole model."""
    if zero_stage(deepspeed_config) < 3:
        return contextlib.nullcontext()
    return deepspeed.zero.Init(config_dict_or_path=deepspeed_config)


def shape_of(parameter: nn.Parameter) -> torch.Size:
    """The full shape; a parameter cut by ZeRO-3 is empty in itself."""
    return getattr(parameter, "ds_shape", parameter.shape)


def is_matrix(parameter: nn.Parameter) -> bool:
    return len(shape_of(parameter)) > 1


# --- the optimizer step ---


def base_optimizer(engine: Any) -> torch.optim.Optimizer:
    """The optimizer that updates master weights, under whatever DeepSpeed has wrapped around it."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def grad_norm(engine: Any) -> float | None:
    """Norm of the last update's gradient, before clipping; None where DeepSpeed does not compute one."""
    norm = engine.get_global_grad_norm()
    return None if norm is None else float(norm)


def guard_plain_step(engine: Any) -> None:
    """Stage 0 in fp32: DeepSpeed calls the client's optimizer itself. Give that step what its own optimizers have.

    The norm is recorded and the same on every rank (gradients are replicated), and an update with a gradient that is
    not finite is skipped and reported as overflow.
    """
    optimizer = engine.optimizer
    if base_optimizer(engine) is not optimizer:
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


def total_norm(gradients: list[torch.Tensor]) -> float:
    """L2 norm over all tensors, added up in float64."""
    if not gradients:
        return 0.0
    squares = [torch.linalg.vector_norm(g.detach(), dtype=torch.float64).square() for g in gradients]
    return math.sqrt(torch.stack(squares).sum().item()) if squares else 0.0


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


def load_checkpoint(engine: Any, folder: Path, tag: str) -> dict[str, Any]:
    """Weights, optimizer and our own state; a checkpoint that does not fit is a ValueError that says so."""
    path, state = engine.load_checkpoint(str(folder), tag=tag)
    if path is None:
        raise ValueError(f"{folder / tag} does not hold a checkpoint for this model, ZeRO stage and number of ranks")
    return dict(state)
