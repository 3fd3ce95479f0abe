"""A topology step in blocks does what one in weights does, exactly, on any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mst_scale.comm.exchange import Exchange
from mst_scale.errors import DivergedError
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.blocks import Blocks, must_stay
from mst_scale.mixed_growing.evolve import Change, Layer
from mst_scale.mixed_growing.masks import LayerMask
from mst_scale.mixed_growing.policies import POLICIES, Criterion, Policy, policy
from mst_scale.shard import Shard
from tests.support import block_oracle
from tests.support import growing_oracle as oracle
from tests.support.growing_cases import CPU, KINDS, scores
from tests.support.pool import run

# --- by hand --------------------------------------------------------------------------------------------------------


def one_layer(mask: Any, weight: Any, gradient: Any, target: int) -> Layer:
    shape = torch.tensor(weight).shape
    layer = LayerMask(Shard.of_range("layer", tuple(shape), 0, shape.numel()), CPU)
    flags = torch.tensor(mask, dtype=torch.bool)
    layer.set_flags(flags.view(-1), int(flags.sum()))
    return Layer(layer, target, *(torch.tensor(x, dtype=torch.float32).view(-1) for x in (weight, gradient)))


def step(layer: Layer, blocks: Blocks, zeta: float, policy: Policy = POLICIES["rigl"], **others: Any) -> Change:
    (change,) = blocks.evolve(
        [layer], policy=policy, update_fraction=zeta, seed=1, step=100, exchange=Exchange(), **others
    )
    return change


def test_a_step_by_hand():
    """3 × 5 in blocks of 2: block rows of 2 and 1 weights, block columns of 2, 2 and 1."""
    mask = [[1, 1, 0, 0, 1], [1, 1, 0, 0, 1], [0, 0, 1, 1, 0]]
    weight = [[1, -1, 0, 0, 5], [1, 1, 0, 0, -5], [0, 0, 3, 2, 0]]  # norms 4, –, 10, –, 5, –
    gradient = [[9, 9, 1, 1, 9], [9, 9, -1, 2, 9], [3, -1, 9, 9, -6]]  # of the dead: block 1 has 5, 3 has 4, 5 has 6
    layer = one_layer(mask, weight, gradient, 3)
    change = step(layer, Blocks(2, 0), 0.34, regrow=False)  # one of three blocks: 0 goes, 5 comes
    assert layer.mask.flags().view(3, 5).int().tolist() == [[0, 0, 0, 0, 1], [0, 0, 0, 0, 1], [0, 0, 1, 1, 1]]
    assert change.grown_indices().tolist() == [14]
    assert (change.numel, change.before, change.active, change.pruned, change.grown) == (6, 3, 3, 1, 1)
    assert layer.mask.active == 5
    squares = sum(x * x for row in gradient for x in row)
    assert change.gradient_mean_square == pytest.approx(squares / 15), "of weights, not of blocks"


def test_a_block_row_keeps_its_least():
    """1 and 5 go; 2 and 7 are the last of their rows, 9 and 8 of their columns: four stay where three were wanted."""
    weight = [[1.0, 2, 0], [0, 7, 5], [9, 0, 8]]
    mask = [[1, 1, 0], [0, 1, 1], [1, 0, 1]]
    for least, kept in ((0, [0, 0, 0, 0, 1, 0, 1, 0, 1]), (1, [0, 1, 0, 0, 1, 0, 1, 0, 1])):
        layer = one_layer(mask, weight, weight, 3)
        step(layer, Blocks(1, least), 0.0)
        assert layer.mask.flags().int().tolist() == kept


def test_a_block_is_ranked_by_the_sum_of_its_weights_scores():
    """Of w · g, block 0 has 0 and block 1 has 2; the product of their norms would say 16 and 4."""
    own = replace(POLICIES["rigl"], prune=Criterion(lambda w, g: w * g, ("weight", "gradient")))
    layer = one_layer([[1] * 4] * 2, [[4, 0, 1, 0], [0, 0, 1, 0]], [[0, 4, 1, 0], [0, 0, 1, 0]], 1)
    step(layer, Blocks(2, 0), 0.0, own)
    assert layer.mask.flags().view(2, 4).int().tolist() == [[0, 0, 1, 1]] * 2


def test_scores_of_either_sign_are_ranked_by_their_size():
    """What stays for a row's or a column's sake is the largest too, whatever sign a policy of one's own gives."""
    found = []
    for sign in (1, -1):
        own = replace(POLICIES["rigl"], prune=Criterion(lambda w, sign=sign: sign * w, ("weight",)))
        layer = one_layer([[1] * 3] * 3, [[1, 2, 3], [4, 5, 6], [7, 8, 9]], [[0] * 3] * 3, 4)
        step(layer, Blocks(1, 1), 0.0, own)
        found.append(layer.mask.flags().tolist())
    assert found[0] == found[1]


def test_where_the_least_is_more_than_the_target():
    weight = np.arange(16, dtype=np.float32).reshape(4, 4).tolist()
    layer = one_layer(np.ones((4, 4)).tolist(), weight, weight, 3)
    step(layer, Blocks(1, 2), 0.0)
    kept = layer.mask.flags().view(4, 4)
    assert kept.sum(0).min() == kept.sum(1).min() == 2
    assert layer.mask.active == Blocks(1, 2).at_least((4, 4)) == 8


def test_a_mask_of_another_granularity_is_rejected():
    layer = one_layer([[1, 0, 1, 1], [1, 1, 1, 1]], np.ones((2, 4)).tolist(), np.ones((2, 4)).tolist(), 1)
    with pytest.raises(RuntimeError, match="layer: its mask does not consist of whole 2 × 2 blocks"):
        step(layer, Blocks(2, 0), 0.5)


def test_a_nan_is_rejected_before_anything_changes():
    layer = one_layer(np.ones((2, 4)).tolist(), [[1.0, 2, 3, float("nan")]] * 2, np.ones((2, 4)).tolist(), 1)
    with pytest.raises(DivergedError, match=r"layer.*NaN"):
        step(layer, Blocks(2, 0), 0.5)
    assert layer.mask.dense


# --- the rule of the least ------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    st.integers(0, 2**20), st.tuples(st.integers(1, 12), st.integers(1, 12)), st.integers(0, 4),
    st.sampled_from([0.3, 0.7, 1.0]), st.sampled_from(["normal", "ties", "equal"]),
)  # fmt: skip
def test_rounds_are_the_loop(seed: int, shape: tuple[int, int], least: int, density: float, kind: str):
    rng, (rows, columns) = np.random.default_rng(seed), shape
    kept, score = rng.random(rows * columns) < density, np.abs(scores(rng, rows * columns, kind))
    found = must_stay(torch.from_numpy(score), torch.from_numpy(kept), (rows, columns), least).numpy()
    left = kept & ~block_oracle.prune(score, kept, (rows, columns), least, kept.size)
    assert np.array_equal(found, left if least else np.zeros_like(kept))


# --- against the oracle ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerCase:
    rows: int
    columns: int
    kind: str
    density: float
    target: float


@dataclass(frozen=True)
class Case:
    layers: tuple[LayerCase, ...]
    side: int
    least: int
    policy: str
    random_share: float | None
    zeta: float
    regrow: bool
    seed: int

    def arrays(self) -> list[dict[str, Any]]:
        """Whole matrices; the mask keeps the least, as every mask that a step leaves."""
        made = []
        for i, layer in enumerate(self.layers):
            rng = np.random.default_rng([self.seed, i])
            shape = (layer.rows, layer.columns)
            grid = block_oracle.grid(np.empty(shape), self.side)
            kept, order = np.ones(grid[0] * grid[1], bool), rng.random(grid[0] * grid[1]).astype(np.float32)
            kept &= ~block_oracle.prune(order, kept, grid, self.least, round((1 - layer.density) * kept.size))
            mask = block_oracle.spread(kept, shape, self.side)
            weight = np.where(mask, scores(rng, mask.size, layer.kind).reshape(shape), np.float32(0))
            gradient, momentum = (scores(rng, mask.size, layer.kind).reshape(shape) for _ in range(2))
            made.append(
                {"name": f"layer{i}", "mask": mask, "alive": kept, "grid": grid, "weight": weight,
                 "gradient": gradient, "momentum": momentum, "target": max(1, round(layer.target * kept.size))}
            )  # fmt: skip
        return made

    def slices(self, rank: int, world: int) -> list[tuple[int, int]]:
        """[begin, end) of each flattened parameter on a rank: one buffer of all of them, cut anywhere."""
        rng = np.random.default_rng([self.seed, 99, world])
        sizes = [x.rows * x.columns for x in self.layers]
        offsets = np.cumsum([0, *sizes]).tolist()
        borders = [0, *np.sort(rng.integers(0, offsets[-1] + 1, world - 1)).tolist(), offsets[-1]]
        return [
            tuple(min(max(border - offset, 0), size) for border in borders[rank : rank + 2])
            for size, offset in zip(sizes, offsets, strict=False)
        ]  # type: ignore[misc]


def cases() -> st.SearchStrategy[Case]:
    share = st.sampled_from([0.04, 0.3, 0.5, 0.9, 1.0])
    extent = st.sampled_from([1, 2, 5, 8, 13, 24, 37])
    layer = st.builds(LayerCase, rows=extent, columns=extent, kind=st.sampled_from(KINDS), density=share, target=share)
    return st.builds(
        Case,
        layers=st.lists(layer, min_size=1, max_size=3).map(tuple),
        side=st.sampled_from([1, 3, 4, 8, 16]),
        least=st.sampled_from([0, 1, 2, 3]),
        policy=st.sampled_from(list(POLICIES)),
        random_share=st.sampled_from([None, None, 0.0, 0.6, 1.0]),
        zeta=st.sampled_from([0.0, 0.1, 0.3, 1.0]),
        regrow=st.booleans(),
        seed=st.integers(0, 2**20),
    )


def run_case(rank: int, world: int, case: Case) -> tuple[list[np.ndarray], list[Change]]:
    """This rank's slices of the new masks, and what was reported."""
    layers = []
    for x, (begin, end) in zip(case.arrays(), case.slices(rank, world), strict=True):
        mask = LayerMask(Shard.of_range(x["name"], x["mask"].shape, begin, end - begin), CPU)
        mask.set_flags(torch.from_numpy(x["mask"].reshape(-1)[begin:end].copy()), int(x["mask"].sum()))
        mask.track_ever()
        inputs = (torch.from_numpy(x[k].reshape(-1)[begin:end].copy()) for k in ("weight", "gradient", "momentum"))
        layers.append(Layer(mask, x["target"], *inputs))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_bits, "CPU_SPAN", 64)  # several spans of rows
        changes = Blocks(case.side, case.least).evolve(
            layers,
            policy=policy(case.policy, random_share=case.random_share),
            update_fraction=case.zeta,
            seed=case.seed,
            step=100,
            exchange=Exchange(dist.group.WORLD if world > 1 else None),
            regrow=case.regrow,
        )
    for layer in layers:
        assert layer.mask.dense or layer.mask.count() == int(layer.mask.flags().sum())
    return [layer.mask.flags().numpy() for layer in layers], changes


def assert_like_the_oracle(case: Case, ranks: list[tuple[list[np.ndarray], list[Change]]]) -> None:
    chosen = policy(case.policy, random_share=case.random_share)
    for i, x in enumerate(case.arrays()):
        tensors = {k: torch.from_numpy(x[k]) for k in ("weight", "gradient", "momentum")}
        prune, grow = (
            block_oracle.norms(criterion.score(*(tensors[read] for read in criterion.reads)).numpy(), case.side)
            for criterion in (chosen.prune, chosen.grow)
        )
        expected = block_oracle.evolve(
            x["name"], x["alive"], x["grid"], prune, grow,
            target=x["target"], least=case.least, zeta=case.zeta if chosen.swaps else 0.0,
            random_share=chosen.random_share, seed=case.seed, step=100, regrow=case.regrow,
        )  # fmt: skip
        found = np.concatenate([flags[i] for flags, _ in ranks])
        whole = block_oracle.spread(expected, x["mask"].shape, case.side)
        assert np.array_equal(found, whole.reshape(-1)), x["name"]
        blocks = expected.reshape(x["grid"])
        assert blocks.sum(1).min() >= min(case.least, x["grid"][1])
        assert blocks.sum(0).min() >= min(case.least, x["grid"][0])
        change = ranks[0][1][i]
        assert (change.numel, change.before, change.active) == (expected.size, x["alive"].sum(), expected.sum())
        assert change.pruned == (x["alive"] & ~expected).sum()
        assert change.grown == (expected & ~x["alive"]).sum()
        if change.ever_active is not None:
            assert change.ever_active == (x["alive"] | expected).sum()
        assert len({(c[i].regrown, c[i].by_score, c[i].by_random) for _, c in ranks}) == 1
        begins = [case.slices(rank, len(ranks))[i][0] for rank in range(len(ranks))]
        parts = [changes[i].grown_indices().numpy() + b for b, (_, changes) in zip(begins, ranks, strict=True)]
        assert np.array_equal(np.concatenate(parts), np.flatnonzero(whole & ~x["mask"]))


@settings(deadline=None, max_examples=200, derandomize=True)
@given(cases())
def test_one_process_is_the_oracle(case: Case):
    assert_like_the_oracle(case, [run_case(0, 1, case)])


LARGER = Case(
    layers=(LayerCase(200, 300, "normal", 0.3, 0.2), LayerCase(130, 77, "ties", 0.5, 0.4)),
    side=16, least=2, policy="mst", random_share=None, zeta=0.3, regrow=True, seed=5,
)  # fmt: skip


@settings(deadline=None, max_examples=12, derandomize=True)
@example(LARGER)
@given(cases())
def test_any_number_of_ranks_is_the_oracle(case: Case):
    """Blocks that straddle ranks, ranks that hold nothing; statistics and moments included."""
    sizes = [change.gradient_mean_square for change in run_case(0, 1, case)[1]]
    for world in (2, 3, 4):
        ranks = run(run_case, world, case)
        assert_like_the_oracle(case, ranks)
        assert [change.gradient_mean_square for change in ranks[-1][1]] == sizes


# --- before the first step ------------------------------------------------------------------------------------------

START_SHAPES = ((24, 20), (7, 9))


def sparsify_on_ranks(rank: int, world: int, how: str, least: int) -> list[np.ndarray]:
    layers = []
    for i, shape in enumerate(START_SHAPES):
        whole = torch.from_numpy(scores(np.random.default_rng([3, i]), shape[0] * shape[1], "ties"))
        begin, end = (r * whole.numel() // world for r in (rank, rank + 1))
        mask = LayerMask(Shard.of_range(f"layer{i}", shape, begin, end - begin), CPU)
        mask.track_ever()
        layers.append(Layer(mask, (10, 4)[i], whole[begin:end]))
    exchange = Exchange(dist.group.WORLD if world > 1 else None)
    Blocks(4, least).sparsify(layers, how=how, seed=9, exchange=exchange)
    for layer in layers:
        assert layer.mask.ever is not None and torch.equal(layer.mask.ever, layer.mask.packed())
    return [layer.mask.flags().numpy() for layer in layers]


@pytest.mark.parametrize("least", [0, 2])
@pytest.mark.parametrize("how", ["magnitude", "random"])
def test_initial_masks(how: str, least: int):
    alone = sparsify_on_ranks(0, 1, how, least)
    for i, (shape, target) in enumerate(zip(START_SHAPES, (10, 4), strict=True)):
        whole = scores(np.random.default_rng([3, i]), shape[0] * shape[1], "ties").reshape(shape)
        grid = block_oracle.grid(whole, 4)
        kept = block_oracle.active_blocks(alone[i].reshape(shape), 4)
        everything = np.ones(kept.size, bool)
        if how == "magnitude":
            first_to_go = block_oracle.norms(whole, 4)
            best = oracle.largest(first_to_go, everything, target)
        else:
            places = oracle.places(kept.size, "start", 9, f"layer{i}")
            first_to_go, best = (kept.size - places).astype(np.float32), oracle.best(places, everything, target)
        if least:
            stays = ~block_oracle.prune(first_to_go, everything, grid, least, kept.size)
            rest = oracle.largest(first_to_go, ~stays, max(0, target - int(stays.sum())))
            best = stays | rest
            assert kept.reshape(grid).sum(0).min() >= 2 and kept.reshape(grid).sum(1).min() >= 2
        assert np.array_equal(kept, best)
    for world in (2, 4):
        ranks = run(sparsify_on_ranks, world, how, least)
        for i, mask in enumerate(alone):
            assert np.array_equal(np.concatenate([found[i] for found in ranks]), mask)
