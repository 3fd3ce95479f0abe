"""DeepSpeed's AutoTP layers, with another product in the place of theirs.

They hold some rows or some columns of a matrix, as `tensor_parallel.ColumnLinear` and `RowLinear` do. The collectives
around the product are DeepSpeed's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.module_inject.layers import (
    ColumnParallel,
    GatherFromTensorParallelRegion,
    LinearAllreduce,
    LinearLayer,
    RowParallel,
)

Product = Callable[..., torch.Tensor]


def _of_rows(module: Any, product: Product, x: torch.Tensor) -> torch.Tensor:
    y = product(ColumnParallel.apply(module.mp_group, x), module.weight, module.bias)
    if not module.gather_output:
        return y
    gathered: torch.Tensor = GatherFromTensorParallelRegion.apply(module.mp_group, y, module._partition_sizes)
    return gathered


def _of_columns(module: Any, product: Product, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = RowParallel.apply(module.mp_group, product(x, module.weight), False)
    return y if module.bias is None else y + module.bias


FORWARDS: Mapping[type, Callable[..., torch.Tensor]] = {LinearLayer: _of_rows, LinearAllreduce: _of_columns}
