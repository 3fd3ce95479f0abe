"""The norm of a gradient that a step completes itself lies on the accelerator, where DeepSpeed adds it to others."""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from mst_scale.zero_shards import unused_layers


def offloaded(gradient: torch.Tensor) -> Any:
    """A ZeRO-3 optimizer with one parameter that a step has not used, whose gradients are kept on the host."""
    parameter = SimpleNamespace(ds_id=7, ds_numel=3, requires_grad=True, partition_numel=lambda: 3)
    zero = SimpleNamespace(
        fp16_groups=[[parameter]],
        offload_optimizer=True,
        swap_optimizer=False,
        norm_for_param_grads={},
        grad_position={7: (0, 0, 3)},
        fp32_partitioned_groups_flat=[SimpleNamespace(grad=torch.full((3,), 5.0))],
        master_weights_and_grads_dtype=torch.float32,
        partition_grads=None,
        zero_grad=None,
        get_param_id=lambda parameter: parameter.ds_id,
        _offload_boundary_param_ids=set(),
        _get_param_partition_rank=lambda parameter: 0,
        _swappable_optimizer_subgroup=lambda number: False,
        **{unused_layers.BUFFERS: {7: gradient}},
    )
    for name in (
        "_offload_grad_partition_at_boundary",
        "_constant_buffered_norm2",
        "_swap_out_offload_fp32_gradients",
    ):
        setattr(zero, name, MethodType(getattr(DeepSpeedZeroOptimizer_Stage3, name), zero))
    return zero


def test_the_norm_of_an_unused_layer_is_on_the_accelerator(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(get_accelerator(), "current_device_name", lambda: "meta")
    zero = offloaded(torch.tensor([1.0, 2.0, 3.0]))
    unused_layers._watch_stage_3(zero)()
    assert zero.norm_for_param_grads[7].device.type == "meta"
    assert zero.fp32_partitioned_groups_flat[0].grad.tolist() == [0.0] * 3
