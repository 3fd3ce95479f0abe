"""Trains a model with compact and with dense storage, and reads both in the coordinates of the matrices."""

from __future__ import annotations

import math
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param

import mst_scale
from mst_scale import zero_shards
from mst_scale.zero_shards import step as ds_step
from tests.support.engines import whole_state
from tests.support.toy_engine import mst_config, train
from tests.support.toys import toy

TORCH_ADAM = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}


def constant_config(stage: int, world: int, compact: str, policy: str = "set", **more: Any) -> dict[str, Any]:
    """A config of one sparsity from the first step to the last, with a clip that is always active."""
    topology = {"policy": policy, "random_ratio": None, "update_schedule": "constant", **more.pop("topology", {})}
    precision, sparsity = more.pop("precision", "fp32"), more.pop("sparsity", 0.8)
    backend, initial = more.pop("backend", "dense"), more.pop("initial", "random")
    extra = {"gradient_clipping": 0.05, **TORCH_ADAM, **more}
    config = mst_config(stage, world, precision, method="set", topology=topology, **extra)
    config["mst"]["sparsity"] = {"variation": "sparse", "max": sparsity, "initial": initial}
    config["mst"]["compute"] = {"backend": backend, "compact": compact}
    return config


def started(config: dict[str, Any], model: torch.nn.Module | None = None) -> Any:
    """An engine; that with dense storage sums its gradient norm as the compact one does."""
    engine, *_ = mst_scale.initialize(model=toy() if model is None else model, config=config)
    if not zero_shards.indexes_of(engine.module):
        ds_step.norm_in_float64(engine)
    return engine


def course(rank: int, world: int, config: dict[str, Any], steps: int, accumulation: int = 1) -> list[dict[str, Any]]:
    """What holds after every step."""
    return course_of(started(config), rank, world, steps, accumulation)


def course_of(engine: Any, rank: int, world: int, steps: int, accumulation: int = 1) -> list[dict[str, Any]]:
    """The same of an engine at its start."""
    found = []
    for k in range(steps):
        losses = train(engine, rank, world, 1, accumulation=accumulation, first=k)
        norm = zero_shards.grad_norm(engine)
        found.append(
            {
                **whole_state(engine),
                **never_sparse(engine),
                "losses": losses,
                "norm": norm,
                "moved": engine.mst.changed_at,
            }
        )
    return found


def never_sparse(engine: Any) -> dict[str, torch.Tensor]:
    """The weights of the parameters that have no mask, such as norms and biases; call it on all ranks."""
    masked = set(engine.mst.masks.names)
    found = {
        name: (p, safe_get_full_fp32_param(p)) for name, p in engine.module.named_parameters() if name not in masked
    }
    return {name: (p.detach() if whole is None else whole).float().clone() for name, (p, whole) in found.items()}


def differences(one: list[dict[str, Any]], other: list[dict[str, Any]], tolerance: float = 0.0) -> list[str]:
    """In what two courses differ."""
    assert len(one) == len(other)
    faults = []
    for k, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            if torch.is_tensor(value):
                assert value.shape == theirs[key].shape, key
                far = float((value - theirs[key]).abs().max()) if value.numel() else 0.0
                if not far <= tolerance:  # or NaN
                    faults.append(f"step {k + 1}: {key} differs by {far:.3g}")
            elif key == "norm":  # sums of float64 in another order; what clipping makes of it in float32 is compared
                if not math.isclose(value, theirs[key], rel_tol=max(1e-12, tolerance)):
                    faults.append(f"step {k + 1}: the norm is {value} and {theirs[key]}")
            elif key == "losses" and tolerance:
                continue
            elif value != theirs[key]:
                faults.append(f"step {k + 1}: {key} is {value} and {theirs[key]}")
    return faults
