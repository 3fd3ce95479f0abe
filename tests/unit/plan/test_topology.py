"""What a topology step sends: the certain calls exactly, the rounds of refinement as expected."""

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from mst_scale.comm.exchange import Exchange
from mst_scale.config import load
from mst_scale.mixed_growing import random_k, top_k
from mst_scale.mixed_growing.blocks import Blocks
from mst_scale.mixed_growing.distribution import active_counts
from mst_scale.mixed_growing.evolve import Layer, evolve
from mst_scale.mixed_growing.masks import LayerMask, MaskSet
from mst_scale.mixed_growing.policies import POLICIES
from mst_scale.plan import roofline, topology
from mst_scale.plan.gpus import Machine, gpu_named, machine
from mst_scale.plan.setting import setting_of, sparse_parameters
from mst_scale.shard import Shard
from mst_scale.sparse_linear import crossovers

MODEL = {"n_layer": 4, "n_head": 2, "n_embd": 192, "seq_length": 8, "vocab_size": 1000}
CPU = torch.device("cpu")
STEP = 50


def experiment(sparsity=0.96, granularity="element", **model):
    """In its ultra phase at step 50."""
    return load({
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
        "training": {"steps": 100}, "model": {**MODEL, **model},
        "mst": {"method": "mst", "sparsity": {"max": sparsity}, "compute": {"backend": "dense"},
                "topology": {"granularity": granularity, "interval": 10, "update_schedule": "constant"}},
    })  # fmt: skip


def calls(e, **others):
    return topology.calls(e, setting_of(e, 8), STEP, **others)


class Recorded(Exchange):
    """One process that writes down what it would send."""

    def __init__(self):
        super().__init__()
        self.sizes: list[int] = []

    def _reduce(self, values, op):
        self.sizes.append(values.numel() * values.element_size())
        return super()._reduce(values, op)


def real_step(e, sparsity: float, side: int = 1) -> list[int]:
    """Payloads of one step on weights and gradients from a normal distribution, and of the digests behind it."""
    generator = torch.Generator().manual_seed(4)
    parameters = sparse_parameters(e.model, e.mst.targets)
    grids = [tuple(-(-size // side) for size in p.shape) for p in parameters]
    found = []
    for p, grid, active in zip(parameters, grids, active_counts(grids, sparsity), strict=True):
        blocks = torch.zeros(math.prod(grid), dtype=torch.bool)
        blocks[torch.randperm(blocks.numel(), generator=generator)[:active]] = True
        flags = blocks.view(grid).repeat_interleave(side, 0).repeat_interleave(side, 1)[: p.shape[0], : p.shape[1]]
        flags = flags.reshape(-1)
        mask = LayerMask(Shard.of_range(p.name, p.shape, 0, p.numel), CPU)
        mask.set_flags(flags, int(flags.sum()))
        weight = torch.randn(p.numel, generator=generator) * flags
        found.append(Layer(mask, active, weight, torch.randn(p.numel, generator=generator)))
    exchange = Recorded()
    step = evolve if side == 1 else Blocks(side, 0).evolve
    step(found, policy=POLICIES["mst"], update_fraction=0.3, seed=0, step=5, exchange=exchange)
    MaskSet([layer.mask for layer in found]).digests(exchange)
    return exchange.sizes


def test_payload_in_blocks():
    """All of it is certain."""
    e = experiment(0.9, {"block": 16})
    real = real_step(e, 0.9, side=16)
    assert sorted(real) == sorted(call.payload for call in calls(e).all)


@pytest.mark.parametrize("sparsity", [0.96, 0.7])
def test_the_rounds_to_be_expected(sparsity):
    """What refinement sends besides the certain calls, which `test_traffic` compares one by one."""
    e = experiment(sparsity)
    found, real = calls(e), Counter(real_step(e, sparsity))
    assert not Counter(call.payload for call in found.certain) - real
    refined = real - Counter(call.payload for call in found.certain)
    assert all(size % (4 << topology.DIGIT_BITS[0]) == 0 for size in refined), "rows of histograms"
    expected = sum(call.payload for call in found.rounds)
    assert refined.total() == pytest.approx(len(found.rounds), abs=3)
    assert sum(size * count for size, count in refined.items()) == pytest.approx(expected, rel=0.25)


def test_the_constants_are_those_of_the_selection():
    assert (topology.SAMPLE, topology.SAMPLE_BINS) == (top_k.SAMPLE, 1 << top_k.SAMPLE_BITS)
    assert (topology.SIGMAS, topology.SLACK) == (top_k.SIGMAS, top_k.SLACK) == (random_k.SIGMAS, random_k.SLACK)
    assert topology.LISTED_WHOLE == top_k.SMALL
    assert (topology.DIGIT_BITS, topology.ROUND_BYTES) == (top_k.DIGIT_BITS, top_k.ROUND_BYTES)
    assert pytest.importorskip("mst_scale.sparse_linear.block").SIDES == roofline.SIDES


def test_it_grows_with_the_logarithm_of_the_ranks():
    e = experiment()
    setting = setting_of(e, 8)
    step = topology.topology_step(e, setting, Machine(gpu_named("a100-80gb")))
    times = list(step.seconds.values())
    assert list(step.seconds) == [1, 4, 16, 64, 256, 1024, 4096, 16384] and times[0] == 0.0
    assert all(a < b for a, b in pairwise(times)) and times[-1] < 0.02
    alone = topology.topology_step(experiment(), setting_of(e, 8).at_stage(0), machine("h200", 8))
    assert alone.payload == alone.masks == alone.all_reduces == 0, "replicas choose alike without communication"
    assert alone.drift_payload == 4 * 8 * 17 and step.drift_payload == 7 * 8 * 17
    assert topology.topology_step(load({"model": MODEL}), setting, machine("h200", 8)) is None


def test_the_step_it_speaks_of():
    """The middle of the sparsest phase; where nothing moves there, the last step that did; none for a static mask."""
    for method, some in (("mst", True), ("gmp", True), ("static", False)):
        e = load({"model": MODEL, "training": {"steps": 1000}, "mst": {"method": method}})
        schedule = e.schedule
        step = topology.typical_step(schedule)
        assert (step is not None) == some
        if step is not None:
            assert schedule.is_topology_step(step) and schedule.at(step).sparsity == schedule.max_sparsity
            assert any(layer.changes for layer in topology.layers(e, step))


def test_masks_of_layers_that_skip_inactive_weights_are_sent(monkeypatch):
    e = experiment(0.9, {"block": 16, "min_blocks": 1})
    s, card = setting_of(e, 8), machine("a100-80gb", 8)
    e = replace(e, mst=replace(e.mst, compute=replace(e.mst.compute, backend="block")))
    found = topology.topology_step(e, s, card)
    assert found.masks == sum(-(-p.numel // 8) for p in sparse_parameters(e.model, e.mst.targets))
    assert found.in_run == sum(map(e.schedule.is_topology_step, range(1, e.training.steps + 1))) > 1
    # auto: where it has been measured, from there on
    e = replace(e, mst=replace(e.mst, compute=replace(e.mst.compute, backend="auto")))
    assert topology.topology_step(e, s, card).masks == 0
    row = {"backend": "block", "dtype": "float32", "block": 16, "shape": [4096, 1024], "sparsity": 0.8}
    monkeypatch.setattr(crossovers, "table", lambda: [row])
    assert topology.topology_step(e, s, card).masks > 0 and roofline.skips(e, "fp32", (512, 512), 0.81)
    assert not roofline.skips(e, "fp32", (512, 512), 0.79) and not roofline.skips(e, "bf16", (512, 512), 0.81)
