"""Says what would compute here: "cuda" or "cpu"."""

from __future__ import annotations

import os


def device() -> str:
    """As DeepSpeed chooses it: DS_ACCELERATOR goes before what is there."""
    import torch

    asked = os.environ.get("DS_ACCELERATOR", "cuda")
    return "cuda" if asked == "cuda" and torch.cuda.is_available() else "cpu"
