"""mst_scale: GPT pretraining at a quarter of the FLOPs, as a DeepSpeed extension.

    engine, optimizer, loader, lr_scheduler = mst_scale.initialize(model=…, model_parameters=…, config=…)

takes the arguments of `deepspeed.initialize` and returns its results; `mst_scale.warm_start(engine, CHECKPOINT)` then
continues from weights and masks alone, with a fresh optimizer.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["initialize", "warm_start"]


def __getattr__(name: str) -> Any:
    # DeepSpeed is imported when it is first needed: the command line and the attention kernels work without it.
    if name == "initialize":
        from mst_scale.engine.api import initialize

        return initialize
    if name == "warm_start":
        from mst_scale.checkpoints.warm_start import warm_start

        return warm_start
    raise AttributeError(f"module 'mst_scale' has no attribute {name!r}")
