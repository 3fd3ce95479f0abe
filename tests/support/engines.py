"""Trains with any engine, and reads masks, weights and states of the optimizer whole, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mst_scale import zero_shards
from mst_scale.mixed_growing.masks import assemble, sha256
from tests.support.by_value import gathered


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


def whole_masks(engine: Any) -> dict[str, str]:
    """SHA-256 of every mask of the model, from what all ranks would store."""
    stored = gathered(engine.mst.masks.stored() if engine.mst.state.writes else {})
    names = dict.fromkeys(name for shards in stored for name in shards)
    return {name: sha256(assemble([s[name] for s in stored if name in s], name)) for name in names}


def masters(engine: Any) -> dict[str, torch.Tensor]:
    """Flat master weights and optimizer states of every sparse parameter; replicas are checked to be equal."""
    store, mine = engine.mst.store, []
    for i, shard in enumerate(store.slices):
        states = store.states(i)
        if isinstance(store, zero_shards.CompactStore) and i in store.indexes:
            states = {key: store.expanded([(i, value)])[0] for key, value in states.items()}
        where = shard.logical(torch.arange(shard.length))
        for key, value in {"weight": store.weight(i), **states}.items():
            mine.append((f"{shard.name} {key}", shard.numel, where, value.detach().float().clone()))
    ranks = gathered(mine)
    found: dict[str, torch.Tensor] = {}
    for key, numel, where, values in (entry for of_rank in ranks for entry in of_rank):
        whole = found.setdefault(key, torch.full((numel,), torch.nan))
        known = ~whole[where].isnan()
        assert torch.equal(whole[where][known], values[known]), f"{key} differs between ranks"
        whole[where] = values
    assert not any(whole.isnan().any() for whole in found.values())
    return found


def whole_state(engine: Any) -> dict[str, Any]:
    """Masks (digests), master weights and optimizer states."""
    return {**{f"{name} mask": digest for name, digest in whole_masks(engine).items()}, **masters(engine)}
