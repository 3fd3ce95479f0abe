"""Every part of the memory model against the tensors of real runs on 2 ranks: stages 0 to 3, fp32, bf16, offload."""

from dataclasses import replace

import pytest

from mst_scale.config import load
from mst_scale.plan.memory import Memory, memory
from mst_scale.plan.setting import setting_of
from tests.plan import measured
from tests.plan.configs import MST, config
from tests.support import pool

WITHIN = 0.1  # padding, histograms and what is alive for an instant
WIDE = {"n_embd": 64, "vocab_size": 1000}
PARTLY = {"stage3_param_persistence_threshold": 100}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


def case(stage, precision, **more):
    zero = {**(PARTLY if stage == 3 else {}), **more.pop("zero", {})}
    return config(stage, precision, mst=MST, zero=zero, **{**WIDE, **more})


CASES = {
    "0 fp32": case(0, "fp32"),
    "0 bf16": case(0, "bf16"),
    "1 bf16, one bucket": case(1, "bf16", bucket=10**6),
    "2 fp32": case(2, "fp32"),
    "2 bf16, added up in fp32": case(2, "bf16+fp32", zero={"overlap_comm": True}),
    "3 fp32": case(3, "fp32", bucket=10**6),
    "3 bf16": case(3, "bf16"),
    "3 bf16, added up in fp32": case(3, "bf16+fp32"),
    "2 layers larger than a sample": case(2, "bf16+fp32", n_embd=192, bucket=200_000, accumulation=1),
    "2 offloaded": case(2, "bf16+fp32", zero=OFFLOADED),
    "3 offloaded": case(3, "bf16+fp32", zero=OFFLOADED),
}


def held(rank, world, configs):
    return [measured.bytes_held(rank, world, raw) for raw in configs]


@pytest.fixture(scope="module")
def runs():
    """By case: the larger of what two ranks hold."""
    results = pool.run(held, 2, list(CASES.values()))
    ranks = zip(*results, strict=True)
    return {
        name: {part: max(rank[part] for rank in pair) for part in pair[0]}
        for name, pair in zip(CASES, ranks, strict=True)
    }


def modelled(name: str) -> Memory:
    experiment = load(CASES[name])
    return memory(experiment, replace(setting_of(experiment, 2), fused=False))  # no fused Adam on a CPU


@pytest.mark.parametrize("name", [name for name in CASES if "offloaded" not in name])
def test_parts_that_are_held(runs, name):
    wanted, real = modelled(name), runs[name]
    assert real["weights"] == pytest.approx(wanted.weights, rel=WITHIN)
    assert real["optimizer"] == pytest.approx(wanted.optimizer, rel=WITHIN)
    assert real["masks"] == pytest.approx(wanted.masks, rel=WITHIN)
    assert real["gradients"] == pytest.approx(wanted.step_gradients, rel=WITHIN)


@pytest.mark.parametrize("name", CASES)
def test_the_fullest_moments(runs, name):
    """Without activations, which autograd keeps out of Python's sight. On a CPU the host's share lies in one place
    with the rest."""
    wanted, real = modelled(name), runs[name]
    backward = max(wanted.backward - wanted.activations.total, wanted.reduction) + wanted.host
    assert real["backward"] == pytest.approx(backward, rel=WITHIN)
    assert real["step"] == pytest.approx(wanted.step + wanted.host + wanted.host_step, rel=WITHIN)
