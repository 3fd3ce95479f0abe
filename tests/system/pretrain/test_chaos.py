"""A run that is killed, frozen, asked to stop and damaged at random ends as one without faults."""

import pytest

from mst_scale.comm import ParallelDims
from tests.support import chaos
from tests.support.chaos import Case, case_of


@pytest.mark.parametrize(
    "case",
    [
        Case(world=2, stage=1, faults=5, seed=5),
        pytest.param(Case(world=4, stage=1, faults=3, seed=6, sizes=ParallelDims(tensor=2)), marks=pytest.mark.full),
        *(pytest.param(case_of(words, 20, seed=1), marks=pytest.mark.slow) for words in chaos.CASES.split(",")),
    ],
    ids=str,
)
def test_the_end_is_the_same(case, tmp_path):
    peace = chaos.undisturbed(tmp_path / "peace", case)
    story = chaos.disturbed(tmp_path / "chaos", case)
    assert len(story.faults) == case.faults and story.longest_end < 60
    assert chaos.differences(peace, tmp_path / "chaos" / "out") == [], story.faults
