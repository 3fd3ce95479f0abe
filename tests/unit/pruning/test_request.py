"""What can be asked of pruning, and that wrong options are named in one line."""

from fractions import Fraction
from typing import Any

import pytest

from mst_scale.errors import UserError
from mst_scale.mixed_growing.distribution import active_counts
from mst_scale.pruning import requested
from mst_scale.pruning.method import NM

SHAPES = {"a": (8, 16), "b": (16, 32)}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"method": "obd", "share": 0.5}, "--method 'obd'.* magnitude, wanda, sparsegpt"),
        ({"method": "wanda"}, "--method wanda.*--prune S or --pattern N:M"),
        ({"method": "wanda", "share": 0.0}, r"--prune 0\.0 --method wanda"),
        ({"share": 1.0}, r"--prune .* 1\.0"),
        ({"share": float("nan")}, "--prune .* nan"),
        ({"pattern": "2/4"}, "--pattern '2/4'.* N:M"),
        ({"pattern": "4:4"}, "--pattern 4:4"),
        ({"pattern": "0:4"}, "--pattern 0:4"),
        ({"pattern": "1:4", "share": 0.5}, r"--pattern 1:4 .*0\.75.*--prune 0\.5"),
        ({"share": 0.5, "calibration": "corpora/x"}, "--calibration .*--method wanda or sparsegpt"),
        ({"method": "magnitude", "pattern": "2:4", "sequences": 9}, "--calibration-sequences .*wanda or sparsegpt"),
        ({"method": "wanda", "share": 0.5, "sequences": 0}, "--calibration-sequences .* 0"),
    ],
)
def test_wrong_input_is_one_line(asked: dict[str, Any], named: str):
    with pytest.raises(UserError, match=named) as caught:
        requested(**asked)
    assert "\n" not in str(caught.value)


def test_what_is_asked():
    assert requested() is None
    plain = requested(share=0.9)
    assert plain is not None and (plain.name, plain.needs_calibration, plain.pattern) == ("magnitude", False, None)
    assert requested(share=0.0) is not None, "nothing goes, but the loss is measured"
    thirds = requested("sparsegpt", 0.667, "1:3", sequences=7)
    assert thirds is not None and thirds.needs_calibration and thirds.sequences == 7
    assert (thirds.pattern, thirds.share) == (NM(1, 3), pytest.approx(2 / 3))
    assert NM.parse("4:8").share == Fraction(1, 2) != NM.parse("1:4").share == Fraction(3, 4)


def test_magnitude_spreads_its_budget_as_training_does():
    asked = requested(share=0.8)
    assert asked is not None
    kept = [n - amount.among(n) for n, amount in zip((128, 512), asked.amounts(SHAPES, "erk").values(), strict=True)]
    assert kept == active_counts(list(SHAPES.values()), 0.8, "erk")


def test_the_other_methods_remove_the_same_fraction_of_each_matrix():
    """Of what the user wrote: in binary 0.7 is a little less, and 0.7 of 10 would be 6."""
    asked = requested("wanda", 0.7)
    assert asked is not None
    assert [amount.among(10) for amount in asked.amounts(SHAPES, "erk").values()] == [7, 7]


def test_groups_must_fill_the_rows():
    asked = requested(pattern="2:5")
    assert asked is not None
    with pytest.raises(UserError, match=r"--pattern 2:5: a .* 16 "):
        asked.amounts(SHAPES, "erk")
