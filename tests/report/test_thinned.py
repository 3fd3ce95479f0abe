"""A thinned table is the same as taking neighbours of the whole one together."""

import numpy as np
import pytest

from mst_scale.report.thinned import Thinned


@pytest.mark.parametrize("rows", [1, 7, 64, 65, 5_000, 20_001])
def test_buckets_are_means_and_extremes_of_neighbours(rows):
    rng = np.random.default_rng(rows)
    whole = np.stack([np.arange(1.0, rows + 1), rng.standard_normal(rows)], axis=1)
    whole[rng.random(rows) < 0.2, 1] = np.nan
    table = Thinned(["step", "loss"], limit=64)
    for row in whole:
        table.add(row.tolist())
    ends = table.last("step").astype(int)
    assert len(ends) <= 64 and ends[-1] == rows and table.rows == rows
    for begin, end, mean, low, high in zip(
        [0, *ends[:-1]], ends, table.mean("loss"), table.low("loss"), table.high("loss"), strict=True
    ):
        values = whole[begin:end, 1]
        values = values[np.isfinite(values)]
        if values.size:
            assert mean == pytest.approx(values.mean(), rel=1e-12, abs=1e-12)
            assert (low, high) == (values.min(), values.max())
        else:
            assert np.isnan(mean) and np.isnan(low)
    last = [whole[begin:end, 1] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    expected = [part[np.isfinite(part)][-1] if np.isfinite(part).any() else np.nan for part in last]
    np.testing.assert_array_equal(table.last("loss"), expected)


def test_reading_on_the_way_changes_nothing():
    once, often = Thinned(["x"], 8), Thinned(["x"], 8)
    for i in range(10_000):
        once.add([float(i)])
        often.add([float(i)])
        if i % 997 == 0:
            often.mean("x")
    np.testing.assert_array_equal(once.mean("x"), often.mean("x"))


def test_what_is_not_finite_is_missing():
    table = Thinned(["x"], 4)
    for value in (1.0, np.inf, np.nan, 3.0):
        table.add([value])
    np.testing.assert_array_equal(table.mean("x"), [1.0, np.nan, np.nan, 3.0])
