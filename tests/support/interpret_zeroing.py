"""Run in a process of its own under TRITON_INTERPRET=1: the zeroing kernel against `packed_bits.retain_`."""

from __future__ import annotations

import json
import sys

import torch

from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.zero_inactive import SPAN, zero_inactive_


def differing(dtype: torch.dtype, length: int) -> int:
    """Bits that differ, where values are NaN or infinite too."""
    generator = torch.Generator().manual_seed(length)
    values = torch.randn(length, generator=generator).to(dtype)
    values[::5], values[1::7] = float("nan"), float("inf")
    bits = packed_bits.pack(torch.rand(length, generator=generator) < 0.3)
    expected = values.clone()
    packed_bits.retain_(expected, bits)
    zero_inactive_(values, bits)
    return int((values.view(torch.uint8) != expected.view(torch.uint8)).sum())


if __name__ == "__main__":
    cases = json.load(sys.stdin)
    print(json.dumps([differing(getattr(torch, case["dtype"]), case["length"]) for case in cases]))
    assert SPAN == 4096, "the lengths of the test lie around it"
