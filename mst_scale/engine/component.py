"""Defines the interface of a component: one part of a run that follows the optimizer steps of a DeepSpeed engine."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch


class Component:
    """One part of a run, which overrides the methods it needs.

    Every method is called on all ranks, in the order of the components (`before_step` in reverse order).

    One optimizer step calls, in this order:

        before_step       gradients are reduced; decide what this step does and reject what is wrong
        after_backward    read or change the reduced gradients
        before_update     the gradient's norm is known and there was no overflow; the optimizer is about to update
        mask_update       change an update that the optimizer computes in several steps (Muon)
        after_update      master weights are updated (ZeRO-3 calls it once per group of parameters)
        after_step        the step is over; `updated` is False if it was skipped
    """

    state_key: str | None = None
    """Key of this component's state in a checkpoint's client_state, if it has one."""

    def begin(self) -> None:
        """Start following: the engine is complete and every check of `initialize` has passed."""

    measures = False
    """Whether `sparsity` and `densities` describe the model; the first such component of a run is used."""

    def sparsity(self) -> float:
        """Return the share of the target parameters' weights that are inactive."""
        return 0.0

    def densities(self) -> dict[str, float]:
        """Return the share of active weights by parameter name, of the whole model."""
        return {}

    def gradient_densities(self) -> dict[str, float] | None:
        """Return the densities with which products for weight gradients are counted, if not those of `densities`."""
        return None

    def describe(self) -> str:
        """Return a clause for the run's first log line that states what was chosen; "" if there is none."""
        return ""

    # --- one optimizer step ---

    def before_step(self) -> None:
        """Decide what this step does."""

    def after_backward(self) -> None:
        """Read or change the reduced gradients."""

    def before_update(self) -> None:
        """Prepare the update of master weights."""

    def holds_update(self) -> bool:
        """Return whether this step leaves weights and optimizer states as they are."""
        return False

    def mask_update(self, parameter: torch.nn.Parameter, update: torch.Tensor) -> None:
        """Change this rank's flat slice of an update in place."""

    def after_update(self, tensors: Collection[int]) -> None:
        """Change the master weights in the tensors with these ids; the copies that the forward pass reads follow."""

    def after_step(self, updated: bool) -> None:
        """Finish the step, and prepare the next forward pass."""

    # --- what happens between steps ---

    def masks_restored(self) -> None:
        """Check masks and rebuild derived state after masks and step were replaced by those of a checkpoint."""

    def weights_replaced(self) -> None:
        """Follow weights that were replaced as a whole."""

    def weights_written(self) -> None:
        """Follow weights that `load_weights` has written between two steps."""

    def before_save(self) -> None:
        """Check or correct the state that is about to be saved in a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps under `state_key`."""
        return {}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore what `state_dict` returned; None if the checkpoint has no such entry."""
