"""How does a DeepSpeed engine come to train sparsely?

`initialize` takes the arguments of `deepspeed.initialize` and returns its results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from packaging.version import Version

from mst_scale import zero_shards
from mst_scale.config import Experiment, load

SUPPORTED_DEEPSPEED = ("0.19", "0.20")  # from, and below: it moves its internals between minors
OLDEST_TORCH = "2.8"


def check_versions(deepspeed_version: str = deepspeed.__version__, torch_version: str = torch.__version__) -> None:
    first, last = SUPPORTED_DEEPSPEED
    if not Version(first) <= Version(deepspeed_version) < Version(last):
        raise ImportError(
            f"mst_scale needs DeepSpeed {first}.x, this is {deepspeed_version}: pip install 'deepspeed=={first}.*'"
        )
    if Version(torch_version) < Version(OLDEST_TORCH):
        raise ImportError(f"mst_scale needs torch >= {OLDEST_TORCH}, this is {torch_version}")


check_versions()


def initialize(
    *,
    model: torch.nn.Module,
    model_parameters: Any = None,
    config: Experiment | dict[str, Any] | str | Path,
    **others: Any,
) -> tuple[Any, Any, Any, Any]:
    """`deepspeed.initialize` for a config that may hold our blocks: (engine, optimizer, loader, lr_scheduler)."""
    experiment = config if isinstance(config, Experiment) else load(config)
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters() if model_parameters is None else model_parameters,
        config=experiment.deepspeed,
        **others,
    )
    zero_shards.guard_plain_step(engine)
    return engine, optimizer, loader, scheduler
