"""Measures the memory of this process, and its peak while a function runs.

On CUDA these are the bytes allocated, on a CPU the resident set (only on Linux; None elsewhere).
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from mst_scale.heap import give_back, restart_peak_memory

T = TypeVar("T")


def held(device: str) -> int | None:
    """Return how many bytes this process holds; None if that is unknown."""
    return torch.cuda.memory_allocated() if device == "cuda" else _resident("VmRSS")


def held_by(build: Callable[[], T], device: str) -> tuple[T, int | None]:
    """Return what `build` returns, and how many bytes this process holds more than before; None if that is unknown."""
    give_back()
    before = held(device)
    found = build()
    give_back()
    after = held(device)
    return found, None if before is None or after is None else after - before


def state_bytes(engine: Any) -> int:
    """Return the bytes of an engine's optimizer states, and of the weights that the optimizer updates."""
    from mst_scale.zero_shards import base_optimizer

    optimizer = base_optimizer(engine)
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    tensors += [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    return sum(t.numel() * t.element_size() for t in tensors)


def gradient_bytes(engine: Any) -> int:
    """Return the bytes of the gradients that an engine keeps for its update, after a backward pass."""
    optimizer = engine.optimizer
    kept = [p.grad for p in engine.module.parameters() if p.grad is not None]
    for name in ("averaged_gradients", "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"):
        for gradients in getattr(optimizer, name, {}).values():
            kept += gradients if isinstance(gradients, list) else [gradients]
    storages = [t.untyped_storage() for t in kept if torch.is_tensor(t)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def peak_of(run: Callable[[], object], device: str) -> int | None:
    """The most memory that `run` takes beyond what is held before, which has no garbage that `run` could free."""
    give_back()
    before = held(device)
    restart_peak_memory()
    run()
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else _resident("VmHWM")
    return None if peak is None or before is None else peak - before


def apart(measure: Callable[..., T], *arguments: Any, device: str) -> T:
    """Return `measure(*arguments)`, on a CPU that of a new process, which holds nothing else."""
    if device == "cuda":
        torch.cuda.empty_cache()
        return measure(*arguments)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def _resident(key: str) -> int | None:
    file = Path("/proc/self/status")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), None)
