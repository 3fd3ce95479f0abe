"""Small models and configs that several tests train."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from mst_scale.zero_shards import start
from tests.support.quick import is_quick


class Toy(nn.Module):
    """Odd sizes, so that parameters straddle ranks and ZeRO-3's parts carry padding; an embedding, norms, biases."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 13)
        self.up = nn.Linear(13, 37)
        self.norm = nn.LayerNorm(37)
        self.down = nn.Linear(37, 13, bias=False)
        self.out = nn.Linear(13, 7)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.down(self.norm(torch.relu(self.up(x))))
        return nn.functional.cross_entropy(self.out(x).float(), targets)


def toy() -> Toy:
    torch.manual_seed(11)
    model = Toy()
    for parameter in model.parameters():  # no accidental zeros or ones
        nn.init.normal_(parameter, std=0.5)
    return model


def toy_batch(step: int, position: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + position)
    return torch.randint(19, (size,), generator=generator), torch.randint(7, (size,), generator=generator)


def report_fp16(supported: bool) -> None:
    """Let DeepSpeed's accelerator report fp16 as CPUs with, or without, instructions for it do."""
    get_accelerator().is_fp16_supported = lambda: supported


def allow_fp16() -> None:
    """fp16 is refused on CPUs, by us and by DeepSpeed. torch computes it all the same, so loss scaling and the fp16
    optimizers, which GPUs run, can be tested."""
    report_fp16(True)
    start.ON_CPUS = ("bf16", "fp16")


def deepspeed_config(
    stage: int, world: int, precision: str = "fp32", accumulation: int = 1, **extra: Any
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": 8 * accumulation * world,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 2**31,
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    if is_quick() and "offload_optimizer" in extra.get("zero_optimization", {}):
        config["optimizer"]["params"]["torch_adam"] = True  # DeepSpeed's Adam for CPUs takes minutes to compile
    for key, value in extra.items():
        config[key] = {**config[key], **value} if isinstance(config.get(key), dict) else value
    return config


def plain_engine(model: nn.Module, stage: int, world: int, precision: str = "fp32", **extra: Any) -> Any:
    """Return DeepSpeed's engine for a model, without mst_scale."""
    config = deepspeed_config(stage, world, precision, **extra)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
