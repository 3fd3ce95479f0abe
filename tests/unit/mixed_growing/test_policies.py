"""Each method ranks as its authors say, and the methods differ by data alone."""

from __future__ import annotations

import pytest
import torch

from mst_scale.errors import UserError
from mst_scale.mixed_growing.policies import BY_GRADIENT, BY_MOMENTUM, BY_WEIGHT, POLICIES, mest, policy

W, G, M = torch.tensor([-3.0, 1.0]), torch.tensor([0.5, -4.0]), torch.tensor([2.0, -6.0])


@pytest.mark.parametrize(
    ("name", "prune", "grow", "random_share", "reads"),
    [
        ("mst", [3, 1], [0.5, 4], 0.25, {"weight", "gradient"}),
        ("rigl", [3, 1], [0.5, 4], 0.0, {"weight", "gradient"}),
        ("set", [3, 1], None, 1.0, {"weight"}),
        ("mest", [3.5, 5], None, 1.0, {"weight", "gradient"}),
        ("snfs", [3, 1], [2, 6], 0.0, {"weight", "momentum"}),
        ("static", [3, 1], [0.5, 4], 0.0, {"weight", "gradient"}),
        ("gmp", [3, 1], [0.5, 4], 0.0, {"weight", "gradient"}),
    ],
)
def test_scores_by_hand(name: str, prune: list, grow: list | None, random_share: float, reads: set[str]):
    inputs = {"weight": W, "gradient": G, "momentum": M}
    chosen = policy(name)
    assert chosen.prune.score(*(inputs[x] for x in chosen.prune.reads)).abs().tolist() == prune
    if grow is not None:
        assert chosen.grow.score(*(inputs[x] for x in chosen.grow.reads)).abs().tolist() == grow
    assert chosen.random_share == random_share
    assert chosen.reads == reads
    assert chosen.swaps is (name not in ("static", "gmp"))


def test_scoring_leaves_its_inputs_alone():
    mest().prune.score(W, G)
    assert W.tolist() == [-3, 1]
    assert G.tolist() == [0.5, -4]


def test_variants():
    assert mest(0.1).prune.score(W, G).tolist() == pytest.approx([3.05, 1.4], rel=1e-6)  # float32
    assert policy("mest", mest_share=0.0).prune.score(W, G).tolist() == [3, 1]
    assert policy("mst", random_share=0.5).random_share == 0.5
    assert POLICIES["mst"].random_share == 0.25
    assert POLICIES["snfs"].prune == BY_WEIGHT
    assert POLICIES["snfs"].grow == BY_MOMENTUM
    assert POLICIES["rigl"].grow == BY_GRADIENT


def test_invalid_values_are_rejected():
    with pytest.raises(UserError, match="choose from mst"):
        policy("mixed")
    with pytest.raises(UserError, match="mest, not"):
        policy("mst", mest_share=0.5)
    with pytest.raises(UserError, match="random_ratio"):
        policy("mst", random_share=1.5)
