"""What a real run holds and sends: every tensor by its storage, every collective by its bytes."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.comm import comm as deepspeed_comm

import mst_scale
from mst_scale import zero_shards
from mst_scale.config import load
from mst_scale.models.gpt import GPT
from mst_scale.pretrain import decay_groups

COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_gather", "reduce",
               "reduce_scatter", "_all_gather_base", "_reduce_scatter_base", "all_to_all_single")  # fmt: skip


def storages(tensors: Any) -> dict[int, int]:
    """Bytes by storage, so that views count once."""
    found = {}
    for tensor in tensors:
        if torch.is_tensor(tensor) and tensor.layout is torch.strided and not tensor.is_meta:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


def live() -> dict[int, int]:
    """Every tensor that Python can reach."""
    return storages(x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter))


class Collectives:
    """The name and the payload of each collective, in bytes; that of a gather or scatter is the whole, not the part."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        backend = deepspeed_comm.cdb  # it has taken two of torch's functions for itself
        self.places = [(dist, name) for name in COLLECTIVES if hasattr(dist, name)]
        self.places += [(backend, "all_gather_function"), (backend, "reduce_scatter_function")]
        self.inner = [getattr(place, name) for place, name in self.places]

    def __enter__(self) -> Collectives:
        for (place, name), inner in zip(self.places, self.inner, strict=True):
            setattr(place, name, self._counted(inner))
        return self

    def __exit__(self, *_: Any) -> None:
        for (place, name), inner in zip(self.places, self.inner, strict=True):
            setattr(place, name, inner)

    def _counted(self, inner: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [a for a in itertools.chain(args, kwargs.values()) if torch.is_tensor(a)]
            size = max(t.numel() * t.element_size() for t in tensors)
            self.log.append((inner.__name__, size))
            return inner(*args, **kwargs)

        return call


def build(config: dict[str, Any]) -> Any:
    experiment = load(config)
    with zero_shards.partitioned_construction(experiment.deepspeed):
        model = GPT(experiment.model)
    engine, *_ = mst_scale.initialize(model=model, model_parameters=decay_groups(model), config=experiment)
    return engine


def train(engine: Any, config: dict[str, Any], steps: int) -> None:
    model = engine.module.config
    for _ in range(steps):
        for _ in range(engine.gradient_accumulation_steps()):
            tokens = torch.randint(model.vocab_size, (engine.train_micro_batch_size_per_gpu(), model.context))
            loss = engine(tokens, tokens)
            engine.backward(loss)
            engine.step()


def bytes_sent(rank: int, world: int, config: dict[str, Any], steps: int = 4) -> list[tuple[str, int]]:
    engine = build(config)
    train(engine, config, steps - 1)
    with Collectives() as found:
        train(engine, config, 1)
    return found.log
