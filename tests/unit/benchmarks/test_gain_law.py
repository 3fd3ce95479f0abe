"""The law of `mst plan` and of every run's first line is what the committed records of the studies give."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from mst_scale.benchmarks.studies import gain_law, overview
from mst_scale.benchmarks.studies.overview import Setting
from mst_scale.benchmarks.studies.plan import FOLDER
from scipy.spatial import ConvexHull

from mst_scale.flops.frontier import Multiplier
from mst_scale.plan import expected_gain

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def settings():
    return overview.settings(FOLDER)


@pytest.mark.full
def test_the_constants_are_those_of_the_records(settings):
    law, points = gain_law.fit(settings), gain_law.points(settings)
    names = ("CONSTANT", "OF_SIZE", "OF_LENGTH", "OF_LENGTH_SQUARED")
    assert [getattr(expected_gain, name) for name in names] == pytest.approx(law.coefficients, abs=5e-5), "four digits"
    assert pytest.approx(law.factor, abs=5e-4) == expected_gain.FACTOR
    measured = np.array([(one.weights, one.tokens_per_weight) for one in points])
    corners = measured[ConvexHull(np.log(measured)).vertices]  # counterclockwise
    first = np.lexsort((corners[:, 1], corners[:, 0]))[0]
    assert np.roll(corners, -first, axis=0) == pytest.approx(np.array(expected_gain.CORNERS), rel=1e-3)
    assert {one.recipe for one in points} == set(expected_gain.MEASURED)


@pytest.mark.full
def test_the_law_covers_its_own_settings(settings):
    """All 17 lie within the interval for a further one."""
    for one in gain_law.points(settings):
        gain = expected_gain.law(one.weights, one.tokens_per_weight)
        assert gain.low < one.multipliers[gain_law.MAIN].value < gain.high, one


@pytest.mark.full
def test_the_page_is_that_of_the_records(tmp_path):
    for path in FOLDER.glob("*.runs.jsonl.gz"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert gain_law.written(tmp_path).read_text() == (FOLDER / "gain-law.md").read_text()


def test_does_it_work_states_the_numbers_of_the_records_in_few_words():
    """Its table has rows of gain-law.md, its law the same coefficients, and it stays a short page."""
    text, page = (FOLDER / "gain-law.md").read_text(), (ROOT / "docs" / "does-it-work.md").read_text()
    assert len(page.split()) <= 1_500
    recorded = {}
    for line in text.splitlines():
        if line.startswith("| mst-"):
            recipe, size, length, _, _, same, every, _ = (cell.strip() for cell in line.strip("|").split("|"))
            recorded[size, length, f"`{recipe}`"] = (same, every)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if "M | " in line]
    assert len(rows) == 10
    for size, length, recipe, same, every, verdict in rows:
        of_record = recorded[size, length, recipe]
        assert (same.replace("1.31 or more", "≥ 1.31"), every.replace("**", "")) == of_record
        low, high = (float(end) for end in re.findall(r"\d\.\d\d", every)[1:])
        assert verdict in ({"yes", "barely"} if low > 1 else {"no"} if high <= 1 else {"not established"})
    (law,) = [line.strip() for line in text.splitlines() if line.startswith("    ln M")]
    assert re.findall(r"[\d.]+", law) == re.findall(r"[\d.]+", page.partition("    ln M")[2].partition("\n")[0])


def made(size, length, value, **interval):
    found = Multiplier(value, **interval)
    return Setting("made", "mst-best", size, size * length, 1.0, {gain_law.MAIN: found})


def test_a_law_is_found_again():
    """Least squares on exact points; with noise, the factor covers 95 % of further runs."""
    terms = (0.3, -0.25, -0.1, -0.06)
    grid = [(size, length) for size in (1e5, 3e5, 1e6, 2e6) for length in (5, 20, 80, 300)]

    def value(size, length):
        x = math.log(length / 20)
        return math.exp(terms[0] + terms[1] * math.log(size / 1e5) + terms[2] * x + terms[3] * x**2)

    exact = gain_law.fit([made(size, length, value(size, length)) for size, length in grid])
    assert exact.coefficients == pytest.approx(terms) and exact.factor == pytest.approx(1)
    assert exact.multiplier(5e5, 50) == pytest.approx(value(5e5, 50))
    random, inside = np.random.default_rng(0), []
    for _ in range(300):
        noisy = [made(size, length, value(size, length) * math.exp(random.normal(0, 0.1))) for size, length in grid]
        law = gain_law.fit(noisy)
        for size, length in grid:
            further = value(size, length) * math.exp(random.normal(0, 0.1))
            inside.append(abs(math.log(further / law.multiplier(size, length))) < math.log(law.factor))
    assert np.mean(inside) == pytest.approx(0.95, abs=0.015)


def test_pooled_intervals():
    """Two settings of three seeds with standard deviations of 0.03 and 0.05 in ln M; t is 4.303 with 2 degrees."""
    both = []
    for deviation in (0.03, 0.05):
        half = 4.302653 * deviation / math.sqrt(3)
        both.append(made(1e5, 20, 1.5, low=1.5 / math.exp(half), high=1.5 * math.exp(half), seeds=3))
    pool = gain_law.pooled([*both, made(1e5, 20, 1.2)])
    assert pool.degrees == 4 and pool.deviation == pytest.approx(math.sqrt((0.03**2 + 0.05**2) / 2), rel=1e-5)
    low, high = pool.interval(both[0].multipliers[gain_law.MAIN])
    assert (
        math.log(high / 1.5) == pytest.approx(math.log(1.5 / low)) == pytest.approx(2.776445 * pool.deviation / 3**0.5)
    )
