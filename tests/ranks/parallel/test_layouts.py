"""Masks are a function of logical weights and gradients, seed, step and name alone, whatever the layout of ranks."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from tests.support import layouts
from tests.support.layouts import ALL, COMPACT, GIVEN, Layout, alone, constant
from tests.support.pool import run
from tests.support.quick import cover

EQUAL = ("masks", "digests", "sparsity", "densities", "changes")


@pytest.fixture(scope="module")
def given() -> dict:
    found = alone(GIVEN)
    assert len(found["masks"]) >= 3 and found["sparsity"] > 0.5
    return found


@pytest.fixture(scope="module")
def constantly_given() -> dict:
    found = alone(constant(GIVEN, "off"))
    assert len(found["masks"]) >= 2 and found["sparsity"] > 0.7 and not found["compact"]
    assert any(pruned and grown for _, _, _, pruned, grown, _ in found["changes"][-1])
    return found


def test_there_are_forty_layouts_and_more():
    assert len(ALL) >= 40


def always(layout: Layout) -> bool:
    """Two ranks a layer at every stage, each other kind at some; the others are slow, and on the page of layouts."""
    two = (layout.tensor, layout.sequence, layout.pipeline) == (2, 1, 1)
    some = (layout.pipeline == 2, layout.sequence == 2, layout.tensor == 4)
    return two or (any(some) and layout.stage == 1) or (layout.sequence == 2 and layout.stage == 3)


OFTEN = [layout for layout in ALL if always(layout)]
QUICK = [OFTEN[i] for i in cover([astuple(layout) for layout in OFTEN], 1)]


def marks(layout: Layout) -> list[pytest.MarkDecorator]:
    if layout in QUICK:
        return []
    return [pytest.mark.full if layout in OFTEN else pytest.mark.slow]


@pytest.mark.parametrize("layout", [pytest.param(one, marks=marks(one)) for one in ALL], ids=str)
def test_equal_weights_and_gradients_give_equal_masks(layout: Layout, given: dict):
    """Not one bit of one mask differs, at any topology step."""
    for found in run(layouts.trained, layout.world, layout, GIVEN):
        for what in EQUAL:
            assert found[what] == given[what]


ALWAYS = [layout for layout in COMPACT if layout.world == 2 and (layout.data, layout.stage) in ((2, 1), (2, 3), (1, 1))]


@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=[] if one in ALWAYS else pytest.mark.slow) for one in COMPACT], ids=str
)
def test_compact_storage_has_the_masks_of_dense_storage_on_one_rank(layout: Layout, constantly_given: dict):
    for found in run(layouts.trained, layout.world, layout, constant(GIVEN, "auto")):
        assert found["compact"]
        for what in EQUAL:
            assert found[what] == constantly_given[what]
