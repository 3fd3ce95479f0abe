"""The FLOP multiplier on numbers whose answer is known."""

import math

import pytest

from mst_scale.errors import UserError
from mst_scale.flops.frontier import Multiplier, Needed, Point, frontier, interval, multiplier, needed

BUDGETS = (1e12, 2e12, 4e12, 8e12, 1.6e13)


def law(flops: float, floor: float = 0.0) -> float:
    return floor + 100.0 * flops**-0.12


@pytest.mark.parametrize("gain", [0.6, 1.0, 1.7, 3.9])
def test_the_known_multiplier_of_a_power_law_is_recovered(gain):
    """Loss = a · C^-b, and a method that is worth `worth` times what it spends."""
    dense = [{1: Point(c, law(c))} for c in BUDGETS]
    spent = 3e12
    found = multiplier({1: Point(spent, law(gain * spent))}, dense)
    assert found == Multiplier(pytest.approx(gain, rel=1e-12))


def test_a_floor_under_the_loss_is_overread_by_little_at_budgets_a_factor_of_two_apart():
    dense = [{1: Point(c, law(c, floor=0.7))} for c in BUDGETS]
    found = multiplier({1: Point(3e12, law(1.7 * 3e12, floor=0.7))}, dense)
    assert 1.7 <= found.value < 1.7 * 1.01


def test_outside_of_the_dense_runs_the_answer_is_a_bound():
    dense = [{1: Point(c, law(c))} for c in BUDGETS]
    better = multiplier({1: Point(1e12, law(1e14))}, dense)
    assert better == Multiplier(pytest.approx(16), "≥") and str(better) == "≥ 16.00"
    worse = multiplier({1: Point(2e12, law(1e11))}, dense)
    assert worse == Multiplier(pytest.approx(0.5), "≤")
    assert needed(law(1.6e13), [run[1] for run in dense]) == Needed(pytest.approx(1.6e13)), "the last run itself"
    assert needed(law(1e12), [run[1] for run in dense]) == Needed(pytest.approx(1e12))


def test_only_the_best_dense_runs_count():
    """Undercut: (2, 5), (3, 3), (9, 2.5); above the line from (1, 8) to (4, 2), on which (2, 4) lies: (2, 4.1)."""
    points = [Point(1.0, 8.0), Point(2.0, 5.0), Point(2.0, 4.1), Point(3.0, 4.1), Point(4.0, 2.0), Point(9.0, 2.5)]
    assert frontier(points) == [Point(1.0, 8.0), Point(4.0, 2.0)]
    assert frontier([*points, Point(2.0, 3.9)]) == [Point(1.0, 8.0), Point(2.0, 3.9), Point(4.0, 2.0)]
    assert frontier([Point(1.0, 3.0), Point(1.0, 2.0)]) == [Point(1.0, 2.0)]
    assert needed(4.0, points).flops == pytest.approx(2.0), "between the corners"
    assert needed(1.9, points) == Needed(4.0, "≥")


def test_of_dense_runs_with_nearly_equal_flops_the_best_is_used():
    """Between them the line would be as steep as chance has it: a loss between theirs is outside."""
    points = [Point(1.0, 3.0), Point(1.004, 2.8), Point(2.0, 2.0)]
    assert frontier(points) == points[1:]
    assert needed(2.9, points) == Needed(1.004, "≤")
    assert frontier([Point(1.0, 2.8), Point(1.004, 3.0), Point(2.0, 2.0)]) == [Point(1.0, 2.8), Point(2.0, 2.0)]
    assert len(frontier([Point(1.0, 3.0), Point(1.02, 2.8), Point(2.0, 2.7)])) == 3


def test_the_interval_over_seeds_is_students_t_of_the_logarithms():
    """Seeds shift dense and method alike: pairing takes that out, and what is left is 1.5, 2 and 8/3 (by hand)."""
    shifts, gains = {1: 0.9, 2: 1.0, 3: 1.2}, {1: 1.5, 2: 2.0, 3: 8 / 3}
    dense = [{s: Point(c, shift * law(c)) for s, shift in shifts.items()} for c in BUDGETS]
    method = {s: Point(2e12, shifts[s] * law(gain * 2e12)) for s, gain in gains.items()}
    found = multiplier(method, dense)
    reach = 4.303 * math.log(4 / 3) / math.sqrt(3)
    assert found.value == pytest.approx(2.0) and found.seeds == 3 and not found.bound
    assert (found.low, found.high) == (pytest.approx(2 * math.exp(-reach)), pytest.approx(2 * math.exp(reach)))
    assert str(Multiplier(2.0, "", 1.5, 2.5, 3)) == "2.00 (1.50 to 2.50)"


def test_seeds_that_dense_runs_lack_are_left_out_and_without_a_shared_one_means_are_compared():
    dense = [{1: Point(c, law(c))} for c in BUDGETS]
    method = {1: Point(2e12, law(4e12)), 2: Point(2e12, law(6e12))}
    assert multiplier(method, dense) == Multiplier(pytest.approx(2.0))
    apart = multiplier({2: method[2]}, dense)
    assert apart == Multiplier(pytest.approx(3.0))


def test_a_dense_run_that_lacks_a_seed_counts_with_its_mean():
    """A length that has one or two of three seeds so far neither drops the other seeds nor is dropped."""
    shifts = {1: 0.9, 2: 1.0, 3: 1.2}
    full = [{s: Point(c, shift * law(c)) for s, shift in shifts.items()} for c in BUDGETS]
    method = {s: Point(2e12, shift * law(4e12)) for s, shift in shifts.items()}
    cheap = {1: Point(BUDGETS[0] / 2, 1.5 * law(BUDGETS[0] / 2))}
    assert multiplier(method, [*full, cheap]) == Multiplier(
        pytest.approx(2.0), "", pytest.approx(2.0), pytest.approx(2.0), 3
    )
    strong = {1: Point(3e12, 0.9 * law(6e12))}
    alone, together = (multiplier({2: method[2]}, [*full, *more]).value for more in ([], [strong]))
    assert together < alone == pytest.approx(2.0), "seed 2 meets what is known of the strong run"
    strong = {s: Point(3e12, shifts[s] * law(6e12)) for s in (1, 2)}
    several, mean = (
        multiplier(method, [*full, strong]),
        {s: multiplier({s: method[s]}, [*full, strong]) for s in method},
    )
    assert several.seeds == 3 and several.value < 2.0 and all(one.seeds == 1 for one in mean.values())
    third = {3: Point(3e12, (strong[1].loss + strong[2].loss) / 2)}
    assert mean[3].value == pytest.approx(multiplier({3: method[3]}, [*full, third]).value), "the mean stands for it"


def test_an_interval_needs_two_values():
    assert interval([1.0]) is None
    low, high = interval([1.0, 2.0, 3.0]) or (0, 0)
    assert (low, high) == (pytest.approx(2 - 4.303 / 3**0.5), pytest.approx(2 + 4.303 / 3**0.5))


def test_invalid_points_are_rejected():
    with pytest.raises(UserError, match="FLOPs and a loss above 0"):
        Point(0.0, 1.0)
    with pytest.raises(UserError, match="no dense run"):
        multiplier({1: Point(1.0, 1.0)}, [])
