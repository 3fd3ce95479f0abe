"""Frees an engine of DeepSpeed, so that another one can be created in the same process."""

from __future__ import annotations

import weakref
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from mst_scale.heap import give_back


def release(engine: Any) -> weakref.ref[Any]:
    """Remove an engine from what DeepSpeed keeps in the process; afterwards it cannot be used.

    After `engine.destroy`, a stack of modules and the cache of a method would keep the model in memory at ZeRO-3, and
    in a pipeline the autograd graph of the last micro-batch, whose references Python's collector does not see.

    Returns:
        A reference for `is_freed`, to be asked when the caller has dropped the engine and everything that refers to it.
    """
    engine.destroy()
    if isinstance(engine, PipelineEngine):
        engine.pipe_buffers, engine.loss = {}, None
    parameter_offload.FWD_MODULE_STACK.clear()
    for method in vars(PartitionedParameterCoordinator).values():
        for cell in getattr(method, "__closure__", None) or ():  # DeepSpeed's decorators wrap the cached function
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()
    return weakref.ref(engine.module)


def is_freed(module: weakref.ref[Any]) -> bool:
    """Return the memory of a released engine to the device and the operating system, and say whether that worked."""
    give_back()
    get_accelerator().empty_cache()
    return module() is None
