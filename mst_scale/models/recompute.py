"""Runs a block of a model; on request it computes the block again in backward and so keeps less memory."""

from __future__ import annotations

import torch
from torch import nn


def run_block(block: nn.Module, x: torch.Tensor, *, recompute: bool) -> torch.Tensor:
    """`block(x)`. With `recompute`, training keeps the block's input only and computes the rest again, as DeepSpeed is
    configured to.

    Saves all of a block's activations but 2·batch·length·n_embd bytes (bf16), for one more forward pass. It works
    unconfigured; `deepspeed.checkpointing.configure` adds partitioning and offload to the CPU.
    """
    if not (recompute and block.training and torch.is_grad_enabled()):
        result: torch.Tensor = block(x)
        return result
    from deepspeed import checkpointing  # seconds to import, so only where it is used

    return checkpointing.checkpoint(block, x)
