"""The method `channels` as a config states it, which `live_channels` runs: for plans, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from mst_scale.methods import Method, register

NAME = "channels"


@dataclass(frozen=True)
class Options:
    weights_from: float = 1.0
    """The share of the run after which single weights live and die, no longer channels."""

    def __post_init__(self) -> None:
        if not 0 < self.weights_from <= 1:
            raise ValueError(f"mst.options.weights_from must lie in (0, 1], not {self.weights_from}")


METHOD = register(
    NAME,
    Method(
        "whole inner channels live and die: a prototype",
        {
            "sparsity": {"initial": "random", "distribution": "uniform"},
            "topology": {"policy": "mst", "random_ratio": 1.0, "grown_moments": "living", "wake_dead_units": False},
            "targets": {"lm_head": False},
            "compute": {"backend": "dense"},
        },
        options=Options,
    ),
)
