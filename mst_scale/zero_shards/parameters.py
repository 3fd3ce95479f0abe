"""Makes, shows and fills parameters that ZeRO-3 cuts up."""

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
    """Under ZeRO-3 each parameter is cut up as soon as it is made, so that no rank ever holds the whole model.

    It is cut over the ranks that hold the same weights: with a mesh those of its group, else all.
    """
    if zero_stage(deepspeed_config) < 3:
        return contextlib.nullcontext()
    group = None if mesh is None else mesh.same_weights_group
    return deepspeed.zero.Init(config_dict_or_path=deepspeed_config, mpu=mesh, data_parallel_group=group)


@contextlib.contextmanager
def whole(parameter: nn.Parameter) -> Iterator[bool]:
    """Gather all values of a parameter, whether or not ZeRO-3 has cut it; all ranks receive what rank 0 writes into it.

    Yields whether this rank's values are those that count. Uncut parameters are replaced by rank 0's when DeepSpeed
    takes the model over.
    """
    if not hasattr(parameter, "ds_id"):
        yield True
        return
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        yield dist.get_rank() == 0


def is_matrix(parameter: nn.Parameter) -> bool:
    """Whether the logical tensor has at least two dimensions."""
    return len(getattr(parameter, "ds_shape", parameter.shape)) > 1
