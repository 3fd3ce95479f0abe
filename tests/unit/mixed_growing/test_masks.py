"""A mask set keeps, cuts, joins, digests and checks its bits."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mst_scale.comm.exchange import Exchange
from mst_scale.errors import Damaged, UserError
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.masks import LayerMask, MaskSet, StoredMask, assemble, sha256
from mst_scale.shard import Shard

CPU = torch.device("cpu")


def sliced(name: str, flags: np.ndarray, begin: int, end: int) -> LayerMask:
    mask = LayerMask(Shard.of_range(name, (flags.size, 1), begin, end - begin), CPU)
    mask.set_flags(torch.from_numpy(flags[begin:end]), int(flags.sum()))
    return mask


def some_flags(size: int = 103) -> np.ndarray:
    return np.random.default_rng(size).random(size) < 0.4


def cut_points(size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, size), max_size=4).map(lambda ends: [0, *sorted(ends), size])


def test_a_new_mask_is_dense_and_keeps_nothing():
    masks = MaskSet([LayerMask(Shard.of_range("a", (4, 5), 3, 7), CPU)])
    assert masks.dense
    assert masks["a"].dense
    assert masks["a"].active == 20
    assert nbytes(masks) == 0
    values = torch.tensor([1.0, float("nan"), 3, 4, 5, 6, 7])
    before = values.clone()
    masks["a"].retain_(values)
    assert torch.equal(values.view(torch.int32), before.view(torch.int32)), "nothing is multiplied"


def test_a_full_mask_drops_its_bits():
    mask = sliced("a", some_flags(), 10, 50)
    assert not mask.dense
    mask.set_flags(torch.ones(40, dtype=torch.bool), 103)
    assert mask.dense
    assert mask.bits is None


def test_memory_is_an_eighth_of_a_byte_per_weight_of_the_slice():
    masks = MaskSet([sliced("a", some_flags(1003), 101, 606)])
    assert nbytes(masks) == 64  # ⌈505/8⌉
    masks["a"].track_ever()
    assert nbytes(masks) == 128


def test_ever_active_remembers():
    mask = sliced("a", np.array([1, 0, 0, 1], bool), 0, 4)
    mask.track_ever()
    mask.set_flags(torch.tensor([False, True, False, True]), 2)
    assert mask.flags().tolist() == [False, True, False, True]
    assert packed_bits.unpack(mask.ever, 4).tolist() == [True, True, False, True]


def test_retain_zeroes_several_views():
    mask = sliced("a", np.array([1, 0, 1, 0, 0], bool), 1, 5)
    weight, moment = torch.ones(4), torch.full((4,), float("inf"))
    mask.retain_(weight, moment)
    assert weight.tolist() == [0, 1, 0, 0]
    assert moment.tolist() == [0, float("inf"), 0, 0]


def test_names_are_unique():
    with pytest.raises(UserError, match="tied"):
        MaskSet([sliced("a", some_flags(), 0, 5), sliced("a", some_flags(), 5, 9)])


def test_a_slice_outside_its_parameter_is_rejected():
    with pytest.raises(UserError, match="exceeds its 20 weights"):
        LayerMask(Shard.of_range("a", (4, 5), 15, 6), CPU)
    assert (
        LayerMask(Shard.of_range("a", (4, 5), 24, 0), CPU).length == 0
    )  # ZeRO-3 pads: a rank may stand past the end with nothing


@settings(deadline=None, max_examples=60, derandomize=True)
@given(cut_points(103), cut_points(103), st.booleans())
def test_masks_move_to_any_other_cut(old: list[int], new: list[int], dense: bool):
    flags = np.ones(103, bool) if dense else some_flags()
    written = []
    for a, b in pairwise(old):
        mask = sliced("a", flags, a, b)
        mask.track_ever()
        written.append(MaskSet([mask]).stored())
    for a, b in pairwise(new):
        masks = MaskSet([LayerMask(Shard.of_range("a", (103, 1), a, b - a), CPU)])
        masks.load(written)
        assert np.array_equal(masks["a"].flags().numpy(), flags[a:b])
        assert masks["a"].active == flags.sum()
        assert masks["a"].dense is dense
        assert np.array_equal(packed_bits.unpack(masks["a"].ever, b - a).numpy(), flags[a:b])
    whole = assemble([shards["a"] for shards in written])
    assert np.array_equal(whole.numpy(), np.packbits(flags))
    assert sha256(whole) == hashlib.sha256(np.packbits(flags).tobytes()).hexdigest()


def test_replicas_load_too():
    flags = some_flags()
    written = [MaskSet([sliced("a", flags, 0, 103)]).stored() for _ in range(3)]
    masks = MaskSet([LayerMask(Shard.of_range("a", (103, 1), 20, 50), CPU)])
    masks.load(written)
    assert np.array_equal(masks["a"].flags().numpy(), flags[20:70])


def test_coverage_starts_again_if_the_writer_did_not_count():
    flags = some_flags()
    masks = MaskSet([sliced("a", ~flags, 0, 103)])
    masks["a"].track_ever()
    masks.load([MaskSet([sliced("a", flags, 0, 103)]).stored()])
    assert np.array_equal(packed_bits.unpack(masks["a"].ever, 103).numpy(), flags)


def nbytes(masks: MaskSet) -> int:
    """Kept on this rank."""
    return sum(bits.numel() for layer in masks for bits in (layer.bits, layer.ever) if bits is not None)


def damaged(kind: str) -> list[dict[str, StoredMask]]:
    flags = some_flags()
    ranks = [MaskSet([sliced("a", flags, a, b)]).stored() for a, b in ((0, 40), (40, 103))]
    good = ranks[1]["a"]
    if kind == "rank missing":
        return ranks[:1]
    if kind == "layer too many":
        return [{**ranks[0], "b": good}, ranks[1]]
    if kind == "layer missing":
        return [{}, {}]
    changes = {
        "foreign": {"shard": Shard.of_range("a", (51, 2), 40, 62)},
        "short": {"bits": good.bits[:-1]},
        "other step": {"active": good.active + 1},
        "dense in part": {"bits": None},
    }[kind]
    return [ranks[0], {"a": StoredMask(**{**vars(good), **changes})}]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("rank missing", "lacks weight 40"),
        ("layer missing", "no mask of a"),
        ("layer too many", "contain b, which is not"),
        ("foreign", "shape"),
        ("short", "truncated"),
        ("other step", "different steps"),
        ("dense in part", "different steps"),
    ],
)
def test_a_mismatch_is_rejected_by_name_and_changes_nothing(kind: str, message: str):
    masks = MaskSet([sliced("a", ~some_flags(), 0, 103)])
    before = masks["a"].bits.clone()
    with pytest.raises((Damaged, UserError), match=message):
        masks.load(damaged(kind))
    assert torch.equal(masks["a"].bits, before)


def test_a_flipped_bit_is_detected_when_the_mask_is_assembled():
    shard = MaskSet([sliced("a", some_flags(), 0, 103)]).stored()["a"]
    shard.bits[3] ^= 16
    with pytest.raises(Damaged, match="damaged"):
        assemble([shard], "a")


@settings(deadline=None, max_examples=40, derandomize=True)
@given(cut_points(103))
def test_digests_of_slices_add_up(ends: list[int]):
    flags = some_flags()
    whole = sliced("a", flags, 0, 103).digest()
    assert sum(sliced("a", flags, a, b).digest() for a, b in pairwise(ends)) % 2**64 == whole


def test_every_bit_counts_in_a_digest():
    flags = some_flags()
    one_off = [flags ^ (np.arange(103) == i) for i in range(103)]
    assert len({sliced("a", f, 0, 103).digest() for f in (flags, *one_off)}) == 104


def test_digests_distinguish_masks_and_names():
    flags = some_flags()
    swapped = flags.copy()
    on, off = np.flatnonzero(flags)[0], np.flatnonzero(~flags)[0]
    swapped[[on, off]] = False, True  # the count stays the same
    found = {sliced(n, f, 0, 103).digest() for n in "ab" for f in (flags, swapped)}
    assert len(found) == 4


def test_drift_is_named():
    masks = MaskSet([sliced("first", some_flags(), 0, 103), sliced("second", some_flags(99), 0, 99)])
    exchange = Exchange()
    expected = masks.digests(exchange)
    masks.check_drift(expected, exchange)
    masks["second"].bits[5] ^= 4
    with pytest.raises(RuntimeError, match="mask of second drifted"):
        masks.check_drift(expected, exchange)
