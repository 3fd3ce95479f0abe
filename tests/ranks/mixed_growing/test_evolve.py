"""A topology step does what Algorithm 2 means: tables worked by hand, and what it refuses on all ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from mst_scale.comm.exchange import Exchange
from mst_scale.errors import DivergedError, UserError
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.distribution import Plan, plan, share_of
from mst_scale.mixed_growing.evolve import Change, Layer, evolve, sparsify
from mst_scale.mixed_growing.masks import LayerMask
from mst_scale.mixed_growing.policies import POLICIES, Policy, policy
from mst_scale.shard import Shard
from tests.support import growing_oracle as oracle
from tests.support.growing_cases import CPU, scores
from tests.support.pool import run

RIGL = POLICIES["rigl"]


def one_layer(mask: list[int], weight: list[float], gradient: list[float], target: int) -> Layer:
    layer = LayerMask(Shard.whole("layer", (len(mask), 1)), CPU)
    layer.set_flags(torch.tensor(mask, dtype=torch.bool), sum(mask))
    return Layer(layer, target, *(torch.tensor(x, dtype=torch.float32) for x in (weight, gradient)))


def step(layer: Layer, chosen: Policy = RIGL, *, zeta: float, number: int = 100, regrow: bool = True) -> Change:
    return evolve(
        [layer], policy=chosen, update_fraction=zeta, seed=1, step=number, exchange=Exchange(), regrow=regrow
    )[0]


# --- tables worked by hand ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zeta", "target", "expected", "pruned", "grown"),
    [
        # alive 0-3 with |w| = 4 1 1 2; |g| of the dead 4-7 is 3 5 5 0, of the pruned 1, 2 it is 1, 2
        (0.50, 4, [1, 0, 0, 1, 0, 1, 1, 0], [1, 2], [5, 6]),  # two smallest out, two largest in
        (0.25, 4, [1, 0, 1, 1, 0, 1, 0, 0], [1], [5]),  # ties: weight 1 before 2, gradient 5 before 6
        (0.50, 3, [1, 0, 0, 1, 0, 1, 0, 0], [1, 2], [5]),  # grow one fewer than pruned
        (0.50, 5, [1, 0, 0, 1, 1, 1, 1, 0], [1, 2], [4, 5, 6]),
        (0.50, 6, [1, 0, 1, 1, 1, 1, 1, 0], [1], [4, 5, 6]),  # weight 2 is pruned and grows back
        (0.25, 1, [1, 0, 0, 0, 0, 0, 0, 0], [1, 2, 3], []),  # the jump of the target exceeds ζ
        (0.00, 6, [1, 1, 1, 1, 0, 1, 1, 0], [], [5, 6]),
        (0.50, 8, [1, 1, 1, 1, 1, 1, 1, 1], [], [4, 5, 6, 7]),  # full: nothing is pruned
        (1.00, 0, [0, 0, 0, 0, 0, 0, 0, 0], [0, 1, 2, 3], []),
    ],
)
def test_a_step_by_hand(zeta: float, target: int, expected: list[int], pruned: list[int], grown: list[int]):
    layer = one_layer([1, 1, 1, 1, 0, 0, 0, 0], [4, -1, 1, 2, 0, 0, 0, 0], [9, 1, -2, 9, 3, -5, 5, 0], target)
    change = step(layer, zeta=zeta)
    assert layer.mask.flags().int().tolist() == expected
    assert layer.mask.active == change.active == target
    assert change.grown_indices().tolist() == grown
    assert (change.before, change.pruned, change.grown) == (4, len(pruned), len(grown))
    assert change.churn == (len(pruned) + len(grown)) / 8


def test_without_regrowth_the_just_pruned_stay_dead():
    for regrow, expected in ((True, [1, 0, 1, 1, 1, 1, 1, 0]), (False, [1, 0, 0, 1, 1, 1, 1, 1])):
        layer = one_layer([1, 1, 1, 1, 0, 0, 0, 0], [4, 1, 1, 2, 0, 0, 0, 0], [9, 1, 2, 9, 3, 5, 5, 0], 6)
        change = step(layer, zeta=0.5, regrow=regrow)
        assert layer.mask.flags().int().tolist() == expected
        assert change.regrown == (1 if regrow else 0)


def test_regrown_weights_are_neither_pruned_nor_grown():
    layer = one_layer([1, 1, 0], [1, 5, 0], [9, 9, 1], 2)
    change = step(layer, zeta=0.5)
    assert (change.pruned, change.grown, change.regrown, change.by_score) == (0, 0, 1, 1)
    assert not change.grown_indices().numel(), "it keeps value and moments"


def test_a_just_grown_zero_is_active_and_pruned_first():
    """The mask is never inferred from w ≠ 0."""
    layer = one_layer([1, 1, 0, 0], [3, 0, 0, 0], [0, 0, 0, 7], 2)
    change = step(layer, zeta=0.5)
    assert change.before == 2
    assert layer.mask.flags().int().tolist() == [1, 0, 0, 1]


def test_growth_ranks_the_gradient_it_is_given_at_the_dead():
    """Dense gradients: a masked one would be 0 at every dead weight and grow the lowest index."""
    layer = one_layer([1, 1, 0, 0, 0, 0], [5, 1, 0, 0, 0, 0], [8, 8, 1, 2, -4, 3], 2)
    assert step(layer, zeta=0.5, regrow=False).grown_indices().tolist() == [4]


def test_a_full_target_leaves_no_mask():
    layer = one_layer([1, 0, 0, 1], [1, 0, 0, 2], [0, 0, 0, 0], 4)
    step(layer, zeta=0.3)
    assert layer.mask.dense
    assert layer.mask.bits is None


def test_random_growth_is_the_oracles_and_changes_with_the_step():
    sets = []
    for number in (100, 200):
        layer = one_layer([1] * 5 + [0] * 95, [1.0] * 5 + [0.0] * 95, [0.0] * 100, 10)
        step(layer, policy("set"), zeta=0.2, number=number)
        kept = np.array([False] + [True] * 4 + [False] * 95)  # the tie at 1.0 goes to index 0
        drawn = oracle.at_random(100, ~kept, 6, "grow", 1, number, "layer")
        assert np.array_equal(layer.mask.flags().numpy(), kept | drawn)
        sets.append(frozenset(np.flatnonzero(drawn)))
    assert sets[0] != sets[1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # numel, active, target, ζ, R
        ((1000, 100, 100, 0.3, 0.25), Plan(30, 23, 7)),  # ⌊0.25·30⌋ = 7
        ((1000, 100, 60, 0.3, 0.25), Plan(40, 0, 0)),  # a jump beyond ζ·A grows nothing
        ((1000, 100, 80, 0.3, 0.25), Plan(30, 8, 2)),
        ((1000, 100, 150, 0.3, 1.0), Plan(30, 0, 80)),
        ((1000, 100, 1000, 0.3, 0.25), Plan(0, 0, 900)),
        ((1000, 0, 10, 0.3, 0.0), Plan(0, 10, 0)),
        ((1000, 10, 10, 0.0, 0.5), Plan(0, 0, 0)),
    ],
)
def test_counts_by_hand(arguments: tuple, expected: Plan):
    assert plan(*arguments, regrow=True) == expected


def test_the_update_fraction_counts_active_weights_without_float_noise():
    assert share_of(0.3, 10) == 3  # 0.3 as a float is below 3/10
    assert share_of(0.7, 10) == 7
    assert share_of(0.29, 100) == 29  # 0.29 · 100 is 28.999… in floats
    assert share_of(1 / 3, 9) == 2  # billionths: 0.333333333
    assert share_of(1.0, 10**12 + 7) == 10**12 + 7


def test_without_regrowth_prune_leaves_enough_to_grow():
    assert plan(10, 8, 9, 0.5, 0.0, regrow=False) == Plan(1, 2, 0)
    assert plan(10, 8, 9, 0.5, 0.0, regrow=True) == Plan(4, 5, 0)


def test_static_and_gmp_exchange_nothing():
    for name in ("static", "gmp"):
        layer = one_layer([1, 1, 0, 0], [1, 2, 0, 0], [0, 0, 5, 5], 2)
        change = step(layer, policy(name), zeta=0.5)
        assert layer.mask.flags().int().tolist() == [1, 1, 0, 0]
        assert (change.pruned, change.grown, change.churn) == (0, 0, 0)
    layer = one_layer([1, 1, 1, 1], [1, 4, 2, 3], [0, 0, 0, 0], 2)
    step(layer, policy("gmp"), zeta=0.5)
    assert layer.mask.flags().int().tolist() == [0, 1, 0, 1]


def test_ever_active_share_grows_and_survives_pruning():
    layer = one_layer([1, 1, 0, 0], [3, 1, 0, 0], [0, 0, 0, 7], 2)
    layer.mask.track_ever()
    assert step(layer, zeta=0.5).ever_active == 3
    assert layer.mask.count() == 2


def test_mean_square_of_the_gradient_of_layers_that_grow():
    layer = one_layer([1, 1, 0, 0], [3, 1, 0, 0], [3, 4, 0, 5], 2)
    assert step(layer, zeta=0.5).gradient_mean_square == (9 + 16 + 25) / 4
    assert step(layer, policy("static"), zeta=0.5).gradient_mean_square is None


def test_weights_are_read_only():
    layer = one_layer([1, 1, 0, 0], [3, 1, 0, 0], [0, 0, 0, 7], 2)
    step(layer, zeta=0.5)
    assert layer.weight.tolist() == [3, 1, 0, 0]
    assert layer.gradient.tolist() == [0, 0, 0, 7]


# --- what users can do wrong ----------------------------------------------------------------------------------------


def test_missing_inputs_of_a_policy_are_named():
    mask = LayerMask(Shard.of_range("layer", (4, 1), 0, 4), CPU)
    mask.set_flags(torch.tensor([True, True, False, False]), 2)
    with pytest.raises(UserError, match=r"layer: .* gradient"):
        step(Layer(mask, 2, torch.ones(4)), zeta=0.5)
    with pytest.raises(UserError, match=r"layer: .* momentum"):
        step(Layer(mask, 2, torch.ones(4), torch.ones(4)), policy("snfs"), zeta=0.5)
    assert step(Layer(mask, 2, torch.ones(4)), policy("set"), zeta=0.5).by_random == 1
    with pytest.raises(UserError, match="5 of 4"):
        Layer(mask, 5, torch.ones(4))
    with pytest.raises(UserError, match="gradient"):
        Layer(mask, 2, torch.ones(4), torch.ones(3))


@pytest.mark.parametrize("where", ["weight", "gradient"])
def test_nan_is_rejected_by_layer_and_nothing_changes(where: str):
    good = one_layer([1, 1, 0, 0], [3, 1, 0, 0], [0, 0, 0, 7], 2)
    bad = one_layer([1, 1, 0, 0], [3, 1, 0, 0], [0, 0, 0, 7], 2)
    good.mask.shard, bad.mask.shard = (Shard.whole(name, (4, 1)) for name in ("good", "bad"))
    getattr(bad, where)[1] = float("nan")
    with pytest.raises(DivergedError, match=r"bad.*NaN"):
        evolve([good, bad], policy=RIGL, update_fraction=0.5, seed=1, step=1, exchange=Exchange())
    assert good.mask.flags().int().tolist() == bad.mask.flags().int().tolist() == [1, 1, 0, 0]


def nan_on_one_rank(rank: int, world: int) -> tuple[str, list[int]]:
    mask = LayerMask(Shard.of_range("layer", (4 * world, 1), 4 * rank, 4), CPU)
    mask.set_flags(torch.tensor([True, True, False, False]), 2 * world)
    gradient = torch.tensor([0.0, 0, 1, float("nan") if rank == world - 1 else 2])
    layers = [Layer(mask, 2 * world, torch.ones(4), gradient)]
    try:
        evolve(layers, policy=RIGL, update_fraction=0.5, seed=1, step=1, exchange=Exchange(dist.group.WORLD))
    except DivergedError as error:
        return str(error), mask.flags().int().tolist()
    return "no error", []


def test_nan_on_one_rank_is_rejected_on_all():
    for message, mask in run(nan_on_one_rank, 3):
        assert "layer" in message and "NaN" in message
        assert mask == [1, 1, 0, 0]


def corrupt_one_rank(rank: int, world: int) -> list[str]:
    """A bit flips on rank 1: the next step, and the digest before it, stop all ranks and name the layer."""
    from mst_scale.mixed_growing.masks import MaskSet

    masks = [LayerMask(Shard.of_range(name, (8 * world, 1), 8 * rank, 8), CPU) for name in ("sound", "broken")]
    for mask in masks:
        mask.set_flags(torch.arange(8) % 2 == 0, 4 * world)
    exchange, whole = Exchange(dist.group.WORLD), MaskSet(masks)
    expected = whole.digests(exchange)
    whole.check_drift(expected, exchange)
    if rank == 1:
        masks[1].bits[0] ^= 1
    messages = []
    layers = [Layer(mask, 4 * world, torch.arange(8.0), torch.ones(8)) for mask in masks]
    for attempt in (
        lambda: whole.check_drift(expected, exchange),
        lambda: evolve(layers, policy=RIGL, update_fraction=0.25, seed=1, step=1, exchange=exchange),
    ):
        try:
            attempt()
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def test_a_corrupted_rank_stops_all_with_the_layers_name():
    for messages in run(corrupt_one_rank, 2):
        assert len(messages) == 2
        assert all("broken" in message and "sound" not in message for message in messages)


def test_a_mask_that_lost_weights_stops_the_step():
    """Counts say 4 of 8, the bits say 2: prune 3 of them."""
    layer = one_layer([1, 1, 1, 1, 0, 0, 0, 0], [4, 1, 1, 2, 0, 0, 0, 0], [9, 1, 2, 9, 3, 5, 5, 0], 1)
    layer.mask.bits[0] = 0b11000000
    with pytest.raises(RuntimeError, match="layer: its mask has lost weights"):
        step(layer, zeta=0.0)


def replicas_that_differ(rank: int, world: int) -> str:
    from mst_scale.mixed_growing.masks import MaskSet

    mask = LayerMask(Shard.of_range("layer", (8, 1), 0, 8), CPU)
    mask.set_flags(torch.arange(8) % 2 == 0, 4)
    masks = MaskSet([mask])
    if rank == 1:
        mask.bits[0] ^= 0b11000000  # a different mask of the same size
    expected = masks.digests(Exchange())  # each rank is content with itself
    try:
        masks.check_drift(expected, Exchange(), replicas=Exchange(dist.group.WORLD))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_replicas_are_compared_with_each_other():
    assert all("mask of layer drifted" in message for message in run(replicas_that_differ, 2))


# --- over many steps, and before the first one ------------------------------------------------------------------------


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.lists(st.sampled_from([0.0, 0.02, 0.1, 0.5, 0.9, 1.0]), min_size=3, max_size=8), st.booleans())
def test_counts_never_drift_over_many_steps(densities: list[float], regrow: bool):
    n, rng = 500, np.random.default_rng(len(densities))
    mask = LayerMask(Shard.of_range("layer", (n, 1), 0, n), CPU)
    weight = torch.from_numpy(scores(rng, n, "normal"))
    for number, density in enumerate(densities):
        gradient = torch.from_numpy(scores(rng, n, "normal"))
        target = round(density * n)
        layer = Layer(mask, target, weight, gradient)
        change = step(layer, policy("mst"), zeta=0.3, number=number, regrow=regrow)
        assert mask.count() == mask.active == target
        mask.retain_(weight)
        weight[change.grown_indices()] = 0.0
        weight[mask.flags()] += torch.from_numpy(rng.standard_normal(target).astype(np.float32)) * 0.1


def test_coverage_counts_from_the_initial_masks():
    mask = LayerMask(Shard.of_range("layer", (4, 1), 0, 4), CPU)
    mask.track_ever()
    (change,) = sparsify([Layer(mask, 2, torch.tensor([1.0, 4, 2, 3]))], how="magnitude", seed=0, exchange=Exchange())
    assert change.ever_active == 2
    assert packed_bits.unpack(mask.ever, 4).tolist() == [False, True, False, True]


def test_initial_masks_by_an_unknown_rule():
    with pytest.raises(UserError, match=r"mst\.sparsity\.initial"):
        sparsify([], how="best", seed=0, exchange=Exchange())
