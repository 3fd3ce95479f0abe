"""Gives parameters that a step does not use a gradient of zero at stage 3 and with offload, as elsewhere.

There DeepSpeed keeps each parameter's gradient in a buffer that the first gradient of a step overwrites. If none comes,
the buffer still has that of an earlier step, which would be used once more; if the first one comes in a later
micro-batch, it would be added to it; and with offload, only what comes in the last micro-batch is copied to the host.
"""

from __future__ import annotations

from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID
from torch import Tensor

from mst_scale.zero_shards.step import before_call

BUFFERS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


def keeps_gradients(engine: Any) -> bool:
    """Return whether DeepSpeed keeps gradients from step to step."""
    stage = engine.zero_optimization_stage()
    return stage == 3 or bool(stage and getattr(engine.optimizer, "cpu_offload", False))


def zero_unused_gradients(engine: Any) -> None:
    """Zero the gradients of parameters that get none in a step, before anything else of that step."""
    zero, one = engine.optimizer, engine.gradient_accumulation_steps() == 1
    complete = _watch_stage_3(zero) if engine.zero_optimization_stage() == 3 else _watch_offload(zero, one)
    before_call(engine, "_take_model_step", complete)


def _watch_stage_3(zero: Any) -> Any:
    receive, forget = zero.partition_grads, zero.zero_grad
    with_last: set[int] = set()  # parameters that have a gradient of the last micro-batch

    def partition_grads(parameters: list[Any], partitions: list[Tensor]) -> Any:
        known = zero._offload_boundary_param_ids  # parameters that have a gradient of this step
        if zero.micro_step_id > 0:
            for parameter in parameters:
                if parameter.ds_id not in known:
                    getattr(zero, BUFFERS)[parameter.ds_id].zero_()
        if zero.is_gradient_accumulation_boundary():
            with_last.update(parameter.ds_id for parameter in parameters)
        return receive(parameters, partitions)

    def zero_grad(*args: Any, **named: Any) -> Any:
        zero._offload_boundary_param_ids.clear()
        return forget(*args, **named)

    def complete() -> None:
        gradients: dict[int, list[Tensor]] = {}  # of parts that are swapped to a disk
        places: dict[int, list[int]] = {}
        for parameter in (p for group in zero.fp16_groups for p in group if p.requires_grad and _has_part(zero, p)):
            used = parameter.ds_id in zero._offload_boundary_param_ids
            buffer = getattr(zero, BUFFERS)[parameter.ds_id]
            if not used:
                buffer.zero_()
            if zero.offload_optimizer and not (used and parameter.ds_id in with_last):
                zero._offload_grad_partition_at_boundary(parameter, buffer, gradients, places)
                key, norms = zero.get_param_id(parameter), zero.norm_for_param_grads
                norms[key] = norms[key].to(get_accelerator().current_device_name())  # where DeepSpeed adds them up
        zero._swap_out_offload_fp32_gradients(gradients, places)
        with_last.clear()

    zero.partition_grads, zero.zero_grad = partition_grads, zero_grad
    return complete


def _has_part(zero: Any, parameter: Any) -> bool:
    """Return whether this rank has a part of a parameter, which may have fewer weights than there are ranks."""
    first: int = parameter.partition_numel() * zero._get_param_partition_rank(parameter)
    return first < int(parameter.ds_numel)


def _watch_offload(zero: Any, one: bool) -> Any:
    """Do the same at stages 1 and 2; with `one` micro-batch per step, `zero_grad` leaves it out."""
    receive, forget = zero.copy_grads_in_partition, zero.zero_grad
    known: set[int] = set()  # parameters that have a gradient of this step
    with_last: set[int] = set()  # and those that have one of its last micro-batch

    def copy_grads_in_partition(parameter: Any, *args: Any, **named: Any) -> None:
        key = zero.get_param_id(parameter)
        if zero.micro_step_id > 0 and key not in known and key in zero.accumulated_grads_in_cpu:
            zero.accumulated_grads_in_cpu[key].zero_()
        known.add(key)
        if zero.is_gradient_accumulation_boundary():
            with_last.add(key)
        receive(parameter, *args, **named)

    def zero_grad(*args: Any, **named: Any) -> Any:
        if one:
            known.clear()
            with_last.clear()
            zero.micro_step_id = INITIAL_MICRO_STEP_ID
            zero.reset_cpu_buffers()
        return forget(*args, **named)

    def complete() -> None:
        zero._wait_for_offload_copies()
        for number, group in enumerate(zero.params_in_partition):
            for parameter in (p for p in group if p.requires_grad and zero.get_param_id(p) not in with_last):
                if zero.get_param_id(parameter) not in known:
                    _, _, start, length = zero.grad_position[zero.get_param_id(parameter)]
                    zero.single_partition_of_fp32_groups[number].grad.view(-1).narrow(0, start, length).zero_()
                elif zero._use_compact_grad_partition_buffer(number):
                    receive(parameter, number)
                else:
                    zero._restore_cpu_offload_grad_to_gpu(parameter)
                    zero.set_norm_for_param_grad_in_gpu(parameter)
                    zero.update_offload_overflow_tracker_for_param_grad(parameter)
                    zero.async_inplace_copy_grad_to_fp32_buffer_from_gpu(parameter)
        known.clear()
        with_last.clear()

    zero.copy_grads_in_partition, zero.zero_grad = copy_grads_in_partition, zero_grad
    return complete
