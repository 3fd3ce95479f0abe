"""Describes the machine of a measurement, and the FLOP/s that it could reach."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from mst_scale.sparse_linear.crossovers import here

from .timing import seconds_of


def machine(threads: int | None = None) -> dict[str, Any]:
    """Hardware, versions and load: what every result says about its machine."""
    return {
        "cpu": here()["cpu"],  # with family and model: names alone do not tell generations apart
        "cores": os.cpu_count(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads() if threads is None else threads,
        "malloc": allocator(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "deepspeed": version("deepspeed"),
        "python": platform.python_version(),
        "load": [round(x, 2) for x in os.getloadavg()],
    }


def allocator() -> str:
    """Return the name of the library that allocates memory for this process.

    On a CPU it matters: glibc gives large freed blocks back to the operating system, which zeroes their pages again for
    the next step. jemalloc and tcmalloc can keep them (`benchmarks/results/real_run.md`).
    """
    maps = Path("/proc/self/maps")
    loaded = maps.read_text() if maps.exists() else ""
    preloaded = (name for name in ("jemalloc", "tcmalloc", "mimalloc") if f"/lib{name}" in loaded)
    return next(preloaded, platform.libc_ver()[0] or platform.system())


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """(FLOP/s of one rank's device, where the number is from): the data sheet's, or a measured matrix product's."""
    if device.type == "cuda":
        from mst_scale.plan.gpus import GPUS

        name = torch.cuda.get_device_name(device).lower()
        for gpu in GPUS.values():
            chip, _, memory = gpu.name.partition("-")
            if chip in name and memory in name.replace(" ", ""):
                return (gpu.fp32 if dtype == torch.float32 else gpu.bf16), f"data sheet of {gpu.name}"
    return _measured_peak(device, dtype), "measured: the fastest of 5 products of 1,536 × 1,536 matrices"


def _measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    size = 1536
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    torch.matmul(a, b, out=out)
    return 2 * size**3 / min(seconds_of(lambda: torch.matmul(a, b, out=out), device) for _ in range(5))
