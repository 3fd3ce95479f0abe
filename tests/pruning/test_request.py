"""What can be asked of pruning, and what is refused in one line that names the cure."""

from fractions import Fraction
from typing import Any

import pytest

from mst_scale.mixed_growing.distribution import active_counts
from mst_scale.pruning import requested
from mst_scale.pruning.pattern import NM, parse

SHAPES = {"a": (8, 16), "b": (16, 32)}


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"how": "obd", "share": 0.5}, "--method 'obd' is unknown: choose one of magnitude, wanda, sparsegpt"),
        ({"how": "wanda"}, "--method wanda: say how much, with --prune S or --pattern N:M"),
        (
            {"how": "wanda", "share": 0.0},
            "--prune 0.0 --method wanda prunes nothing: give 0 < S < 1, or leave both out",
        ),
        ({"share": 1.0}, "--prune 1.0: give the share of weights that become zero, 0 ≤ S < 1"),
        ({"share": float("nan")}, "--prune nan: give the share of weights that become zero, 0 ≤ S < 1"),
        ({"pattern": "2/4"}, "--pattern '2/4': write N:M, as in 2:4, where N of M weights stay"),
        ({"pattern": "4:4"}, "--pattern 4:4: of M weights N stay, with 1 ≤ N < M, as in 2:4"),
        ({"pattern": "0:4"}, "--pattern 0:4: of M weights N stay, with 1 ≤ N < M, as in 2:4"),
        (
            {"pattern": "1:4", "share": 0.5},
            "--pattern 1:4 makes a share of 0.75 zero, not --prune 0.5: leave out one of the two",
        ),
        (
            {"share": 0.5, "calibration": "corpora/x"},
            "--calibration is for --method wanda or sparsegpt: magnitude looks at no text",
        ),
        (
            {"how": "magnitude", "pattern": "2:4", "sequences": 9},
            "--calibration-sequences is for --method wanda or sparsegpt: magnitude looks at no text",
        ),
        ({"how": "wanda", "share": 0.5, "sequences": 0}, "--calibration-sequences 0: give at least 1"),
    ],
)
def test_wrong_input_is_one_line(asked: dict[str, Any], line: str):
    with pytest.raises(ValueError) as refused:
        requested(**asked)
    assert str(refused.value) == line


def test_what_is_asked():
    assert requested() is None
    plain = requested(share=0.9)
    assert plain is not None and (plain.how, plain.looks, plain.pattern) == ("magnitude", False, None)
    assert requested(share=0.0) is not None, "nothing goes, but the loss is measured"
    thirds = requested("sparsegpt", 0.667, "1:3", sequences=7)
    assert thirds is not None and thirds.looks and thirds.sequences == 7
    assert (thirds.pattern, thirds.share) == (NM(1, 3), pytest.approx(2 / 3))
    assert parse("4:8").share == Fraction(1, 2) != parse("1:4").share == Fraction(3, 4)


def test_magnitude_spreads_its_budget_as_training_does():
    asked = requested(share=0.8)
    assert asked is not None
    kept = [n - amount.among(n) for n, amount in zip((128, 512), asked.amounts(SHAPES, "erk").values(), strict=True)]
    assert kept == active_counts(list(SHAPES.values()), 0.8, "erk")


def test_the_other_ways_take_the_same_share_of_each():
    """Of what the user wrote: in binary 0.7 is a little less, and 0.7 of 10 would be 6."""
    asked = requested("wanda", 0.7)
    assert asked is not None
    assert [amount.among(10) for amount in asked.amounts(SHAPES, "erk").values()] == [7, 7]


def test_groups_must_fill_the_rows():
    asked = requested(pattern="2:5")
    assert asked is not None
    with pytest.raises(
        ValueError, match=r"--pattern 2:5: a has 16 inputs, which are no multiple of 5: choose another M"
    ):
        asked.amounts(SHAPES, "erk")
