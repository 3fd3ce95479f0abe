"""Computes a micro-batch of a training step a second time, next to DeepSpeed's own backward pass.

While the micro-batch is trained, hooks digest its loss and the gradient of every parameter as autograd hands it on:
before DeepSpeed adds it up, reduces it, or frees it. The second pass runs the same module with the same inputs, weights
and random numbers, and with the gradient that entered the loss (divided by the number of micro-batches, multiplied by
a loss scale). `torch.autograd.grad` runs the same graph and stores nothing in parameters, so DeepSpeed's hooks on
accumulated gradients, its buckets and its partitions do not see it; at stage 3, the hooks that gather parameters run as
usual. Each gradient is freed when it is digested.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed import checkpointing
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from mst_scale.comm import logger
from mst_scale.errors import UserError
from mst_scale.zero_shards.compact_marks import indexes_of
from mst_scale.zero_shards.logical import named_parameters

Digest = Callable[[Tensor], Tensor]
LOSS = "the loss"


@dataclass
class _Pass:
    """One forward and backward pass."""

    inputs: tuple[Any, ...]
    named: dict[str, Any]
    random: list[Tensor]
    buffers: list[Tensor]
    """Buffers of the module as they were before the pass, which may write them."""
    digests: dict[str, Tensor] = field(default_factory=dict)
    repeated: bool = False
    """Whether another forward pass came before the backward pass: their gradients arrive together."""
    seed: Tensor | None = None
    """The gradient that entered the loss."""


class Recomputation:
    """Compares one micro-batch of a step, as it was trained, with a second computation of it.

    Args:
        engine: DeepSpeed's engine of a whole model, whose output is the loss.
        digest: Digests a tensor.
    """

    def __init__(self, engine: Any, digest: Digest):
        self.engine, self._digest = engine, digest
        self._handles: list[Any] = []
        self._trained: _Pass | None = None
        self._recorded: _Pass | None = None  # the pass whose gradients are being computed
        self._frees = False
        self._skip = 0

    def watch(self, skip: int) -> None:
        """Digest a micro-batch of the step that begins now; `skip` of its micro-batches come before it."""
        self._stop()
        self._trained, self._skip = None, skip
        module = self.engine.module
        self._handles = [
            module.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            module.register_forward_hook(self._after_forward),
        ]
        for name, parameter in named_parameters(module):
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(lambda gradient, name=name: self._see(name, gradient)))

    @torch.enable_grad()
    def differing(self) -> list[str]:
        """Compute the micro-batch again, before the weights are updated; return what differs.

        Returns:
            "the loss" and the names of parameters whose gradients differ, in the order in which they are computed.
        """
        first, self._trained, self._recorded = self._trained, None, None
        try:
            if first is None or first.seed is None or first.repeated:  # a step without such a micro-batch
                return []
            second = self._again(first)
        finally:
            self._stop()
        names = list(dict.fromkeys((*first.digests, *second.digests)))
        missing = torch.zeros((), dtype=torch.int64, device=first.seed.device)
        pairs = [(first.digests.get(name, missing), second.digests.get(name, missing)) for name in names]
        same = torch.stack([a == b for a, b in pairs]).tolist()
        only_once = first.digests.keys() ^ second.digests.keys()
        return [name for name, equal in zip(names, same, strict=True) if not equal or name in only_once]

    def _again(self, first: _Pass) -> _Pass:
        module, devices = self.engine.module, _devices()
        second = _Pass(first.inputs, first.named, first.random, first.buffers, seed=first.seed)
        for handle in self._handles[:2]:
            handle.remove()
        random = torch.random.fork_rng(devices, device_type=get_accelerator().device_name())
        with random, self._buffers_of(first), self._aside():
            _set_random_states(first.random)
            loss = module(*first.inputs, **first.named)
            second.digests[LOSS] = self._digest(loss)
            self._recorded, self._frees = second, True
            trained = [p for _, p in named_parameters(module) if p.requires_grad]
            torch.autograd.grad(loss, trained, first.seed, allow_unused=True)
        return second

    def _before_forward(self, module: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._recorded = None  # what comes is another micro-batch
        if not module.training or not torch.is_grad_enabled():
            return
        if self._trained is not None:
            if self._trained.seed is None and not self._trained.repeated:
                self._trained.repeated = True
                _log_repeated()
            return
        if self._skip:
            self._skip -= 1
            return
        inputs, named = tree_map_only(Tensor, _copied, (inputs, named))  # a loop may fill them with its next batch
        self._trained = _Pass(inputs, named, _random_states(), [b.clone() for b in module.buffers()])

    def _after_forward(self, module: torch.nn.Module, inputs: Any, loss: Any) -> None:
        now = self._trained
        if now is None or now.digests:
            return
        if not isinstance(loss, Tensor) or loss.grad_fn is None:
            raise UserError(
                "training.verify_every needs a model whose only output is its loss, because it computes micro-batches "
                "again: return only the loss, or set training.verify_every to 0"
            )
        now.digests[LOSS] = self._digest(loss)

        def begin(gradients: tuple[Tensor, ...]) -> None:
            now.seed, self._recorded = gradients[0].detach().clone(), now

        # after the hooks of the tensor itself, which divide and scale
        self._handles.append(loss.grad_fn.register_prehook(begin))

    def _see(self, name: str, gradient: Tensor) -> Tensor | None:
        if self._recorded is None:
            return None
        self._recorded.digests[name] = self._digest(gradient)
        # autograd keeps what it is to return: a value without memory of its own
        return gradient.new_zeros(()).expand_as(gradient) if self._frees else None

    def _stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._recorded, self._frees = [], None, False

    @contextlib.contextmanager
    def _buffers_of(self, first: _Pass) -> Iterator[None]:
        """Give the module the buffers that a pass began with, and those of now back."""
        buffers = list(self.engine.module.buffers())
        now = [buffer.clone() for buffer in buffers]
        _fill(buffers, first.buffers)
        try:
            yield
        finally:
            _fill(buffers, now)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Let the pass change nothing but its own tensors.

        Gradients of whole matrices, which a topology step adds up, are dropped; their layers compute as before.
        DeepSpeed recomputes activations in a backward pass of its own, which would accumulate gradients; torch does
        without.
        """
        indexes = [index for index in indexes_of(self.engine.module) if index.on_gradient is not None]
        asked = [index.on_gradient for index in indexes]
        own = checkpointing.checkpoint
        try:
            for index in indexes:
                index.on_gradient = lambda *_: None
            checkpointing.checkpoint = lambda run, *inputs: checkpoint(run, *inputs, use_reentrant=False)
            with autocast_if_enabled(self.engine):
                yield
        finally:
            checkpointing.checkpoint = own
            for index, on_gradient in zip(indexes, asked, strict=True):
                index.on_gradient = on_gradient


def _copied(tensor: Tensor) -> Tensor:
    return tensor if tensor.requires_grad else tensor.clone()


@torch.no_grad()
def _fill(buffers: list[Tensor], values: list[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)


@functools.cache  # once per process
def _log_repeated() -> None:
    logger.warning(
        "training.verify_every does not compare a second computation of steps in which the model is called several "
        "times before backward"
    )


def _devices() -> list[int]:
    return [] if get_accelerator().device_name() == "cpu" else [get_accelerator().current_device()]


def _random_states() -> list[Tensor]:
    return [torch.get_rng_state(), *(get_accelerator().get_rng_state(device) for device in _devices())]


def _set_random_states(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state, device in zip(states[1:], _devices(), strict=True):
        get_accelerator().set_rng_state(state, device)
