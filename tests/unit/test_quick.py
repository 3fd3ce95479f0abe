"""The quick run leaves out cases of tests, and no value that a test is parametrized with."""

from itertools import combinations, product

import pytest

from tests.support.quick import cover


@pytest.mark.parametrize("axes", [(3, 4, 2), (4, 4, 4), (2, 2, 2, 3), (5, 1, 3)])
def test_every_pair_of_values_occurs(axes):
    cases = [tuple(str(value) for value in case) for case in product(*map(range, axes))]
    kept = [cases[i] for i in cover(cases)]
    for a, b in combinations(range(len(axes)), 2):
        assert {(case[a], case[b]) for case in kept} == {(case[a], case[b]) for case in cases}
    assert len(kept) < len(cases) or 1 in axes


def test_two_axes_keep_every_value_and_one_axis_keeps_all():
    cases = [(a, b) for a in "abcd" for b in "xyz"]
    kept = [cases[i] for i in cover(cases)]
    assert len(kept) == 4 and {a for a, _ in kept} == set("abcd") and {b for _, b in kept} == set("xyz")
    assert cover([("a",), ("b",)]) == [0, 1] and cover([]) == []
