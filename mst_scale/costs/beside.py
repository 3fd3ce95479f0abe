"""Counts what a run spends beside the products of its steps, where methods are compared on all their FLOPs.

    dense gradients at topology steps      `ledger.topology_flops`, an upper bound
    the optimizer, on each weight          17 a step: AdamW 14, the gradient's share of the norm and of clipping 3

`flops` and `flops_causal` in the metrics leave both out, as the paper does: of a wide model they are next to nothing.
"""

from __future__ import annotations

from mst_scale.config import Experiment
from mst_scale.costs.ledger import topology_flops

UPDATE = 17


def beside(experiment: Experiment, sequences: float) -> float:
    """Of a whole run of so many sequences, what it has grown out of left out. The same in both accountings."""
    return (
        sequences * topology_flops(experiment)[1].total + UPDATE * experiment.training.steps * experiment.model.weights
    )
