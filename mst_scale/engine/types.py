"""The types of what `mst_scale.initialize` returns: DeepSpeed's engine as a training loop uses it, and its `mst`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from mst_scale.hybrid_sparse_attention.pattern import Pattern
from mst_scale.mixed_growing.evolve import Change
from mst_scale.sparsity_variation import Point, Schedule


class MST(Protocol):
    """The type of `engine.mst`: the state of sparse training, and what the last topology step did."""

    schedule: Schedule
    """The schedule of the run: phase, target sparsity and update fraction of every step."""

    @property
    def step(self) -> int:
        """Number of optimizer steps taken."""

    @property
    def point(self) -> Point:
        """Phase, target sparsity and update fraction of the next step."""

    @property
    def pattern(self) -> Pattern:
        """The attention pattern of the next step."""

    @property
    def sparsity(self) -> float:
        """Fraction of inactive weights among the target parameters."""

    def densities(self) -> dict[str, float]:
        """Return the fraction of active weights (in blocks: of active blocks) for each parameter name."""

    def gradient_densities(self) -> dict[str, float] | None:
        """Return the densities of the products that compute weight gradients, or None if they equal `densities()`."""

    def dead_units(self) -> Mapping[str, tuple[int, int]]:
        """Return (dead, all) units by kind over all ranks; {} if no units are known. Call it on every rank."""

    @property
    def revived(self) -> Mapping[str, tuple[int, int]]:
        """(revived units, all units) by kind of unit, if the last step revived any."""

    @property
    def changes(self) -> Sequence[Change]:
        """What the last topology step did to each layer."""

    @property
    def changed_at(self) -> int:
        """The step that the last topology step ended, or 0 if there was none."""

    def check_drift(self) -> None:
        """Raise an error on all ranks if a mask has changed since the last topology step. Call it on every rank."""

    def weights(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a state dict of the whole model with the weights that its layers multiply by.

        They differ from what is stored with methods such as `powerprop` or `sr-ste`, which compute weights from it.

        Args:
            state: the state dict of the whole model, as the engine stores it.
        """

    def finish_save(self) -> None:
        """With `training.async_save`, wait until the last checkpoint is written. Call it on every rank.

        Raises:
            OSError: The checkpoint could not be written.
        """

    def on_step(self, call: Callable[[MST], None]) -> None:
        """Run `call(engine.mst)` on every rank at the end of every optimizer step, also of a skipped one.

        Args:
            call: is called with `engine.mst`.
        """

    def on_topology_step(self, call: Callable[[MST], None]) -> None:
        """Run `call(engine.mst)` on every rank after each step that pruned and grew weights; see `changes`.

        Args:
            call: is called with `engine.mst`.
        """


class Engine(Protocol):
    """The part of DeepSpeed's engine that a training loop uses. All its other attributes exist as well."""

    mst: MST
    global_steps: int

    @property
    def module(self) -> torch.nn.Module:
        """The model."""

    @property
    def device(self) -> torch.device:
        """The device of this rank."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the model's forward pass and return its result."""

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Compute gradients, and reduce them over ranks.

        Args:
            loss: the mean loss of this micro-batch; DeepSpeed divides it by the accumulation steps.
        """

    def step(self) -> None:
        """At an accumulation boundary: mask the gradients, update the weights, and prune and grow them when due."""

    def train(self, mode: bool = True) -> Any:
        """Set the model to training mode.

        Args:
            mode: False sets it to evaluation mode.
        """

    def eval(self) -> Any:
        """Set the model to evaluation mode."""

    def save_checkpoint(
        self, save_dir: str, tag: str | None = None, client_state: dict[str, Any] | None = None
    ) -> bool | None:
        """Save a checkpoint that includes the masks. Call it on every rank.

        Args:
            save_dir: the folder of all checkpoints.
            tag: name of the checkpoint's folder; None for `global_stepN`.
            client_state: values of the training loop, which `load_checkpoint` returns; they are pickled.
        """

    def load_checkpoint(self, load_dir: str, tag: str | None = None) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint with its masks. Return (path, client_state); path is None if there is no checkpoint.

        Args:
            load_dir: the folder of all checkpoints.
            tag: name of the checkpoint's folder; None for the latest.
        """
