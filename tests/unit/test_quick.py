"""The quick run and CI leave out cases of tests, and no value that a test is parametrized with."""

import subprocess
import sys
from collections import Counter
from itertools import combinations, product

import pytest

from tests.support.quick import cover
from tests.support.tiny_run import ROOT


@pytest.mark.parametrize("axes", [(3, 4, 2), (4, 4, 4), (2, 2, 2, 3), (5, 1, 3)])
def test_every_pair_of_values_occurs(axes):
    cases = [tuple(str(value) for value in case) for case in product(*map(range, axes))]
    kept = [cases[i] for i in cover(cases, 2)]
    for a, b in combinations(range(len(axes)), 2):
        assert {(case[a], case[b]) for case in kept} == {(case[a], case[b]) for case in cases}
    assert len(kept) < len(cases) or 1 in axes


def test_every_value_occurs():
    cases = [(a, b) for a in "abcd" for b in "xyz"]
    kept = [cases[i] for i in cover(cases, 1)]
    assert len(kept) == 4 and {a for a, _ in kept} == set("abcd") and {b for _, b in kept} == set("xyz")
    assert cover([("a",), ("b",)], 1) == [0, 1] and cover([], 1) == [] and cover([()], 1) == [0]


TESTS = """
import pytest

@pytest.mark.parametrize("stage, precision", [(0, "fp32"), (0, "bf16"), (1, "fp32"), (1, "bf16")])
def test_one_axis(stage, precision): pass

@pytest.mark.parametrize("size", [1, True, 1.0, None, [10**5000]])
def test_one_argument(size): pass

@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage, extra", [(0, {}), (1, {}), (1, {"a": 1})])
def test_two_axes(stage, extra, world): pass

@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("c", [1, 2])
def test_three_axes(a, b, c): pass

@pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.full)])
def test_marked(a): pass
"""


QUICK = {"test_one_axis": 2, "test_one_argument": 5, "test_two_axes": 3, "test_three_axes": 6, "test_marked": 1}
ALL = {"test_one_axis": 4, "test_one_argument": 5, "test_two_axes": 9, "test_three_axes": 12, "test_marked": 2}


@pytest.mark.parametrize(
    ("option", "folder", "expected"),
    [
        ("--quick", "tests/ranks", QUICK),
        ("--fewer-cases", "tests/unit", ALL),
        ("--fewer-cases", "tests/ranks", {**QUICK, "test_marked": 2}),
    ],
)
def test_what_a_run_keeps(tmp_path, option, folder, expected):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "test_them.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import pytest_addoption, pytest_collection_modifyitems\n"
    )
    words = [option, "--collect-only", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *words]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    kept = Counter(line.split("::")[1].split("[")[0] for line in found.stdout.splitlines() if "::" in line)
    assert kept == expected
