"""Says in which half types DeepSpeed trains on this device."""

from __future__ import annotations

from deepspeed.accelerator import get_accelerator


def half_types() -> tuple[str, ...]:
    """Of "bf16" and "fp16", those that it does not refuse."""
    accelerator = get_accelerator()
    able = {"bf16": accelerator.is_bf16_supported(), "fp16": accelerator.is_fp16_supported()}
    return tuple(name for name, there in able.items() if there)
