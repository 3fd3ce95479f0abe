"""What tensor parallelism cuts up, by rows or columns and in several pieces, gets the masks of the whole matrix."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mst_scale.comm.exchange import Exchange
from mst_scale.errors import Damaged, UserError
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.blocks import Blocks, Elements
from mst_scale.mixed_growing.evolve import Layer
from mst_scale.mixed_growing.masks import LayerMask, MaskSet, assemble, ever_active
from mst_scale.mixed_growing.policies import policy
from mst_scale.shard import Cut, Shard
from tests.ranks.mixed_growing.test_blocks import Case, cases
from tests.support.growing_cases import CPU, small_machine
from tests.support.pool import run

LAYOUTS = ((2, 2), (3, 3), (4, 2), (4, 4))  # (ranks, tensor slices)


def some_cuts(rng: np.random.Generator, shape: tuple[int, int], tensor: int) -> list[Cut]:
    """A matrix for each slice of a tensor-parallel layer: rows or columns, one or several parts (q, k, v) cut each."""
    along = int(rng.integers(2))
    parts = int(rng.integers(1, 4))
    borders = [0, *np.sort(rng.integers(0, shape[along] + 1, parts - 1)).tolist(), shape[along]]
    found: list[list[tuple[int, int]]] = [[] for _ in range(tensor)]
    for begin, end in pairwise(borders):
        inner = [begin, *np.sort(rng.integers(begin, end + 1, tensor - 1)).tolist(), end]
        for mine, ab in zip(found, pairwise(inner), strict=True):
            mine.append(ab)
    whole = Cut.whole(shape)
    return [replace(whole, **{("rows", "columns")[along]: tuple(mine)}) for mine in found]


def shard_of(case: Case, i: int, rank: int, world: int, tensor: int) -> Shard:
    """A layer's shard on a rank: the slice's cut, and of that matrix what ZeRO would give, cut anywhere."""
    layer = case.layers[i]
    cut = some_cuts(np.random.default_rng([case.seed, i, tensor]), (layer.rows, layer.columns), tensor)[rank % tensor]
    numel, replicas = cut.local_matrix[0] * cut.local_matrix[1], world // tensor
    rng = np.random.default_rng([case.seed, i, 7, rank % tensor])
    borders = [0, *np.sort(rng.integers(0, numel + 1, replicas - 1)).tolist(), numel]
    begin, end = borders[rank // tensor : rank // tensor + 2]
    return Shard(f"layer{i}", cut, begin, end - begin)


def layers_of(case: Case, shards: list[Shard]) -> list[Layer]:
    layers: list[Layer] = []
    for x, shard in zip(case.arrays(), shards, strict=True):
        index = shard.logical(torch.arange(shard.length))
        mask = LayerMask(replace(shard, name=x["name"]), CPU)
        mask.set_flags(torch.from_numpy(x["mask"].reshape(-1))[index], int(x["mask"].sum()))
        mask.track_ever()
        inputs = (torch.from_numpy(x[k].reshape(-1))[index] for k in ("weight", "gradient", "momentum"))
        target = x["target"] if case.side > 1 else round(case.layers[len(layers)].target * x["mask"].size)
        layers.append(Layer(mask, target, *inputs))
    return layers


def masks_after_a_step(rank: int, world: int, tensor: int, case: Case) -> Any:
    """(masks of whole layers, digests, what was reported)."""
    shards = [shard_of(case, i, rank, world, tensor) for i in range(len(case.layers))]
    layers = layers_of(case, shards)
    exchange = Exchange(dist.group.WORLD if world > 1 else None)
    elements = Blocks(case.side, case.least) if case.side > 1 else Elements()
    with pytest.MonkeyPatch.context() as patch, small_machine():
        patch.setattr(packed_bits, "CPU_SPAN", 64)
        changes = elements.evolve(
            layers,
            policy=policy(case.policy, random_share=case.random_share),
            update_fraction=case.zeta,
            seed=case.seed,
            step=100,
            exchange=exchange,
            regrow=case.regrow,
        )
    masks = MaskSet([layer.mask for layer in layers])
    numbers = [(c.pruned, c.grown, c.regrown, c.ever_active, c.gradient_mean_square) for c in changes]
    return [bits_of(layer.mask, exchange) for layer in layers], masks.digests(exchange), numbers


def bits_of(mask: LayerMask, exchange: Exchange) -> np.ndarray:
    """The whole logical mask, from the definition of a shard's indices."""
    whole = torch.zeros(mask.numel, dtype=torch.int64)
    whole[mask.shard.logical(torch.arange(mask.length))] = mask.flags().to(torch.int64)
    found: np.ndarray = exchange.sum(whole).numpy()
    return found


@settings(deadline=None, max_examples=15, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_any_cut_gets_the_masks_of_the_whole(case: Case):
    expected = masks_after_a_step(0, 1, 1, case)
    for world, tensor in LAYOUTS:
        for found in run(masks_after_a_step, world, tensor, case):
            assert all(np.array_equal(a, b) for a, b in zip(found[0], expected[0], strict=True))
            assert found[1:] == expected[1:]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(cases(), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4]))
def test_masks_move_from_any_cut_to_any_other(case: Case, before: int, after: int):
    """What ranks of one layout have stored, those of another load; `assemble` reads it without any."""
    case = replace(case, side=1)
    written: list[Any] = []
    for rank in range(before * 2):
        shards = [shard_of(case, i, rank, before * 2, before) for i in range(len(case.layers))]
        written.append(MaskSet([layer.mask for layer in layers_of(case, shards)]).stored())
    for rank in range(after * 2):
        shards = [shard_of(case, i, rank, after * 2, after) for i in range(len(case.layers))]
        expected = [layer.mask for layer in layers_of(case, shards)]
        masks = MaskSet([LayerMask(mask.shard, CPU) for mask in expected])
        masks.load(written)
        for mask in expected:
            assert torch.equal(masks[mask.name].packed(), mask.packed())
            assert torch.equal(masks[mask.name].ever, mask.ever)
            assert masks[mask.name].active == mask.active
    for x in case.arrays():
        parts = [shards[x["name"]] for shards in written]
        assert np.array_equal(assemble(parts, x["name"]).numpy(), np.packbits(x["mask"].reshape(-1)))
        assert ever_active(parts) == x["mask"].sum()


def test_a_slice_that_no_file_holds_is_missed():
    whole = Cut.whole((4, 6))
    halves = [replace(whole, columns=((0, 3),)), replace(whole, columns=((3, 6),))]
    written = []
    for cut in halves:
        mask = LayerMask(Shard("a", cut, 0, 12), CPU)
        mask.set_flags(torch.arange(12) % 2 == 0, 12)
        written.append(MaskSet([mask]).stored())
    masks = MaskSet([LayerMask(Shard.whole("a", (4, 6)), CPU)])
    with pytest.raises(Damaged, match="mask of a lacks weight 3: a rank's file is missing"):
        masks.load(written[:1])
    masks.load(written)
    assert masks["a"].count() == 12


def test_a_mask_of_a_local_matrix_has_its_shape():
    cut = Cut((6, 4), ((0, 2), (4, 5)), ((1, 3),))
    mask = LayerMask(Shard("a", cut, 0, 6), CPU)
    flags = torch.tensor([True, False, True, True, False, True])
    mask.set_flags(flags, 10)
    assert torch.equal(mask.whole(Exchange()), flags.view(3, 2))
    assert mask.shard.logical(torch.arange(6)).tolist() == [1, 2, 5, 6, 17, 18]


def test_indices_go_there_and_back():
    cut = Cut((7, 5), ((1, 3), (3, 3), (5, 7)), ((0, 2), (4, 5)))
    shard = Shard("a", cut, 2, 7)
    at = torch.arange(7)
    where = torch.arange(35)
    found, back = shard.local(where)
    assert torch.equal(found[back.argsort()], shard.logical(at))
    assert sorted(back.tolist()) == at.tolist()


@pytest.mark.parametrize("rows", [((2, 1),), ((0, 3), (2, 4)), ((0, 8),)])
def test_ranges_ascend_within_the_matrix(rows: Any):
    with pytest.raises(UserError, match="must be ascending ranges"):
        Cut((7, 5), rows, ((0, 5),))
