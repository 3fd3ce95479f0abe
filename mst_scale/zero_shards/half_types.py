"""Decides which half-precision types this device may train in, and rejects the others with one line."""

from __future__ import annotations

from deepspeed.accelerator import get_accelerator

from mst_scale.errors import UserError

# DeepSpeed reports fp16 on CPUs that have instructions for it and rejects it on others. A run must not depend on that.
ON_CPUS: tuple[str, ...] = ("bf16",)


def half_types() -> tuple[str, ...]:
    """Return which of "bf16" and "fp16" this device trains in; the same on every CPU."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return ON_CPUS
    supported = {"bf16": accelerator.is_bf16_supported(), "fp16": accelerator.is_fp16_supported()}
    return tuple(name for name, there in supported.items() if there)


def check_precision(precision: str) -> None:
    """Raise UserError if `precision` ("fp32", "bf16" or "fp16") is a half type that this device does not train in."""
    supported = half_types()
    if precision == "fp32" or precision in supported:
        return
    device = "CPUs" if get_accelerator().device_name() == "cpu" else "this GPU"
    instead = "".join(f'"{name}": {{"enabled": true}} or ' for name in supported)
    raise UserError(f"{precision}.enabled: training in {precision} is not supported on {device}; use {instead}float32")
