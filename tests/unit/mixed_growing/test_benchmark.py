"""The benchmark measures the same job on all sides, and says what `mst bench` promises."""

from __future__ import annotations

import pytest
import torch

from mst_scale.benchmarks import topology, topology_ways
from mst_scale.comm.exchange import Exchange


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(topology.SHAPES, "toy", [(96, 32), (32, 32), (300, 32)])
    monkeypatch.setattr(topology, "TIMED_AGAINST_BASELINES", ("toy",))


def test_baselines_prune_and_grow_the_same_weights():
    """All but the random part: ordinary scores have no ties, so the sides agree on the rest."""
    state = topology.State(topology.SHAPES["toy"], 0, 1, shared=False)
    full, fast = topology.naive(state, None), topology.kthvalue(state)
    topology.ours(state, Exchange())
    for layer, *others in zip(state.layers, full, fast, strict=True):
        mine = layer.mask.flags()
        drawn = layer.target * topology_ways.ZETA * topology_ways.RANDOM_SHARE
        for other in others:
            assert int(other.sum()) == layer.target
            assert int((mine ^ other).sum()) <= 2 * drawn


def test_rows_keep_the_contract():
    threads = torch.get_num_threads()
    try:
        rows = topology.measure(0, 1, "toy", 1, 1)
    finally:
        torch.set_num_threads(threads)
    assert [row["baseline"] for row in rows] == [topology.NAIVE, topology.KTHVALUE, topology.MASKED_FILL]
    for row in rows:
        assert row["speedup"] == pytest.approx(
            row["baseline_ms"] / row["ours_ms"], rel=0.1, abs=0.02
        )  # of rounded times
    assert rows[0]["bytes_sent_per_rank"]["2"] * 2 == rows[0]["bytes_sent_per_rank"]["many"]
    assert "| toy |" in topology.table(rows)
