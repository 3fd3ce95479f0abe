"""The types of what `mst_scale.initialize` returns: DeepSpeed's engine as a training loop uses it, and its `mst`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from mst_scale.hybrid_sparse_attention.pattern import Pattern
from mst_scale.mixed_growing.evolve import Change
from mst_scale.sparsity_variation import Point, Schedule


class MST(Protocol):
    """`engine.mst`: what holds at the next step, and what the last topology step did."""

    @property
    def step(self) -> int:
        """Finished optimizer steps."""

    @property
    def schedule(self) -> Schedule:
        """Phase, target sparsity and update fraction of every step of the run."""

    @property
    def point(self) -> Point:
        """Those of the next step."""

    @property
    def pattern(self) -> Pattern:
        """The attention pattern of the next step."""

    @property
    def sparsity(self) -> float:
        """Share of the target parameters' weights that are not active."""

    def densities(self) -> dict[str, float]:
        """Share of active weights by parameter name."""

    def gradient_densities(self) -> dict[str, float] | None:
        """The same of the products that give gradients of weights, where a method counts them otherwise."""

    def dead_units(self) -> Mapping[str, tuple[int, int]]:
        """(dead, all) units by kind, over all ranks together: call it on every rank. {} where none are known."""

    @property
    def woken(self) -> Mapping[str, tuple[int, int]]:
        """(woken, all) units by kind, if the last step has woken any."""

    @property
    def changes(self) -> Sequence[Change]:
        """What the last topology step did to each layer …"""

    @property
    def changed_at(self) -> int:
        """… and the step that it ended; 0: there was none."""

    def check_drift(self) -> None:
        """Stop on all ranks if a mask is no longer what the last topology step left. Call it on every rank."""

    def on_step(self, call: Callable[[MST], None]) -> None:
        """Call `call(engine.mst)` at the end of every optimizer step, on every rank, taken or skipped."""

    def on_topology_step(self, call: Callable[[MST], None]) -> None:
        """The same where the step has pruned and grown: `changes` say what."""


class Engine(Protocol):
    """DeepSpeed's engine: the part that a training loop uses. Whatever else it has is there too."""

    mst: MST
    global_steps: int

    @property
    def module(self) -> torch.nn.Module: ...

    @property
    def device(self) -> torch.device: ...

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The model's forward: whatever the model returns."""

    def backward(self, loss: torch.Tensor) -> torch.Tensor: ...

    def step(self) -> None:
        """Masks gradients, updates, prunes and grows when due; at accumulation boundaries only."""

    def train(self, mode: bool = True) -> Any: ...

    def eval(self) -> Any: ...

    def save_checkpoint(
        self, save_dir: str, tag: str | None = None, client_state: dict[str, Any] | None = None
    ) -> bool | None:
        """With the masks. Call it on every rank."""

    def load_checkpoint(self, load_dir: str, tag: str | None = None) -> tuple[str | None, dict[str, Any] | None]:
        """(path, client_state), with the masks; path is None where there is no checkpoint."""
