"""Writes zeros where a packed mask is clear, on a GPU. Importing this file requires Triton.

Values are not read: each program loads 1/8 byte of mask per weight and stores zeros at inactive weights, so a pass
costs at most one write of the tensor. `packed_bits.retain_` is the definition and also runs on CPUs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SPAN = 4096  # weights per program
WARPS = 8


@triton.jit
def _zero_inactive(values, bits, length, SPAN: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    inside = index < length
    byte = tl.load(bits + (index >> 3), mask=inside, other=255).to(tl.int32)
    active = (byte >> (7 - (index & 7)).to(tl.int32)) & 1
    tl.store(values + index, tl.zeros([SPAN], tl.float32).to(values.dtype.element_ty), mask=inside & (active == 0))


def zero_inactive_(values: torch.Tensor, bits: torch.Tensor) -> None:
    """Write exact zeros into the flat tensor `values` wherever its bit is clear."""
    if values.numel():
        with torch.cuda.device_of(values):  # Triton launches on the current device
            _zero_inactive[(triton.cdiv(values.numel(), SPAN),)](
                values, bits, values.numel(), SPAN=SPAN, num_warps=WARPS
            )
