"""The k best are found exactly, however wrong the first guess is, and with few bytes sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mst_scale.comm.exchange import Exchange, Traffic
from mst_scale.errors import DivergedError
from mst_scale.mixed_growing import packed_bits, top_k
from mst_scale.mixed_growing.random_k import select_at_random
from mst_scale.mixed_growing.scores import INFINITY_KEY, Scores
from mst_scale.mixed_growing.top_k import Request, select
from mst_scale.shard import Shard
from tests.support import growing_oracle as oracle
from tests.support.growing_cases import CPU, KINDS, scores, small_machine


def request(
    name: str, values: np.ndarray | None, candidates: np.ndarray, want: int, *, packed: torch.Tensor | None = None
) -> Request:
    whole = packed is None and candidates.all()
    return Request(
        shard=Shard.whole(name, (candidates.size,)),
        bits=None if whole else packed_bits.pack(torch.from_numpy(candidates)),
        candidates=int(candidates.sum()),
        want=want,
        device=CPU,
        scores=None if values is None else Scores(name, (torch.from_numpy(values),)),
    )


def flags(packed: torch.Tensor, length: int) -> np.ndarray:
    return packed_bits.unpack(packed, length).numpy()


@settings(deadline=None, max_examples=150, derandomize=True)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 700),
    st.sampled_from([0.03, 0.4, 1.0]),
    st.sampled_from([0.0, 0.01, 0.2, 0.5, 0.99, 1.0]),
    st.tuples(st.booleans(), st.booleans()),
)
def test_select_is_a_stable_sort(kind: str, size: int, density: float, share: float, ways: tuple[bool, bool]):
    largest, small = ways
    rng = np.random.default_rng(size)
    values, candidates = scores(rng, size, kind), rng.random(size) < density
    want = round(share * candidates.sum())
    asked = [request("layer", values, candidates, want)]
    if small:
        with small_machine():
            (chosen,) = select(asked, largest=largest, exchange=Exchange())
    else:
        (chosen,) = select(asked, largest=largest, exchange=Exchange())
    expected = (oracle.largest if largest else oracle.smallest)(values, candidates, want)
    assert np.array_equal(flags(chosen, size), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.003, 0.3, 0.9])
def test_select_in_a_layer_large_enough_to_be_sampled(kind: str, share: float):
    rng = np.random.default_rng(7)
    size = top_k.SMALL * 4 + 3
    values = scores(rng, size, kind)
    for density in (0.05, 0.6):
        candidates = rng.random(size) < density
        want = round(share * candidates.sum())
        (chosen,) = select([request("layer", values, candidates, want)], largest=True, exchange=Exchange())
        assert np.array_equal(flags(chosen, size), oracle.largest(values, candidates, want))


@pytest.mark.parametrize("guess", ["too low", "too high", "one key"])
def test_a_wrong_bracket_costs_a_pass_and_not_the_result(guess: str, monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(1)
    values, everything = scores(rng, 500, "normal"), np.ones(500, bool)
    splits = []

    def wrong(requests, whole, largest, exchange):
        low, high = whole[0]
        middle = int(oracle.keys(np.float32([0.5]))[0])
        return [{"too low": (low, low + 1), "too high": (high - 1, high), "one key": (middle, middle + 1)}[guess]]

    def counted(request, whole, bracket, largest):
        splits.append(bracket)
        return original(request, whole, bracket, largest)

    original = top_k._split
    monkeypatch.setattr(top_k, "_sampled_brackets", wrong)
    monkeypatch.setattr(top_k, "_split", counted)
    (chosen,) = select([request("layer", values, everything, 250)], largest=False, exchange=Exchange())
    assert np.array_equal(flags(chosen, 500), oracle.smallest(values, everything, 250))
    assert len(splits) == 2


def test_sampled_brackets_hold_and_are_narrow():
    """On a million ordinary scores one pass is enough and the list it leaves is short."""
    rng = np.random.default_rng(2)
    values, candidates = scores(rng, 1_000_000, "normal"), np.ones(1_000_000, bool)
    asked = [request("layer", values, candidates, k) for k in (300_000, 900_000)]
    whole = [(0, INFINITY_KEY)] * 2
    for r, (low, high) in zip(asked, top_k._sampled_brackets(asked, whole, False, Exchange()), strict=True):
        keys = oracle.keys(values)
        below, inside = (keys < low).sum(), ((keys >= low) & (keys < high)).sum()
        assert below < r.want <= below + inside
        assert inside < 0.1 * values.size  # ± 6 standard deviations of 16384 samples are ± 2 %, and bins' width


@pytest.mark.parametrize("candidates_share", [0.02, 0.97])
@pytest.mark.parametrize("want_share", [0.01, 0.5, 0.98])
def test_random_choice_by_listing_and_by_asking_is_the_oracles(candidates_share: float, want_share: float):
    rng = np.random.default_rng(5)
    candidates = rng.random(1500) < candidates_share
    want = round(want_share * candidates.sum())
    expected = oracle.at_random(1500, candidates, want, "word", 3, "layer")
    with small_machine():
        (chosen,) = select_at_random([request("layer", None, candidates, want)], key=("word", 3), exchange=Exchange())
    assert np.array_equal(flags(chosen, 1500), expected)


def test_layers_draw_independently():
    everything = np.ones(4000, bool)
    asked = [request(name, None, everything, 400) for name in ("one", "two")]
    one, two = (flags(c, 4000) for c in select_at_random(asked, key=("grow", 0, 1), exchange=Exchange()))
    # overlap of independent draws: mean 40, standard deviation 5.7
    assert (one & two).sum() < 75


def test_a_request_for_too_many_candidates_fails():
    with pytest.raises(AssertionError, match="layer: 4 of 3"):
        request("layer", np.ones(3, np.float32), np.ones(3, bool), 4)


@pytest.mark.parametrize(
    "kind", ["normal", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("ties", "equal"))]
)
def test_traffic_grows_with_layers_and_not_with_weights(kind: str):
    """Two sample rows of 128 counts a layer, then at most a dozen rounds of 64 counts a layer or 16 KiB in all."""

    def payload(layers: int, size: int) -> int:
        exchange = Exchange()
        everything = np.ones(size, bool)
        rng = np.random.default_rng(0)
        asked = [request(f"{i}", scores(rng, size, kind), everything, size // 7) for i in range(layers)]
        select(asked, largest=True, exchange=exchange)
        return exchange.traffic.payload

    for layers, size in ((49, 70_000), (49, 140_000), (2, 70_000), (2, 700_000)):
        peaks_and_counts = layers * (8 + 16)
        assert payload(layers, size) <= peaks_and_counts + layers * 2 * 512 + 12 * max(16_384, layers * 256)


def test_bytes_sent_in_a_ring():
    traffic = Traffic(calls=3, payload=1000)
    assert [traffic.sent_per_rank(ranks) for ranks in (1, 2, 4)] == [0, 1000, 1500]


def test_nan_is_named():
    values = np.float32([1, np.nan, 3])
    with pytest.raises(DivergedError, match=r"head.*NaN"):
        select([request("head", values, np.ones(3, bool), 1)], largest=True, exchange=Exchange())
