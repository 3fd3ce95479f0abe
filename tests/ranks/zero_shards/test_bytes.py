"""Bytes of states and of collectives: against the tensors of real engines, and against DeepSpeed's comms_logger."""

import math
import timeit

import deepspeed.comm as ds_comm
import pytest
import torch
from deepspeed.comm.comm import comms_logger

from mst_scale import zero_shards
from mst_scale.tensor_parallel import copied, summed
from tests.support import plan_measured as measured
from tests.support import pool
from tests.support.plan_configs import config

pytestmark = pytest.mark.full

WIDE = {"n_embd": 128, "vocab_size": 500}
DENSITY = 0.04


def case(stage, precision, kind, **zero):
    mst = {
        "method": "set", "sparsity": {"variation": "sparse", "max": 1 - DENSITY}, "targets": {"lm_head": True},
        "topology": {"interval": 100, "check_every": 0}, "compute": {"compact": kind, "backend": "dense"},
    }  # fmt: skip
    return config(stage, precision, mst=mst, zero=zero, **WIDE)


def found_in(rank, world, config):
    """Bytes when a step begins, by both counts; bytes of a step's collectives, by both; dense and sparse parameters."""
    engine = measured.build(config)
    measured.train(engine, config, 1)
    parts = {}
    zero_shards.around_model_step(
        engine,
        lambda: parts.update({name: sum(part.values()) for name, part in measured.parts(engine).items()}),
        lambda: None,
    )
    counter = zero_shards.comm_bytes()
    comms_logger.reset_data()
    ds_comm.configure(enabled=True, prof_all=True, verbose=False)
    try:
        before = counter.total
        measured.train(engine, config, 1)
        sent = counter.total - before
        logged = sum(size * n[0] for sizes in comms_logger.get_raw_data().values() for size, n in sizes.items())
    finally:
        ds_comm.configure(enabled=False, prof_all=False)
        comms_logger.reset_data()
    names = {part.name for part in engine.mst.store.slices}
    numels = {name: math.prod(zero_shards.shape_of(p)) for name, p in zero_shards.named_parameters(engine.module)}
    return {
        "states": zero_shards.state_bytes(engine),
        "seen": parts["optimizer"] + parts["gradients"],
        "sent": sent,
        "logged": logged,
        "sparse": sum(numel for name, numel in numels.items() if name in names) / sum(numels.values()),
    }


LAYOUTS = [(0, "fp32"), (0, "bf16"), (1, "bf16"), (2, "fp32"), (2, "bf16+fp32"), (3, "bf16")]


@pytest.mark.parametrize(("stage", "precision"), LAYOUTS)
def test_bytes_of_compact_layers_follow_the_density(stage, precision):
    compact, dense = (pool.run(found_in, 2, case(stage, precision, kind)) for kind in ("auto", "off"))
    for mine, theirs in zip(compact, dense, strict=True):
        for one in (mine, theirs):
            assert one["states"] == pytest.approx(one["seen"], rel=0.02)
            assert one["sent"] == one["logged"] > 0
        left = 1 - mine["sparse"] * (1 - DENSITY)  # what is not sparse is dense on both sides
        assert mine["states"] == pytest.approx(left * theirs["states"], rel=0.05)
        assert mine["sent"] == pytest.approx(left * theirs["sent"], rel=0.1)


def test_bytes_of_an_offloaded_optimizer():
    raw = case(2, "bf16+fp32", "off", offload_optimizer={"device": "cpu"})
    without = pool.run(found_in, 2, case(2, "bf16+fp32", "off"))
    for one, other in zip(pool.run(found_in, 2, raw), without, strict=True):
        assert one["states"] == pytest.approx(other["states"], rel=0.02)
        assert one["sent"] == one["logged"]


def seconds_of_a_count(rank, world):
    ds_comm.init_distributed(verbose=False)
    counter = zero_shards.comm_bytes()
    assert zero_shards.comm_bytes() is counter, "the backend is wrapped once"
    tensor = torch.ones(10)
    before = counter.total
    ds_comm.all_reduce(tensor)
    assert counter.total == before + 40
    return min(timeit.repeat(lambda: counter.add(tensor), number=1000, repeat=3)) / 1000


def test_counting_takes_microseconds():
    assert max(pool.run(seconds_of_a_count, 2)) < 20e-6


def counted_of_split_layers(rank, world):
    ds_comm.init_distributed(verbose=False)
    counter = zero_shards.comm_bytes()
    before = counter.total
    x = torch.full((10,), float(rank), requires_grad=True)
    summed(copied(x, None), None).sum().backward()
    assert x.grad.tolist() == [float(world)] * 10
    return counter.total - before


def test_the_all_reduces_of_split_layers_are_counted():
    assert pool.run(counted_of_split_layers, 2) == [80, 80], "one forward, one backward"


def counted_by_group_size(rank, world):
    ds_comm.init_distributed(verbose=False)
    counter = zero_shards.comm_bytes()
    alone = [torch.distributed.new_group([one]) for one in range(world)][rank]
    tensor, parts, counts = torch.ones(10), torch.ones(10 * world), []
    for call in (
        lambda: ds_comm.all_reduce(tensor),
        lambda: ds_comm.all_reduce(tensor, group=alone),
        lambda: ds_comm.broadcast(tensor, rank, group=alone),
        lambda: ds_comm.all_gather_into_tensor(parts, tensor),
        lambda: ds_comm.all_gather_into_tensor(torch.ones(10), tensor, group=alone),
    ):
        before = counter.total
        call()
        counts.append(counter.total - before)
    return counts


@pytest.mark.parametrize(("world", "bytes_sent"), [(1, 0), (2, 40)])
def test_a_group_of_one_rank_sends_nothing(world, bytes_sent):
    for counts in pool.run(counted_by_group_size, world):
        assert counts == [bytes_sent, 0, 0, bytes_sent, 0]
