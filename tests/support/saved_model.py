"""Writes a checkpoint of a model that no run has trained, laid out as `mst reshape` does it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch

from mst_scale.config import ModelConfig


def save(model: torch.nn.Module, config: ModelConfig, run: Path) -> Path:
    """The checkpoint, in the folder of a run."""
    saved = run / "checkpoints" / "step00000001"
    (saved / "mst").mkdir(parents=True)
    for name, parameter in model.named_parameters():
        (saved / "zero" / name).mkdir(parents=True)
        torch.save({"param": parameter.detach()}, saved / "zero" / name / "fp32.pt")
    (run / "config.json").write_text(json.dumps({"model": dataclasses.asdict(config)}))
    return saved
