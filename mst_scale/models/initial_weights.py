"""Draws a model's first weights.

Normal numbers that depend on the seed and the name of the module alone: not on which other layers there are, which
device they are on or how ZeRO cuts them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from mst_scale.randomness import counter_hash

INIT_STD = 0.02
INIT_CHUNK = 1 << 22  # values drawn at once: 16 MiB of float32 beside the weight, however large the weight is


def draw_seed() -> int:
    """One draw from the global generator. Take it before any layer draws its own default values."""
    return int(torch.randint(2**62, (), device="cpu"))


def initialise(model: nn.Module, seed: int, std_of: Callable[[str], float] = lambda name: INIT_STD) -> None:
    """N(0, `std_of(module's name)`) for matrices and embeddings, zero biases.

    `Module.apply` is the one hook that `deepspeed.zero.Init` understands: it gathers one module's parameters at a
    time around the call, so no process ever holds the whole model.
    """
    names = {module: name for name, module in model.named_modules()}

    def of(module: nn.Module) -> None:
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            return
        name = names[module]
        fill_normal(module.weight, std_of(name), counter_hash(seed, name))
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    model.apply(of)


@torch.no_grad()
def fill_normal(weight: torch.Tensor, std: float, seed: int) -> None:
    """The same values for any device and dtype (rounded): drawn on the CPU in float32, piece by piece."""
    if weight.is_meta:
        return
    if weight.numel() == 0:
        raise ValueError(
            "the parameters are partitioned before the model could initialise them: "
            'set "override_module_apply": true under "zero_optimization"'
        )
    for number, piece in enumerate(weight.view(-1).split(INIT_CHUNK)):
        generator = torch.Generator().manual_seed(counter_hash(seed, number))
        # torch.normal, because zero.Init turns what torch.empty returns into its own dtype
        piece.copy_(torch.normal(0.0, std, (piece.numel(),), generator=generator, dtype=torch.float32, device="cpu"))
