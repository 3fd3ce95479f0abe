"""The schedule follows the paper's equations as meant, at every step and for runs of any length."""

from __future__ import annotations

import dataclasses
import itertools
import math
from fractions import Fraction
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mst_scale.errors import UserError
from mst_scale.mixed_growing.config import TopologyConfig
from mst_scale.sparsity_variation import DURATIONS, Phase, Schedule, Segment, SparsityConfig

VARIATIONS = get_args(get_type_hints(SparsityConfig)["variation"])
UPDATES = get_args(get_type_hints(TopologyConfig)["update_schedule"])
OF_TOPOLOGY = ("policy", "interval", "update_schedule", "update_fraction", "update_decay")


def resolved(total: int, **stated: Any) -> Schedule:
    """The schedule of so many steps, from keys of mst.sparsity and mst.topology."""
    moves = TopologyConfig(**{key: stated.pop(key) for key in OF_TOPOLOGY if key in stated})
    return SparsityConfig(**stated).schedule(total, moves)


PAPER = resolved(140_000)
EXACT = 1e-12  # a handful of float64 roundings of numbers of order 1


def gpt2_small_gflops(segment: Segment) -> float:
    """The paper's ledger for GPT-2 small, 3 × forward, HSA-256 until the dense phase."""
    length, d, ffw, vocabulary = 1024, 768, 3072, 50304
    linear = 12 * length * ((2 * d - 1) * 4 * d + (2 * d - 1) * ffw + (2 * ffw - 1) * d)
    head = length * (2 * d - 1) * vocabulary
    attention = 12 * 2 * 2 * length * length * d
    q = 1.0 if segment.phase == "dense" else 231_040 / 1024**2
    return 3 * ((1 - segment.sparsity) * (linear + head) + q * attention) / 1e9


def test_the_preset_averages_to_the_papers_flops():
    assert PAPER.mean(gpt2_small_gflops) == pytest.approx(219.45, abs=0.005)  # printed to two decimals


def test_the_sparsest_segment_is_the_longest_at_the_highest_sparsity():
    assert PAPER.sparsest() == Segment(10_000, 110_000, "ultra", 0.96)
    brief = resolved(100, warmup=0, ultra=5, restore=40, max=0.5, restore_moves="staged", stages=5)
    assert brief.sparsest() == Segment(5, 13, "restore", 0.5), "the first stage of the restoration is as sparse"


def mean_sparsity(schedule) -> float:
    return schedule.mean(lambda segment: segment.sparsity)


def test_the_preset_averages_to_the_sum_written_out():
    warmup = sum(0.96 * (1 - (1 - j / 100) ** 3) for j in range(100)) * 100
    restore = sum(0.96 * (1 - x) ** 3 for x in (0, 0.2, 0.4, 0.6, 0.8)) * 2000
    assert mean_sparsity(PAPER) == pytest.approx((warmup + 100_000 * 0.96 + restore) / 140_000, abs=EXACT)


@pytest.mark.parametrize(
    ("step", "phase", "sparsity"),
    [
        (0, "warmup", 0.0),
        (99, "warmup", 0.0),  # re-evaluated at multiples of 100 only
        (100, "warmup", 0.96 * (1 - 0.99**3)),
        (5_000, "warmup", 0.96 * 0.875),
        (9_999, "warmup", 0.96 * (1 - 0.01**3)),
        (10_000, "ultra", 0.96),
        (109_999, "ultra", 0.96),
        (110_000, "restore", 0.96),
        (112_000, "restore", 0.96 * 0.512),
        (114_000, "restore", 0.96 * 0.216),
        (116_000, "restore", 0.96 * 0.064),
        (119_999, "restore", 0.96 * 0.008),
        (120_000, "dense", 0.0),
        (139_999, "dense", 0.0),
        (500_000, "dense", 0.0),
    ],
)
def test_table_of_the_preset(step: int, phase: str, sparsity: float):
    point = PAPER.at(step)
    assert point.phase == phase
    assert point.sparsity == pytest.approx(sparsity, abs=EXACT)


def test_staged_warmup_moves_in_n_stages_and_continuous_restoration_at_each_topology_step():
    schedule = resolved(140_000, warmup_moves="staged", restore_moves="continuous")
    assert [schedule.at(t).sparsity for t in (0, 1_999, 2_000, 8_000, 10_000)] == pytest.approx(
        [0, 0, 0.96 * (1 - 0.8**3), 0.96 * (1 - 0.2**3), 0.96], abs=EXACT
    )
    assert [schedule.at(t).sparsity for t in (110_000, 110_099, 110_100, 115_000)] == pytest.approx(
        [0.96, 0.96, 0.96 * 0.99**3, 0.96 / 8], abs=EXACT
    )


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        # ζ = 0.3/2·(1 + cos(π·progress)): progress of the piece that holds the step, amplitude of that piece
        ("1-cosine", {0: 0.3, 60_000: 0.15, 110_000: 0.15 * (1 + math.cos(math.pi * 11 / 12))}),
        ("2-cosine", {0: 0.3, 55_000: 0.15, 110_000: 0.3, 115_000: 0.15}),
        ("n-cosine", {0: 0.3, 55_000: 0.15, 110_000: 0.3, 111_000: 0.15, 112_000: 0.3, 118_000: 0.3}),
        ("decay-n-cosine", {0: 0.3, 110_000: 0.15, 111_000: 0.075, 112_000: 0.075, 118_000: 0.3 / 32}),
        ("constant", {0: 0.3, 55_000: 0.3, 111_000: 0.3, 118_000: 0.3}),
    ],
)
def test_table_of_update_fractions(update: str, expected: dict[int, float]):
    schedule = resolved(140_000, update_schedule=update)
    for step, value in expected.items():
        assert schedule.at(step).update_fraction == pytest.approx(value, abs=EXACT), step
    assert schedule.at(120_000).update_fraction == 0


def test_topology_steps_of_the_preset():
    assert not PAPER.is_topology_step(0)
    assert not PAPER.is_topology_step(99)
    assert PAPER.is_topology_step(100)
    assert PAPER.is_topology_step(109_900)
    assert PAPER.is_topology_step(119_900)
    assert PAPER.is_topology_step(120_000), "the first dense step takes the sparsity to exactly 0"
    assert not any(PAPER.is_topology_step(step) for step in range(120_001, 140_001))
    assert sum(1 for _ in PAPER.topology_steps()) == 1_200


def test_a_run_of_300_steps_has_the_papers_shape():
    schedule = resolved(300, interval=4)
    assert [(p.name, p.start, p.stop) for p in schedule.phases] == [
        ("warmup", 0, 21),  # 300/14 = 21.43, 11·300/14 = 235.7, 12·300/14 = 257.1
        ("ultra", 21, 236),
        ("restore", 236, 257),
        ("dense", 257, 300),
    ]
    stages = [segment for segment in schedule.segments() if segment.phase == "restore"]
    assert [s.start for s in stages] == [236, 241, 245, 249, 253]  # 236 + 4.2 i, and none before that
    assert [s.sparsity for s in stages] == pytest.approx([0.96 * (1 - x / 5) ** 3 for x in range(5)], abs=EXACT)
    assert mean_sparsity(schedule) == pytest.approx(mean_sparsity(PAPER), abs=0.015)  # 5 warm-up levels, not 100


@pytest.mark.parametrize(
    ("total", "stated", "interval"),
    [
        (1, {}, 25),
        (200, {}, 25),
        (1_750, {}, 25),  # a fifth of 125 steps
        (2_100, {}, 30),
        (7_000, {}, 100),
        (140_000, {}, 100),
        (200, {"variation": "sparse"}, 100),  # it has no gradual phase
        (2_401, {"warmup": 0, "ultra": 0.928571, "restore": 0.035714}, 25),  # a fifth of 86 steps would be 17
        (200, {"interval": 2}, 2),
        (140_000, {"interval": 1_000}, 1_000),
    ],
)
def test_the_default_interval_follows_from_the_steps_alone(total: int, stated: dict[str, Any], interval: int):
    assert resolved(total, **stated).interval == interval


@pytest.mark.parametrize("total", [60, 200, 500, 1_000])
def test_a_short_run_has_few_topology_steps(total: int):
    """At most one in 25 between its ends of phases and stages, which are seven at most."""
    steps = list(resolved(total).topology_steps())
    assert len(steps) <= total // 25 + 7


@pytest.mark.parametrize("shape", ["warmup", "restore"])
def test_a_staged_phase_is_the_equation_at_every_step(shape: str):
    """x = ⌊t/Δ⌋/N with Δ = T/N, also where N does not divide T, or exceeds it."""
    for length, stages in itertools.product((1, 2, 3, 4, 5, 6, 7, 21, 99), (1, 3, 5, 7)):
        stated = {"warmup": 0, "ultra": 10, "restore": 0, shape: length}
        schedule = resolved(length + 20, **stated, warmup_moves="staged", stages=stages)
        start = schedule.first_step(shape)
        assert start is not None
        for t in range(length):
            x = math.floor(Fraction(t) / Fraction(length, stages)) / stages
            gone = (1 - x) ** 3
            expected = 0.96 * (1 - gone if shape == "warmup" else gone)
            assert schedule.at(start + t).sparsity == pytest.approx(expected, abs=EXACT), (length, stages, t)
        at = [schedule.at(step).sparsity for step in range(start, start + length)]
        moves = [start + i + 1 for i, (before, now) in enumerate(itertools.pairwise(at)) if before != now]
        assert [s.start for s in schedule.segments() if s.phase == shape] == [start, *moves]


def test_a_run_of_ten_steps_skips_no_part_of_its_way():
    assert [round(resolved(10, max=0.9).at(t).sparsity, 4) for t in (7, 8, 9, 10)] == [0.9, 0.9, 0, 0]


def test_nothing_is_pruned_after_the_last_update_of_a_warmup():
    assert list(resolved(1).topology_steps()) == []
    schedule = resolved(20, warmup=1.0, ultra=0, restore=0, interval=5)
    assert schedule.at(20).sparsity == schedule.at(19).sparsity and 20 not in set(schedule.topology_steps())


def test_steps_and_shares_mix():
    schedule = resolved(200, warmup=20, ultra=0.5, restore=30, interval=10)
    assert [p.stop for p in schedule.phases] == [20, 120, 150, 200]
    assert resolved(50, warmup=0, ultra=1.0, restore=0).phases == (Phase("ultra", 0, 50),)


def test_an_interval_longer_than_a_phase_loses_no_phase():
    schedule = resolved(300, interval=100)
    assert {s.phase for s in schedule.segments()} == {"warmup", "ultra", "restore", "dense"}
    assert schedule.is_topology_step(21)
    assert schedule.is_topology_step(257)


def test_static_and_dense_have_no_topology_step():
    static = resolved(1000, variation="sparse", update_schedule="constant", update_fraction=0.0)
    assert list(static.topology_steps()) == []
    assert list(resolved(1000, variation="dense").topology_steps()) == []


def test_restoration_that_ends_the_run_ends_dense():
    schedule = resolved(100, warmup=10, ultra=80, restore=10)
    assert schedule.at(99).sparsity > 0
    assert schedule.at(100).sparsity == 0
    assert schedule.is_topology_step(100)


@pytest.mark.parametrize(
    ("pattern", "phases"),
    [
        ("sv", ["warmup", "ultra", "restore", "dense"]),
        ("dense", ["dense"]),
        ("sparse", ["ultra"]),
        ("sd", ["ultra", "dense"]),
        ("dsd", ["dense", "ultra", "dense"]),
        ("gd", ["restore", "dense"]),
        ("gmp", ["warmup", "ultra"]),
        ("acdc", ["dense", *["ultra", "dense"] * 5, "ultra"]),
    ],
)
def test_phases_of_each_pattern(pattern: str, phases: list[str]):
    schedule = resolved(1400, variation=pattern)
    assert [phase.name for phase in schedule.phases] == phases
    ends_dense = phases[-1] == "dense"
    assert (schedule.at(1400).sparsity == 0) is ends_dense
    assert schedule.sparse_until == (schedule.phases[-1].start if ends_dense else 1400)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup": 1.5}, "share of the run"),
        ({"ultra": -3}, "share of the run"),
        ({"max": 1.0}, "mst.sparsity.max"),
        ({"update_fraction": 1.2}, "mst.topology.update_fraction"),
        ({"update_decay": -0.1}, "mst.topology.update_decay"),
        ({"stages": 0}, "mst.sparsity.stages"),
        ({"interval": 0}, "mst.topology.interval"),
        ({"variation": "acdc", "turn": 0}, "turn must be above 0"),
        ({"warmup": 400}, "do not fit in 300 steps"),
        (
            {"variation": "gmp", "start": 0.25, "warmup": 0.9},
            r"mst\.sparsity\.start = 0\.25 and mst\.sparsity\.warmup = 0\.9 do not fit in 300 steps",
        ),
        ({"variation": "gmp", "start": 0, "warmup": 400}, r"^mst\.sparsity\.warmup = 400 do not fit"),
        (
            {"variation": "acdc", "warmup": 0.9, "ultra": 0.7},
            r"warmup = 0\.9, mst\.sparsity\.ultra = 0\.7 and .*turn = 0\.0714286",
        ),
        ({"variation": "acdc", "warmup": 0, "ultra": 0, "turn": 0.6}, r"^mst\.sparsity\.turn = 0\.6 do not fit"),
    ],
)
def test_invalid_values_are_rejected(changes: dict, message: str):
    with pytest.raises(UserError, match=message):
        resolved(300, **changes)


@pytest.mark.parametrize(
    ("total", "phases"),
    [
        (1, ["warmup"]),
        (2, ["warmup", "ultra"]),
        (3, ["warmup", "ultra", "restore"]),
        (4, ["warmup", "ultra", "ultra", "restore"]),
        (14, ["warmup", *["ultra"] * 10, "restore", "dense", "dense"]),
    ],
)
def test_shares_fit_in_the_shortest_run(total: int, phases: list[str]):
    schedule = resolved(total)
    assert [schedule.at(step).phase for step in range(total)] == phases


def test_first_steps_of_phases():
    assert [PAPER.first_step(phase) for phase in ("warmup", "ultra", "restore", "dense", "none")] == [
        0, 10_000, 110_000, 120_000, None,
    ]  # fmt: skip


def test_steps_and_runs_start_at_zero_and_one():
    with pytest.raises(UserError, match="step -1 is negative"):
        PAPER.at(-1)
    with pytest.raises(UserError, match="at least 1"):
        resolved(0)


def any_schedule() -> st.SearchStrategy[Schedule]:
    return st.builds(
        lambda stated, total: resolved(total, **stated),
        st.fixed_dictionaries(
            {
                "variation": st.sampled_from(VARIATIONS),
                "update_schedule": st.sampled_from(UPDATES),
                "warmup_moves": st.sampled_from(["staged", "continuous"]),
                "restore_moves": st.sampled_from(["staged", "continuous"]),
                "max": st.floats(0, 0.999),
                "warmup": st.floats(0, 0.3),
                "ultra": st.floats(0, 0.3),
                "restore": st.floats(0, 0.3),
                "turn": st.floats(0.05, 0.2),
                "interval": st.none() | st.integers(1, 50),
                "stages": st.integers(1, 7),
            }
        ),
        st.integers(20, 400),
    )


@settings(deadline=None, max_examples=150, derandomize=True)
@given(any_schedule())
def test_segments_agree_with_at_and_cover_every_step(schedule: Schedule):
    expected_start = 0
    for segment in schedule.segments():
        assert segment.start == expected_start < segment.stop
        expected_start = segment.stop
        for step in range(segment.start, segment.stop):
            point = schedule.at(step)
            assert (point.phase, point.sparsity) == (segment.phase, segment.sparsity)
            assert 0 <= point.update_fraction <= 1
    assert expected_start == schedule.total_steps


def asked(schedule: Schedule, step: int) -> Any:
    """What a step does to the topology."""
    point = schedule.at(step)
    return point.phase, point.sparsity, point.update_fraction * schedule.is_topology_step(step)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(any_schedule(), any_schedule(), st.integers(1, 100), st.integers(0, 420))
def test_where_two_schedules_part(ours: Schedule, other: Schedule, more: int, until: int):
    """Of one run, a longer one and any other."""
    last = ours.phases[-1]
    longer = dataclasses.replace(
        ours,
        total_steps=ours.total_steps + more,
        phases=(*ours.phases[:-1], dataclasses.replace(last, stop=last.stop + more)),
    )

    for theirs in (ours, other, longer):
        apart = (step for step in range(until + 1) if asked(ours, step) != asked(theirs, step))
        assert ours.parts_from(theirs, until) == theirs.parts_from(ours, until) == next(apart, None)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(any_schedule())
def test_topology_steps_are_all_steps_that_are_one(schedule: Schedule):
    every = range(schedule.total_steps + 2)
    assert list(schedule.topology_steps()) == [step for step in every if schedule.is_topology_step(step)]


@settings(deadline=None, max_examples=150, derandomize=True)
@given(any_schedule())
def test_the_target_moves_at_topology_steps_only(schedule: Schedule):
    topology = set(schedule.topology_steps())
    for step in range(1, schedule.total_steps + 1):
        if step not in topology:
            assert schedule.at(step).sparsity == schedule.at(step - 1).sparsity


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.integers(8, 2000))
def test_no_phase_of_the_preset_is_lost_to_rounding(total: int):
    schedule = resolved(total)
    assert [phase.name for phase in schedule.phases] == ["warmup", "ultra", "restore", "dense"]
    assert schedule.is_topology_step(schedule.sparse_until)


def test_values_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SparsityConfig().stages = 4  # type: ignore[misc]
    assert hash(SparsityConfig()) == hash(SparsityConfig()) and hash(PAPER) == hash(resolved(140_000))


duration = st.integers(0, 300) | st.floats(0, 0.3)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    st.sampled_from(VARIATIONS), st.sampled_from(UPDATES), duration, duration, duration,
    st.integers(1, 300) | st.floats(0.01, 0.3), st.sampled_from([0.0, 0.3]), st.sampled_from([0.0, 0.8]),
)  # fmt: skip
def test_what_depends_on_the_length_of_the_run(variation, update, warmup, ultra, restore, turn, fraction, most):  # noqa: PLR0917
    stated = {"warmup": warmup, "ultra": ultra, "restore": restore, "turn": turn, "variation": variation, "max": most}
    sparsity = SparsityConfig(**stated)
    moves = TopologyConfig(update_schedule=update, update_fraction=fraction)

    def shape(total: int) -> tuple[object, ...]:
        schedule = sparsity.schedule(total, moves)
        gradual = ("warmup", "restore")
        phases = [(p.name, p.start, p.stop if p.name in gradual else None) for p in schedule.phases]
        return phases, schedule.cosine_bounds if fraction > 0 and most > 0 else ()

    used = [getattr(sparsity, name) for name in DURATIONS[variation]]
    shares = [value for value in used if isinstance(value, float) and value > 0]
    if any(value * 60_000 < 1.5 for value in shares):
        return  # one step in both runs
    if variation == "acdc" and shares == [ultra]:
        return  # may come to the same one turn in both runs; it is asked for all the same
    assert sparsity.depends_on_length(moves) == (shape(60_000) != shape(120_000))


def test_gradual_pruning_can_begin_after_a_dense_phase():
    schedule = resolved(1000, variation="gmp", start=0.25, warmup=0.5, max=0.8, interval=50, update_fraction=0.0)
    assert [(phase.name, phase.start, phase.stop) for phase in schedule.phases] == [
        ("dense", 0, 250), ("warmup", 250, 750), ("ultra", 750, 1000),
    ]  # fmt: skip
    assert schedule.at(250).sparsity == 0 and schedule.at(749).sparsity < schedule.at(750).sparsity == 0.8
    assert schedule.at(500).sparsity == pytest.approx(0.8 * (1 - 0.5**3)), "half of the cubic"
    steps = list(schedule.topology_steps())
    assert steps == list(range(300, 751, 50)), "nothing is pruned before the start"


@pytest.mark.parametrize("policy", ["static", "gmp"])
def test_a_policy_without_swaps_has_topology_steps_only_where_the_sparsity_changes(policy):
    swapping, still = (resolved(1000, interval=50, policy=p, warmup_moves="staged") for p in ("mst", policy))
    assert still.phases == swapping.phases
    changes = [step for step in range(1, 1001) if still.at(step).sparsity != still.at(step - 1).sparsity]
    assert list(still.topology_steps()) == changes
    assert len(list(swapping.topology_steps())) > len(changes) + 10
    assert not SparsityConfig(variation="sparse").depends_on_length(TopologyConfig(policy=policy))


@pytest.mark.parametrize("turn", [1e-9, 1e-4, 6e-4, 1])
def test_a_turn_has_at_least_one_step(turn):
    schedule = resolved(1000, variation="acdc", turn=turn, warmup=100, ultra=300)
    names = [phase.name for phase in schedule.phases]
    assert names == ["dense", *["ultra", "dense"] * 150, "ultra"]
    assert (schedule.phases[-1].start, schedule.phases[-1].stop) == (400, 1000)


def test_turns_without_end_are_not_laid_out_to_see_whether_they_depend_on_the_length():
    assert SparsityConfig(variation="acdc", turn=100).depends_on_length(TopologyConfig())
