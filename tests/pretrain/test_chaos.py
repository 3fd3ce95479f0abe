"""A run that is killed, frozen, asked to stop and damaged at random ends as one without faults."""

import pytest

from tests.support import chaos
from tests.support.chaos import Case


@pytest.mark.parametrize(
    "case",
    [
        Case(world=2, stage=1, faults=5, seed=5),
        *(
            pytest.param(Case(world, stage, faults=20, seed=1 + world), marks=pytest.mark.slow)
            for world, stage in ((2, 1), (3, 2), (2, 3), (4, 1))
        ),
    ],
    ids=lambda case: f"{case.world} ranks, stage {case.stage}, {case.faults} faults",
)
def test_the_end_is_the_same(case, tmp_path):
    peace = chaos.undisturbed(tmp_path / "peace", case)
    story = chaos.disturbed(tmp_path / "chaos", case)
    assert len(story.faults) == case.faults and story.longest_end < 60
    assert chaos.differences(peace, tmp_path / "chaos" / "out") == [], story.faults
