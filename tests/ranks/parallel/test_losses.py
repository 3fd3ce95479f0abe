"""Training on any layout is that of one rank, up to the order in which floating-point numbers are added.

14 steps at float32, masks changing 6 times; slow tests take 30. A norm and a loss are sums in another order in every
layout (relative error about 1e-6 at first); Adam divides by what is nearly 0 for some weights, so that errors grow,
here to about 1e-5. A mask may differ where two scores differ in their last bits; the layouts here do not meet such a
pair.
"""

from __future__ import annotations

import functools

import pytest

from tests.support import layouts
from tests.support.layouts import ALL, EIGHT, GIVEN, TRAINED, Layout, Recipe, alone
from tests.support.pool import run

pytestmark = pytest.mark.full

WITHIN = 1e-4  # relative
SHORT = Recipe(steps=14, of=14, mst={"topology": {"interval": 2}})
FEW = [
    Layout(tensor=2, stage=2), Layout(tensor=2, data=2, stage=3), Layout(pipeline=2, stage=1),
    Layout(tensor=2, pipeline=2, stage=1), Layout(tensor=2, sequence=2, stage=1),
]  # fmt: skip


@functools.cache
def on_one_rank(long: bool) -> dict:
    return alone(TRAINED if long else SHORT)


def compare(layout: Layout, *, long: bool) -> None:
    one = on_one_rank(long)
    assert len(one["changes"]) >= 6
    for found in run(layouts.trained, layout.world, layout, TRAINED if long else SHORT):
        assert found["losses"] == pytest.approx(one["losses"], rel=WITHIN)
        assert found["norms"] == pytest.approx(one["norms"], rel=10 * WITHIN)
        assert found["densities"] == one["densities"]
        # how many, not which: a near tie may fall the other way
        assert [[change[:3] for change in step] for step in found["changes"]] == [
            [change[:3] for change in step] for step in one["changes"]
        ]


@pytest.mark.parametrize("layout", FEW, ids=str)
def test_losses_are_those_of_one_rank(layout: Layout):
    compare(layout, long=False)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*(other for other in ALL if other not in FEW), EIGHT], ids=str)
def test_losses_are_those_of_one_rank_in_every_layout(layout: Layout):
    compare(layout, long=True)


def test_layers_stages_and_copies_of_the_model_together():
    """Two slices × two stages × two copies: eight ranks, equal weights and gradients, equal masks."""
    given = alone(GIVEN)
    for found in run(layouts.trained, EIGHT.world, EIGHT, GIVEN):
        assert found["digests"] == given["digests"] and found["changes"] == given["changes"]
