"""A topology step does what a slow and simple one does, for any layers, scores and counts, however they are cut up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings

from mst_scale.comm.exchange import Exchange
from mst_scale.mixed_growing.evolve import Change, Layer, sparsify
from mst_scale.mixed_growing.masks import LayerMask
from mst_scale.mixed_growing.policies import policy
from mst_scale.shard import Shard
from tests.support import growing_oracle as oracle
from tests.support.growing_cases import CPU, Case, LayerCase, cases, run_case, scores, small_machine
from tests.support.pool import run


def expected_steps(case: Case) -> list[oracle.Step]:
    chosen = policy(case.policy, random_share=case.random_share)
    steps = []
    for x in case.arrays():
        inputs = {k: torch.from_numpy(x[k]) for k in ("weight", "gradient", "momentum")}
        prune, grow = (
            criterion.score(*(inputs[read] for read in criterion.reads)).numpy()
            for criterion in (chosen.prune, chosen.grow)
        )
        steps.append(
            oracle.evolve(
                x["name"],
                x["mask"],
                prune,
                grow,
                target=x["target"],
                zeta=case.zeta if chosen.swaps else 0.0,
                random_share=chosen.random_share,
                seed=case.seed,
                step=100,
                regrow=case.regrow,
            )
        )
    return steps


def assert_like_the_oracle(case: Case, world: int, ranks: list[tuple[list[np.ndarray], list[Change]]]) -> None:
    for i, (x, step_) in enumerate(zip(case.arrays(), expected_steps(case), strict=True)):
        found = np.concatenate([flags[i] for flags, _ in ranks])
        assert np.array_equal(found, step_.mask), f"{x['name']} on {world} ranks"
        assert found.sum() == x["target"]
        before, after = x["mask"], step_.mask
        numbers = {
            (c[i].pruned, c[i].grown, c[i].regrown, c[i].by_score, c[i].by_random, c[i].gradient_mean_square)
            for _, c in ranks
        }
        assert len(numbers) == 1, "all ranks report the same"
        pruned, grown, regrown, by_score, by_random, _ = numbers.pop()
        assert (pruned, grown) == ((before & ~after).sum(), (after & ~before).sum())
        assert regrown == (step_.pruned & after).sum()
        assert (by_score, by_random) == (step_.by_score.sum(), step_.by_random.sum())
        change = ranks[0][1][i]
        if change.ever_active is not None:
            assert change.ever_active == (before | after).sum()
        begins = [case.slices(rank, world)[i][0] for rank in range(world)]
        parts = [changes[i].grown_indices().numpy() + b for b, (_, changes) in zip(begins, ranks, strict=True)]
        assert np.array_equal(np.concatenate(parts), np.flatnonzero(after & ~before))


@settings(deadline=None, max_examples=250, derandomize=True)
@given(cases())
def test_one_process_is_the_oracle(case: Case):
    assert_like_the_oracle(case, 1, [run_case(0, 1, case)])


FULL_SIZE = Case(
    layers=(LayerCase(200_001, "normal", 0.04, 0.045),
            LayerCase(150_000, "ties", 0.5, 0.4), LayerCase(70_000, "heavy", 0.95, 0.97)),
    policy="mst", random_share=None, zeta=0.3, regrow=True, seed=5, small=False, straddle=True,
)  # fmt: skip


@settings(deadline=None, max_examples=40, derandomize=True)
@example(FULL_SIZE)
@given(cases())
def test_any_number_of_ranks_is_the_oracle(case: Case):
    """Straddling parameters, arbitrary cuts, ranks that hold nothing; statistics and moments included."""
    sizes = {change.gradient_mean_square for change in run_case(0, 1, case)[1]}
    for world in (2, 3, 4):
        ranks = run(run_case, world, case)
        assert_like_the_oracle(case, world, ranks)
        assert {change.gradient_mean_square for change in ranks[-1][1]} == sizes


# --- before the first step ------------------------------------------------------------------------------------------


def sparsify_on_ranks(rank: int, world: int, how: str) -> list[np.ndarray]:
    found = []
    for small in (False, True):
        rng = np.random.default_rng(3)
        weights = [scores(rng, n, "ties") for n in (300, 0, 5)]
        layers = []
        for i, whole in enumerate(weights):
            begin, end = rank * whole.size // world, (rank + 1) * whole.size // world
            mask = LayerMask(Shard.of_range(f"layer{i}", (whole.size, 1), begin, end - begin), CPU)
            layers.append(Layer(mask, whole.size // 3, torch.from_numpy(whole[begin:end])))
        exchange = Exchange(dist.group.WORLD if world > 1 else None)
        if small:
            with small_machine():
                changes = sparsify(layers, how=how, seed=9, exchange=exchange)
        else:
            changes = sparsify(layers, how=how, seed=9, exchange=exchange)
        assert [c.pruned for c in changes] == [200, 0, 4]
        found.append(np.concatenate([layer.mask.flags().numpy() for layer in layers[:1]]))
    assert np.array_equal(*found)
    return found[:1]


@pytest.mark.parametrize("how", ["magnitude", "random"])
def test_initial_masks(how: str):
    whole = scores(np.random.default_rng(3), 300, "ties")
    everything = np.ones(300, bool)
    if how == "magnitude":
        expected = oracle.largest(whole, everything, 100)
    else:
        expected = oracle.at_random(300, everything, 100, "start", 9, "layer0")
    assert np.array_equal(sparsify_on_ranks(0, 1, how)[0], expected)
    for world in (2, 4):
        assert np.array_equal(np.concatenate([r[0] for r in run(sparsify_on_ranks, world, how)]), expected)
