"""Hands weights and optimizer states from one engine to the next in the same process, in memory, and frees the first.

A run whose storage changes continues with another engine, which partitions parameters in another way. Each rank keeps
the active values of its own parts in main memory; for the next engine they are gathered, one parameter at a time. Masks
are small and go through a folder, as those of a checkpoint do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import Tensor, nn

from mst_scale.heap import give_back
from mst_scale.zero_shards.compact_marks import index_of
from mst_scale.zero_shards.dense_store import DenseStore, dense_store
from mst_scale.zero_shards.logical import named_parameters
from mst_scale.zero_shards.put_weights import FP32, OF_WRAPPER, ReadRange, put_states
from mst_scale.zero_shards.saving import layout_read, replace_method
from mst_scale.zero_shards.step import base_optimizer

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_ATTRIBUTE = "mst_handover"  # of an engine that is saved into one, or loads one


class Handover:
    """What one engine leaves to the next; both calls are collective.

    Args:
        engine: the engine that ends.
        folder: the folder for the masks, which all ranks see.
        state: what the caller needs to continue, like the client_state of a checkpoint.
        active: returns flags of the active weights in this rank's part of a dense parameter; None if all are active.
    """

    def __init__(self, engine: Any, folder: Path, state: dict[str, Any], active: Callable[[str], Tensor | None]):
        self.folder = folder
        self._state: dict[str, Any] = {}
        with _under_way(engine, self):
            engine.save_checkpoint(str(folder.parent), tag=folder.name, client_state=state, save_latest=False)
        self._counters = {key: getattr(engine, key) for key in COUNTERS}
        self._schedule = None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()
        kept = (*OF_WRAPPER, "loss_scale_config")  # the latter at stage 0
        self.wrapper = {key: getattr(engine.optimizer, key) for key in kept if hasattr(engine.optimizer, key)}
        self.buffers: Mapping[str, Tensor] = {
            name: buffer.cpu().clone() for name, buffer in engine.module.named_buffers()
        }
        optimizer, left_out = base_optimizer(engine), ("params", "param_names")
        self.groups = [{k: v for k, v in group.items() if k not in left_out} for group in optimizer.param_groups]
        parameters = dict(named_parameters(engine.module))
        assert all(p.requires_grad for p in parameters.values()), "a parameter that is not trained would be lost"
        shards = dense_store(engine, parameters)
        self._positions: dict[str, Tensor] = {}
        """Of each parameter that was compact, where its values stand in the flattened matrix."""
        self._masked: set[str] = set()
        """Dense parameters of which only active values are kept."""
        self._parts: dict[str, dict[str, Tensor]] = {}
        self._steps: dict[str, Any] = {}
        for i, (name, parameter) in enumerate(parameters.items()):
            self._steps[name] = optimizer.state.get(shards.owner(i), {}).get("step")
            self._parts[name] = self._take(shards, i, name, parameter, active(name))
        self._lengths = _gather_lengths(self._parts, shards.group)

    def _take(
        self, shards: DenseStore, i: int, name: str, parameter: nn.Parameter, active: Tensor | None
    ) -> dict[str, Tensor]:
        """Return this rank's part of a parameter's weights and states, in main memory."""
        own, index = shards.slices[i], index_of(parameter)
        kept: Any = slice(None)
        if index is not None:
            self._positions[name] = index.positions.cpu()
            kept = slice(max(0, min(own.length, index.count - own.start)))  # without the zeros at the end
        elif active is not None:
            self._masked.add(name)
            kept = active
        live = {FP32: shards.weight(i), **shards.states(i)}
        return {key: values[kept].to("cpu", copy=True) for key, values in live.items()}

    def give(self, engine: Any) -> dict[str, Any]:
        """Write everything into the next engine; return the caller's state."""
        with layout_read(engine, universal=False), _under_way(engine, self):  # no file is read
            _, state = engine.load_checkpoint(str(self.folder.parent), tag=self.folder.name)
        self._parts, self._positions = {}, {}  # frees them
        return dict(state)

    def keep(self, client_state: dict[str, Any]) -> None:
        """Take the client_state of a checkpoint, to which each hook of `engine.save_checkpoint` has added its part."""
        self._state = client_state

    def fill(self, engine: Any) -> dict[str, Any]:
        """Write weights, states and counters, as DeepSpeed's loading does; return the whole client_state."""
        self._group, self._place = dense_store(engine, {}).group, engine.device
        put_states(engine, self)
        for key, value in self._counters.items():
            setattr(engine, key, value)
        if engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(self._schedule)
        return dict(self._state)

    # --- put_weights.Source ---

    def __str__(self) -> str:
        return "the previous engine"

    def step(self, name: str) -> Any:
        """Return how many updates the optimizer has counted in the state of a parameter; None if it keeps no count."""
        return self._steps[name]

    def ranges(self, name: str, parameter: Any) -> dict[str, ReadRange]:
        """Return the weights and states of a parameter, as the next engine stores them (collective)."""
        return {key: self._stored(name, parameter, self._gather(name, key)) for key in self._parts[name]}

    def _stored(self, name: str, parameter: Any, values: Tensor) -> ReadRange:
        index, positions = index_of(parameter), self._positions.get(name)
        if index is not None:
            assert positions is not None or name in self._masked, f"{name} was dense, and now only {index.count} remain"
            assert values.numel() == index.count, f"{name}: {values.numel()} active values, now {index.count}"
            padded = nn.functional.pad(values, (0, index.stored - index.count))
            return lambda start, end: padded[start:end]
        if positions is None:
            assert name not in self._masked, f"{name} is dense again, without an engine of compact storage between"
            return lambda start, end: values[start:end]
        there = positions.to(values.device)

        def expanded(start: int, end: int) -> Tensor:
            first, last = torch.searchsorted(there, there.new_tensor([start, end])).tolist()
            return values.new_zeros(end - start).scatter_(0, there[first:last].long() - start, values[first:last])

        return expanded

    def _gather(self, name: str, key: str) -> Tensor:
        """Return all values that ranks have of a parameter, in the order of ranks."""
        part, lengths = self._parts[name][key], self._lengths[name]
        if self._group is None:
            return part
        padded = part.new_zeros(max(lengths), device=self._place)
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded, group=self._group)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def _gather_lengths(parts: dict[str, dict[str, Tensor]], group: Any) -> dict[str, list[int]]:
    """Return the number of values that each rank has of each parameter."""
    mine = {name: len(of[FP32]) for name, of in parts.items()}
    if group is None:
        return {name: [length] for name, length in mine.items()}
    ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, mine, group=group)
    return {name: [lengths[name] for lengths in ranks] for name in mine}


@contextmanager
def _under_way(engine: Any, handover: Handover) -> Iterator[None]:
    """Let `engine.save_checkpoint` and `engine.load_checkpoint` use a handover in place of DeepSpeed's files."""
    setattr(engine, _ATTRIBUTE, handover)
    try:
        yield
    finally:
        delattr(engine, _ATTRIBUTE)


def install(engine: Any) -> None:
    """Put handovers beneath all other hooks of saves and loads, in place of DeepSpeed's files."""

    def save_checkpoint(save: Callable[..., Any], given: dict[str, Any]) -> Any:
        handover: Handover | None = getattr(engine, _ATTRIBUTE, None)
        if handover is None:
            return save(**given)
        handover.keep(given["client_state"])
        return True

    def load_checkpoint(load: Callable[..., Any], given: dict[str, Any]) -> Any:
        handover: Handover | None = getattr(engine, _ATTRIBUTE, None)
        if handover is None:
            return load(**given)
        return str(handover.folder / "memory"), handover.fill(engine)

    replace_method(engine, "save_checkpoint", save_checkpoint)
    replace_method(engine, "load_checkpoint", load_checkpoint)


# --- freeing the first ---


def release(engine: Any) -> weakref.ref[Any]:
    """Remove an engine from what DeepSpeed keeps in the process; afterwards it cannot be used.

    After `engine.destroy`, a stack of modules and the cache of a method would keep the model in memory at ZeRO-3, and
    in a pipeline the autograd graph of the last micro-batch, whose references Python's collector does not see.

    Returns:
        A reference for `is_freed`, to be asked when the caller has dropped the engine and everything that refers to it.
    """
    engine.destroy()
    if isinstance(engine, PipelineEngine):
        engine.pipe_buffers, engine.loss = {}, None
    parameter_offload.FWD_MODULE_STACK.clear()
    for method in vars(PartitionedParameterCoordinator).values():
        for cell in getattr(method, "__closure__", None) or ():  # DeepSpeed's decorators wrap the cached function
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()
    return weakref.ref(engine.module)


def is_freed(module: weakref.ref[Any]) -> bool:
    """Return the memory of a released engine to the device and the operating system, and say whether that worked."""
    give_back()
    get_accelerator().empty_cache()
    return module() is None
