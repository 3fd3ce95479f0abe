"""DeepSpeed's comms_logger sees our collectives under their own name, with the bytes that Exchange counts."""

import deepspeed.comm as ds_comm
import pytest
from deepspeed.comm.comm import comms_logger

import mst_scale
from tests.support import pool
from tests.support.toy_engine import mst_config, train
from tests.support.toys import toy


def sent(mst):
    exchanges = {id(one): one for one in (*mst.state.exchange.of, mst.compute.local)}
    return sum(one.traffic.payload for one in exchanges.values())


def logged(rank, world, config):
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    train(engine, rank, world, 2)
    before = sent(engine.mst)
    comms_logger.reset_data()
    ds_comm.configure(enabled=True, prof_all=True, verbose=False)
    try:
        train(engine, rank, world, 3, first=2)  # step 3 is a topology step, step 5 checks for drift
    finally:
        ds_comm.configure(enabled=False, prof_all=False)
    payload = sent(engine.mst) - before
    names = {name: sum(size * n[0] for size, n in sizes.items()) for name, sizes in comms_logger.get_raw_data().items()}
    comms_logger.reset_data()
    return payload, names


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ours_are_named_and_their_bytes_are_exact(stage):
    for payload, names in pool.run(logged, 2, mst_config(stage, 2)):
        assert names["mst_all_reduce"] == payload > 0
        assert names["mst_drift_all_reduce"] > 0
        assert "mst_muon_all_to_all" not in names
        assert any(not name.startswith("mst") for name in names), "DeepSpeed's own"


def test_muons_matrices_travel_under_their_own_name():
    """There and back once a step, in float32; a rank sends what it holds of them."""
    config = mst_config(2, 2, optimizer={"type": "Muon", "params": {"lr": 1e-2}})
    sent = [names["mst_muon_all_to_all"] for _, names in pool.run(logged, 2, config)]
    assert sum(sent) == 3 * 2 * 4 * (2 * 13 * 37 + 13 * 7)
