"""Stores a run's config in its checkpoints, and on resume states in one line what has changed since, and applies it.

Changes that would make the masks of a checkpoint meaningless are rejected where the masks are read
(`checkpoints.mask_files`, `engine.masking`). Users may change everything else.
"""

from __future__ import annotations

from logging import INFO, WARNING
from typing import Any

from mst_scale import zero_shards
from mst_scale.checkpoints.warm_start import CONFIG
from mst_scale.comm import logger
from mst_scale.config import Experiment
from mst_scale.config.changes import differences, differing, result_keys
from mst_scale.config.renamed import recorded
from mst_scale.engine.component import Component

# How long a run is: what would not be the same run up to here is rejected (`mask_files`, `pretrain.extending`).
LENGTH = ("training.steps", "training.warmup", "training.decay")


class ConfigRecord(Component):
    """The config of one engine; `corpus` is set by the training loop that knows what the run reads."""

    state_key = CONFIG

    def __init__(self, engine: Any, experiment: Experiment, own_loop: bool):
        self.engine = engine
        self.keys = result_keys(experiment, own_loop)
        self.settings = zero_shards.Settings(engine)
        self.corpus: str | None = None
        self.changes: list[str] = []
        """What differed in the last checkpoint that was loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.keys,
            "sequences per step": zero_shards.sequences_a_step(self.engine),
            **({} if self.corpus is None else {"corpus": self.corpus}),
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Compare with the config in a checkpoint, and apply what has changed; None if it has none."""
        self.changes = [] if state is None else differences(state, self.state_dict())
        if state is None:
            logger.info("the checkpoint does not contain the config it was trained with: changes are not checked")
        elif self.changes:
            keys = differing(state, self.state_dict())
            logger.log(
                INFO if set(keys) <= set(LENGTH) else WARNING, "resuming with changes: %s", ", ".join(self.changes)
            )
            self.settings.apply(keys, recorded(state))
