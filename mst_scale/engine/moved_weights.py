"""Counts inactive weights that an optimizer has moved; more than none stops the run on all ranks.

A masked weight has no gradient and no moment, and is taken to stay exactly 0. That is the optimizer's to keep. So the
first updates of a start are looked at, the first one after each topology step (it leaves what it pruned at 0, maybe
with a momentum somewhere), and those with a drift check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mst_scale import zero_shards
from mst_scale.distributed import SharedMistake
from mst_scale.errors import DivergedError
from mst_scale.mixed_growing.exchange import Exchange, Exchanges
from mst_scale.mixed_growing.masks import LayerMask, MaskSet

FIRST = 3  # updates of a start


class MovedWeights:
    """The count on this rank, and the verdict of all."""

    def __init__(self, engine: Any, masks: MaskSet, exchange: Exchanges, same_layers: Exchange):
        self.engine, self.masks = engine, masks
        self.exchange, self.same_layers = exchange, same_layers
        self.left = FIRST  # updates to be looked at yet
        self.looks = False  # at the step under way
        self.found: dict[int, int] = {}
        self.nan: set[int] = set()

    def begin_step(self, sparse: bool, checked: bool) -> None:
        """`sparse`: some weight of the model is masked; `checked`: masks are checked for drift after this step."""
        self.looks = sparse and (self.left > 0 or checked)

    def look(self, i: int, mask: LayerMask, weight: torch.Tensor) -> None:
        self.found[i] = mask.count_inactive(weight)
        if self.found[i] and bool(weight.isnan().any()):
            self.nan.add(i)

    def refuse(self, step: int, check_drift: Callable[[], None]) -> None:
        """One small all-reduce for all layers."""
        local = torch.tensor([self.found.get(i, 0) for i in range(len(self.masks))], dtype=torch.int64)
        nan = torch.tensor([int(i in self.nan) for i in range(len(self.masks))], dtype=torch.int64)
        self.found.clear()
        self.nan.clear()
        self.left = max(0, self.left - 1)
        moved = self.same_layers.max(self.exchange.sum(local)).tolist()
        if any(moved):
            check_drift()  # a mask that has lost a bit would look like a weight that has moved
            worst = max(range(len(moved)), key=moved.__getitem__)
            if self.same_layers.max(self.exchange.max(nan)).any() and not self._divides_by_zero():
                raise DivergedError(
                    f"the weights of {self.masks.names[worst]} are NaN after step {step}: the run has diverged. Lower "
                    "optimizer.params.lr, and run the same command to continue from the last checkpoint"
                )
            raise SharedMistake(
                f"{zero_shards.optimizer_name(self.engine)} moves weights that have no gradient: {sum(moved)} masked "
                f"weights are not 0 after step {step}, {moved[worst]} of them in {self.masks.names[worst]}; choose one "
                "that leaves them (AdamW with eps > 0, SGD, Adagrad), change weights between steps with "
                "mst_scale.load_weights alone, or set "
                "mst.topology.rezero to true, which zeroes them and their optimizer states after every update"
            )

    def _divides_by_zero(self) -> bool:
        """Whether the optimizer has no eps: Adam's update of a weight without gradients is then 0 / 0."""
        return any(group.get("eps") == 0 for group in zero_shards.base_optimizer(self.engine).param_groups)
