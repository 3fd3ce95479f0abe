"""DeepSpeed's AutoTP layers, with another product in the place of theirs.

They hold some rows or some columns of a matrix, as `tensor_parallel.ColumnLinear` and `RowLinear` do, and what is done
around the product is what those do. DeepSpeed's own reduce a copy of what is not contiguous, and lose the sum: its own
products are, those of a sparse kernel need not be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.module_inject.layers import (
    GatherFromTensorParallelRegion,
    LinearAllreduce,
    LinearLayer,
    VocabParallelLinear,
)
from torch import nn

from mst_scale.tensor_parallel import Copied, Summed

Product = Callable[..., torch.Tensor]


def _of_rows(module: Any, product: Product, x: torch.Tensor) -> torch.Tensor:
    y = product(Copied.apply(x, module.mp_group), module.weight, module.bias)
    if not module.gather_output:
        return y
    gathered: torch.Tensor = GatherFromTensorParallelRegion.apply(module.mp_group, y, module._partition_sizes)
    return gathered


def _of_columns(module: Any, product: Product, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = Summed.apply(product(x, module.weight), module.mp_group)
    return y if module.bias is None else y + module.bias


FORWARDS: Mapping[type, Callable[..., torch.Tensor]] = {
    LinearLayer: _of_rows,
    VocabParallelLinear: _of_rows,
    LinearAllreduce: _of_columns,
}


def is_linear(module: nn.Module) -> bool:
    """Whether it is an nn.Linear, or a slice of one."""
    return isinstance(module, nn.Linear) or type(module) in FORWARDS
