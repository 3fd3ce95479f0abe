"""Lets DeepSpeed's AutoTP layers use our products, and turns its failures to split a model into one line.

The layers hold some rows or columns of a matrix and communicate around the product, as `tensor_parallel.ColumnLinear`
and `RowLinear` do. DeepSpeed's own layers would reduce a copy of a result that is not contiguous, and lose the sum: the
result of a dense product is always contiguous, that of a sparse kernel need not be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.module_inject.layers import (
    GatherFromTensorParallelRegion,
    LinearAllreduce,
    LinearLayer,
    VocabParallelLinear,
)
from deepspeed.module_inject.tp_shard import AutoTPMeta
from torch import nn

from mst_scale.errors import UserError
from mst_scale.tensor_parallel import KEY, copied, summed

Product = Callable[..., torch.Tensor]


def _of_rows(module: Any, product: Product, x: torch.Tensor) -> torch.Tensor:
    y = product(copied(x, module.mp_group), module.weight, module.bias)
    if not module.gather_output:
        return y
    return GatherFromTensorParallelRegion.apply(module.mp_group, y, module._partition_sizes)


def _of_columns(module: Any, product: Product, x: torch.Tensor) -> torch.Tensor:
    y = summed(product(x, module.weight), module.mp_group)
    return y if module.bias is None else y + module.bias


FORWARDS: Mapping[type, Callable[..., torch.Tensor]] = {
    LinearLayer: _of_rows,
    VocabParallelLinear: _of_rows,
    LinearAllreduce: _of_columns,
}


def is_linear(module: nn.Module) -> bool:
    """Whether a module is an nn.Linear, or a slice of one."""
    return isinstance(module, nn.Linear | LinearLayer | VocabParallelLinear | LinearAllreduce)


# --- what DeepSpeed asserts of it, or computes otherwise ---


def check_cuttable(model: nn.Module, deepspeed: Mapping[str, Any], size: int) -> None:
    """Reject a config with which DeepSpeed would change the batch size, or fail in the first step."""
    shape = [deepspeed.get(key) for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")]
    total = deepspeed.get("train_batch_size")
    if isinstance(total, int) and not all(isinstance(value, int) for value in shape):
        raise UserError(
            f"train_batch_size = {total} and {KEY} = {size}: DeepSpeed would divide it among all ranks, although "
            f"{size} of them read the same sequences, so the batch would be smaller: set "
            "train_micro_batch_size_per_gpu and gradient_accumulation_steps instead"
        )
    heads = AutoTPMeta.from_model_config(getattr(model, "config", None)).num_kv_heads
    zero = deepspeed.get("zero_optimization") or {}
    if heads is not None and heads < size and isinstance(zero, Mapping) and zero.get("stage") == 3:
        raise UserError(
            f"{KEY} = {size} leaves some ranks without any of the {heads} key heads, and DeepSpeed's stage 3 cannot "
            f"gather empty weights: set {KEY} to at most {heads}, or zero_optimization.stage to 2"
        )


def check_no_shared_dropout(model: nn.Module, size: int) -> None:
    """Reject dropout of activations that all ranks hold: their random states may differ, so weights would diverge.

    Models of transformers name it in their config; some call a function and have no module for it (classifiers have).
    In attention, each rank has heads of its own.
    """
    named = getattr(getattr(model, "config", None), "__dict__", {})
    rates = {f"config.{key}": value for key, value in named.items() if "drop" in key and "classifier" not in key}
    rates |= {f"{name}.p": m.p for name, m in model.named_modules() if isinstance(m, nn.Dropout)}
    for key, rate in rates.items():
        if isinstance(rate, int | float) and rate > 0 and "att" not in key:
            raise UserError(
                f"{key} = {rate} does not work with {KEY} = {size}: ranks would drop different values of the "
                "activations that they share, so their weights would diverge: set it to 0"
            )


@contextmanager
def asserted_of_cutting(model: nn.Module, size: int) -> Iterator[None]:
    """Turn DeepSpeed's assertions about a model that it cannot split into one-line errors."""
    try:
        yield
    except AssertionError as met:
        if size == 1:
            raise
        if "batch" in str(met).lower():
            raise UserError(
                f"train_batch_size does not fit {KEY} = {size}: leave it out, and set train_micro_batch_size_per_gpu "
                "and gradient_accumulation_steps"
            ) from met
        why = str(met).strip(" .")
        raise UserError(
            f"DeepSpeed's AutoTP cannot split {type(model).__name__} over {size} ranks ({why}): use a transformers "
            f"model with a tensor-parallel plan (Llama, Qwen, Gemma), the GPT of mst_scale, or {KEY} = 1"
        ) from met
