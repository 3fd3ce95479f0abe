"""What a real run holds and sends: every tensor by its storage, every collective by its bytes."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.comm import comm as deepspeed_comm

import mst_scale
from mst_scale import zero_shards
from mst_scale.comm.exchange import Exchange
from mst_scale.config import load
from mst_scale.mixed_growing import top_k
from mst_scale.models.bert import BERT
from mst_scale.models.gpt import GPT
from mst_scale.pretrain.building import parameter_groups

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

    def __init__(self, notice: Callable[[], None] = lambda: None) -> None:
        self.log: list[tuple[str, int]] = []
        self.notice = notice
        backend = deepspeed_comm.cdb  # it has taken two of torch's functions for itself
        self.places = [(dist, name) for name in COLLECTIVES if hasattr(dist, name)]
        self.places += [(backend, "all_gather_function"), (backend, "reduce_scatter_function")]
        self.places += [(Exchange, "_reduce")]  # which asks nobody else at stage 0
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
            self.notice()
            if inner.__name__ != "_reduce":
                tensors = [a for a in itertools.chain(args, kwargs.values()) if torch.is_tensor(a)]
                self.log.append((inner.__name__, max(t.numel() * t.element_size() for t in tensors)))
            return inner(*args, **kwargs)

        return call


def build(config: dict[str, Any]) -> Any:
    experiment = load(config)
    with zero_shards.partitioned_construction(experiment.deepspeed):
        model = (GPT if experiment.model.causal else BERT)(experiment.model)
    engine, *_ = mst_scale.initialize(
        model=model, model_parameters=parameter_groups(model, experiment), config=experiment
    )
    return engine


def train(engine: Any, config: dict[str, Any], steps: int) -> None:
    model = engine.module.config
    for _ in range(steps):
        for _ in range(engine.gradient_accumulation_steps()):
            tokens = torch.randint(model.vocab_size, (engine.train_micro_batch_size_per_gpu(), model.seq_length))
            loss = engine(tokens, tokens)
            engine.backward(loss)
            engine.step()


def calls(rank: int, world: int, config: dict[str, Any], steps: int = 3) -> list[tuple[str, int]]:
    """The collectives of one step, after enough of them for ZeRO-3 to know the order of modules."""
    engine = build(config)
    train(engine, config, steps - 1)
    with Collectives() as found:
        train(engine, config, 1)
    return found.log


class Named:
    """In place of `NamedCollectives`: the name and the bytes of each of our own collectives."""

    log: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, name: str):
        self.name = name

    def all_reduce(self, values: torch.Tensor, **others: Any) -> Any:
        Named.log.append((f"{self.name}_all_reduce", values.numel() * values.element_size()))
        return dist.all_reduce(values, **others)


def topology_calls(rank: int, world: int, config: dict[str, Any], step: int) -> dict[str, Any]:
    """Our own collectives of an optimizer step; and what depends on the weights: how many layers were open in each
    round of refinement, and how many had to be split at another bracket."""
    patched = ((zero_shards, "NamedCollectives"), (top_k, "histograms"), (top_k, "bracketed"))
    plain = [getattr(module, name) for module, name in patched]
    opened: list[int] = []
    again: list[int] = []

    def histograms(values: list[torch.Tensor], *others: Any) -> Any:
        if sys._getframe(1).f_code.co_name == "_refine":  # samples are counted by the same function
            opened.append(len(values))
        return plain[1](values, *others)

    def bracketed(requests: Any, whole: Any, brackets: Any, split: Any, exchange: Any) -> Any:
        places, last = {id(request): i for i, request in enumerate(requests)}, -1
        passes: list[int] = []

        def counted(request: Any, *others: Any) -> Any:
            nonlocal last
            if places[id(request)] <= last or not passes:
                passes.append(0)
            passes[-1], last = passes[-1] + 1, places[id(request)]
            return split(request, *others)

        bits = plain[2](requests, whole, brackets, counted, exchange)
        again.extend(passes[1:])
        return bits

    for (module, name), mine in zip(patched, (Named, histograms, bracketed), strict=True):
        setattr(module, name, mine)
    try:
        engine = build(config)
        train(engine, config, step - 1)
        for log in (Named.log, opened, again):
            log.clear()
        train(engine, config, 1)
        masked = [name for name, product in engine.mst.compute.layers.products.items() if product.index is not None]
        return {"calls": list(Named.log), "opened": opened, "again": again, "masked": masked}
    finally:
        for (module, name), before in zip(patched, plain, strict=True):
            setattr(module, name, before)


def bytes_held(rank: int, world: int, config: dict[str, Any], steps: int = 3) -> dict[str, int]:
    """Bytes on this rank: of each part when a step begins, and of everything at the fullest moment of backward (inside
    a collective) and of the step. What autograd keeps for backward is C++'s own and not seen."""
    gc.collect()
    gc.freeze()  # what is there already is not looked at
    try:
        engine = build(config)
        train(engine, config, steps - 1)
        found: dict[str, int] = {"backward": 0, "step": 0}
        phase = "backward"

        def notice(*_: Any) -> None:
            found[phase] = max(found[phase], sum(live().values()))

        def begin_step() -> None:
            nonlocal phase
            phase = "step"
            found.update({name: sum(part.values()) for name, part in parts(engine).items()})

        zero_shards.around_model_step(engine, begin_step, lambda: None)
        zero_shards.base_optimizer(engine).register_step_pre_hook(notice)
        with Collectives(notice):
            train(engine, config, 1)
        return found
    finally:
        gc.unfreeze()


def parts(engine: Any) -> dict[str, dict[int, int]]:
    parameters = list(engine.module.parameters())
    optimizer, base = engine.optimizer, zero_shards.base_optimizer(engine)
    weights = storages([p.data for p in parameters] + [getattr(p, "ds_tensor", None) for p in parameters])
    masters = getattr(optimizer, "fp32_partitioned_groups_flat", None)  # ZeRO-3 lends them to its optimizer in turn
    states = storages(masters or [p for group in base.param_groups for p in group["params"]])
    states |= storages([value for state in base.state.values() for value in state.values()])
    gradients = [getattr(p, name, None) for p in parameters for name in ("grad", "grad_accum")]
    for part in getattr(optimizer, "averaged_gradients", {}).values():
        gradients += part or []
    gradients.append(getattr(optimizer, "grad_partitions_flat_buffer", None))
    masks = storages([bits for mask in engine.mst.masks for bits in (mask.bits, mask.ever)])
    return {
        "weights": weights,
        "optimizer": {k: v for k, v in states.items() if k not in weights},
        "gradients": {k: v for k, v in storages(gradients).items() if k not in weights},
        "masks": masks,
        "index": storages([index.positions for index in zero_shards.indexes_of(engine.module)]),
    }
