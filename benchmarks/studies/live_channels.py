"""Defines the method `channels` of the study of the same name, whose runs are recorded but whose code was removed.

It was a prototype that pruned and grew whole inner channels, for an earlier engine. Plans, digests and FLOPs of the
recorded runs only need the settings of the method.
"""

from __future__ import annotations

from dataclasses import dataclass

from mst_scale.errors import UserError
from mst_scale.methods import Method

NAME = "channels"


@dataclass(frozen=True)
class Options:
    """The options of the method."""

    weights_from: float = 1.0
    """The share of the run after which single weights are pruned and grown, no longer channels."""

    def __post_init__(self) -> None:
        if not 0 < self.weights_from <= 1:
            raise UserError(f"mst.options.weights_from must lie in (0, 1], not {self.weights_from}")


METHOD = Method(
    "whole inner channels are pruned and grown: a prototype",
    {
        "sparsity": {"initial": "random", "distribution": "uniform"},
        "topology": {"policy": "mst", "random_ratio": 1.0, "grown_moments": "active_mean", "revive_dead_units": False},
        "targets": {"lm_head": False},
        "compute": {"backend": "dense"},
    },
    options=Options,
)

if __name__ == "__main__":
    raise SystemExit("the prototype that trained these runs is gone; its records are in benchmarks/studies/channels.*")
