"""Keeps in checkpoints with which config a run was trained, and says on resume in one line what has changed since.

What would make the masks of a checkpoint meaningless is refused where they are read: `checkpoints.mask_files`, and for
masks that a run is given `sparse`. A user may change everything else.
"""

from __future__ import annotations

from logging import INFO, WARNING
from typing import Any

from mst_scale import zero_shards
from mst_scale.checkpoints.warm_start import CONFIG
from mst_scale.config import Experiment
from mst_scale.config.changes import differences, differing, result_keys
from mst_scale.distributed import logger

# How long a run is: what would not be the same run up to here is refused (`mask_files`, `pretrain.lengthen`, `branch`).
LENGTH = ("training.steps", "training.warmup", "training.decay")


class ConfigRecord:
    """Of one engine. `corpus` is set by who knows what the run reads."""

    def __init__(self, engine: Any, experiment: Experiment, own_loop: bool):
        self.engine = engine
        self.keys = result_keys(experiment, own_loop)
        self.corpus: str | None = None
        self.changes: list[str] = []
        """What differed in the last checkpoint that was loaded."""

    def carry(self) -> None:
        """From now on checkpoints hold the config, and loads compare it."""
        zero_shards.carry_state(self.engine, CONFIG, self.now, self.resumed)

    def now(self) -> dict[str, Any]:
        return {
            **self.keys,
            "sequences per step": zero_shards.sequences_a_step(self.engine),
            **({} if self.corpus is None else {"corpus": self.corpus}),
        }

    def resumed(self, before: dict[str, Any] | None) -> None:
        """Compare with the config that a checkpoint was saved with; None: it does not say."""
        self.changes = [] if before is None else differences(before, self.now())
        if before is None:
            logger.info("the checkpoint does not say with which config it was trained: changes are not checked")
        elif self.changes:
            meant = set(differing(before, self.now())) <= set(LENGTH)
            logger.log(INFO if meant else WARNING, "resuming with changes: %s", ", ".join(self.changes))
