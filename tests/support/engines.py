"""Takes a training step with any engine, with the same loss on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def step(engine: Any, batches: Sequence[Sequence[torch.Tensor] | dict[str, torch.Tensor]]) -> float:
    """Take an optimizer step on this rank's micro-batches; return the mean loss, the same on every rank.

    Micro-batches of models of transformers are dicts.
    """
    if hasattr(engine, "train_batch"):  # a pipeline
        return float(engine.train_batch(iter(batches)))
    total = torch.zeros(())
    for batch in batches:
        loss = engine(**batch).loss if isinstance(batch, dict) else engine(*batch)
        engine.backward(loss)
        engine.step()
        total += loss.detach().float() / len(batches)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
