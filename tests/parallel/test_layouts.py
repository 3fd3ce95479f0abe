"""Masks are a function of logical weights and gradients, seed, step and name alone, whatever the layout of ranks."""

from __future__ import annotations

import pytest

from tests.support import layouts
from tests.support.layouts import Layout, Recipe
from tests.support.pool import run

GIVEN = Recipe(given_gradients=True, deepspeed={"gradient_clipping": 0.0})  # a norm's last bit is of its order of sums
SHAPES = [  # tensor, sequence, pipeline, data
    (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 1, 2), (4, 1, 1, 1), (2, 2, 1, 1), (2, 1, 1, 2), (1, 2, 1, 2), (1, 4, 1, 1),
    (1, 1, 1, 4), (1, 1, 1, 1),
]  # fmt: skip
PIPELINES = [(1, 1, 2, 1), (2, 1, 2, 1), (1, 1, 2, 2)]
ALL = [Layout(*shape, stage) for shape in SHAPES for stage in range(4)]
ALL += [Layout(*shape, stage) for shape in PIPELINES for stage in (0, 1)]


def alone(recipe: Recipe) -> dict:
    return run(layouts.trained, 1, Layout(), recipe)[0]


@pytest.fixture(scope="module")
def given() -> dict:
    found = alone(GIVEN)
    assert len(found["masks"]) >= 3 and found["sparsity"] > 0.5
    return found


def test_there_are_forty_layouts_and_more():
    assert len(ALL) >= 40


@pytest.mark.parametrize("layout", ALL, ids=str)
def test_equal_weights_and_gradients_give_equal_masks(layout: Layout, given: dict):
    """Not one bit of one mask differs, at any topology step."""
    for found in run(layouts.trained, layout.world, layout, GIVEN):
        for what in ("masks", "digests", "sparsity", "densities", "changes"):
            assert found[what] == given[what]
