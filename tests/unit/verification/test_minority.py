"""Which ranks are wrong, by a vote over values that should be equal."""

import pytest

from mst_scale.verification.verification import first_difference, minority


@pytest.mark.parametrize(
    ("values", "wrong", "decided"),
    [
        ([1, 1, 2], [2], True), ([1, 2, 1], [1], True), ([5, 1, 1, 1], [0], True), ([1, 2, 2, 3, 2], [0, 3], True),
        ([1, 2], [0, 1], False), ([1, 1, 2, 2], [0, 1, 2, 3], False), ([1, 2, 3], [0, 1, 2], False),
        ([1, 1, None], [2], True),
    ],
)  # fmt: skip
def test_the_minority_is_wrong_if_most_ranks_agree(values, wrong, decided):
    assert minority(dict(enumerate(values))) == (wrong, decided)


def test_the_first_value_that_differs_is_named():
    assert first_difference({0: {"a": 1, "b": 2}, 1: {"a": 1, "b": 3}}) == "b"
    assert first_difference({0: {"a": 1}, 1: {"a": 1, "b": 3}}) == "b"
    assert first_difference({0: {"a": 1}, 1: {"a": 1}}) is None
