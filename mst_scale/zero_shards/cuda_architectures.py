"""Rewrites TORCH_CUDA_ARCH_LIST so that DeepSpeed can read it: it fails on the letters of "9.0a" and of "10.0f"."""

from __future__ import annotations

import os
import re

from deepspeed.accelerator import get_accelerator

from mst_scale.comm import logger

VARIABLE = "TORCH_CUDA_ARCH_LIST"


def use_readable_architectures() -> None:
    """Take the letters out of the variable, before DeepSpeed builds a kernel; once is enough."""
    given = os.environ.get(VARIABLE, "")
    plain = re.sub(r"(\d+\.\d+)[af]\b", r"\1", given)
    if plain != given and get_accelerator().device_name() == "cuda":
        os.environ[VARIABLE] = plain
        logger.info("%s=%s: DeepSpeed cannot read the letters, so its kernels are built for %s", VARIABLE, given, plain)
