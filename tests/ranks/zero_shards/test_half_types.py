"""fp16 is refused on every CPU, and no weight depends on whether a CPU reports it."""

from __future__ import annotations

import pytest
import torch

import mst_scale
from mst_scale.errors import UserError
from mst_scale.zero_shards.muon import newton_schulz_dtype
from mst_scale.zero_shards.start import half_types
from tests.ranks.zero_shards.test_muon import apart, muon_config
from tests.support import pool
from tests.support.reported import reported_fp16, reporting
from tests.support.toy_engine import mst_config, train
from tests.support.toys import toy

__all__ = ["reported_fp16"]


def attempt(rank, world, config):
    try:
        mst_scale.initialize(model=toy(), config=config)
    except UserError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("method", ["dense", "mst"])
def test_fp16_is_refused_on_cpus_in_one_line(reported_fp16, method):
    (said,) = pool.run(attempt, 1, mst_config(1, 1, "fp16", method=method))
    assert said.startswith("fp16.enabled: ") and '"bf16"' in said and len(said.splitlines()) == 1
    assert half_types() == ("bf16",)


def trained_weights(rank, world, config):
    engine, *_ = mst_scale.initialize(model=apart(), config=config)
    train(engine, rank, world, 4)
    return [p.detach().clone() for p in engine.module.parameters()]


DEEPSPEEDS = {"method": "dense", "zero_optimization": {"round_robin_gradients": True}}


@pytest.mark.full
@pytest.mark.parametrize("extra", [{}, DEEPSPEEDS], ids=["ours", "DeepSpeed's"])
def test_muon_trains_the_same_weights_whatever_the_cpu_reports(extra):
    config = muon_config(2, 1, **extra)
    without, having = (pool.run(reporting, 1, supported, trained_weights, config)[0] for supported in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(without, having, strict=True))


def test_newton_schulz_has_one_dtype_for_each_method(reported_fp16):
    assert newton_schulz_dtype("gram") == torch.float32 and newton_schulz_dtype("standard") == torch.bfloat16
