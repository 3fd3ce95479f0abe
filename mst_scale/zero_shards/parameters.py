"""Creates, gathers and fills parameters that ZeRO-3 partitions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch.distributed as dist
from torch import nn

from mst_scale.comm import Mesh


def zero_stage(deepspeed_config: dict[str, Any]) -> int:
    """Return the ZeRO stage of a config, which is 0 if it names none."""
    return int(deepspeed_config.get("zero_optimization", {}).get("stage", 0))


def partitioned_construction(
    deepspeed_config: dict[str, Any], mesh: Mesh | None = None
) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which ZeRO-3 partitions each parameter at once, so that no rank holds the whole model.

    Parameters are partitioned over the ranks that hold the same weights: the group of a mesh, or else all ranks.
    """
    if zero_stage(deepspeed_config) < 3:
        return contextlib.nullcontext()
    group = None if mesh is None else mesh.same_weights_group
    return deepspeed.zero.Init(config_dict_or_path=deepspeed_config, mpu=mesh, data_parallel_group=group)


@contextlib.contextmanager
def whole(parameter: nn.Parameter) -> Iterator[bool]:
    """Gather all values of a parameter that ZeRO-3 may have partitioned; all ranks receive what rank 0 writes into it.

    Yields whether the values that this rank writes are used. Parameters that are not partitioned are replaced by rank
    0's when DeepSpeed takes over the model.
    """
    if not hasattr(parameter, "ds_id"):
        yield True
        return
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        yield dist.get_rank() == 0


def is_matrix(parameter: nn.Parameter) -> bool:
    """Whether the logical tensor has at least two dimensions."""
    return len(getattr(parameter, "ds_shape", parameter.shape)) > 1
