"""What a topology step sends: the certain calls exactly, the rounds of refinement as expected."""

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch

from mst_scale.config import load
from mst_scale.mixed_growing import chance, refinement, selection
from mst_scale.mixed_growing.blocks import Blocks
from mst_scale.mixed_growing.distribution import active_counts
from mst_scale.mixed_growing.evolve import Layer, evolve
from mst_scale.mixed_growing.exchange import Exchange
from mst_scale.mixed_growing.masks import LayerMask, MaskSet
from mst_scale.mixed_growing.policies import POLICIES
from mst_scale.plan import topology
from mst_scale.plan.gpus import Machine, gpu_named, machine
from mst_scale.plan.parameters import sparse_parameters
from mst_scale.plan.setting import setting_of
from mst_scale.plan.traffic import Call

MODEL = {"n_layer": 4, "n_head": 2, "n_embd": 192, "context": 8, "vocab_size": 1000}
CPU = torch.device("cpu")


def experiment(**model):
    return load({
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
        "model": {**MODEL, **model}, "mst": {"method": "mst"},
    })  # fmt: skip


class Recorded(Exchange):
    """One process that writes down what it would send."""

    def __init__(self):
        super().__init__()
        self.sizes: list[int] = []

    def _reduce(self, values, op):
        self.sizes.append(values.numel() * values.element_size())
        return super()._reduce(values, op)


def real_step(e, sparsity: float, zeta: float, side: int = 1) -> list[int]:
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
        mask = LayerMask(p.name, p.shape, 0, p.numel, CPU)
        mask.set_flags(flags, int(flags.sum()))
        weight = torch.randn(p.numel, generator=generator) * flags
        found.append(Layer(mask, active, weight, torch.randn(p.numel, generator=generator)))
    exchange = Recorded()
    step = evolve if side == 1 else Blocks(side, 0).evolve
    step(found, policy=POLICIES["mst"], update_fraction=zeta, seed=0, step=5, exchange=exchange)
    MaskSet([layer.mask for layer in found]).digests(exchange)
    return exchange.sizes


def test_payload_in_blocks():
    """All of it is certain."""
    e = experiment()
    real = real_step(e, 0.9, 0.3, side=16)
    assert sorted(real) == sorted(call.payload for call in topology.calls_in_blocks(e, 16))


@pytest.mark.parametrize("sparsity", [0.96, 0.7])
def test_payload(sparsity):
    e = experiment()
    certain, rounds = topology.calls(topology.layers(e, sparsity, 0.3))
    real = Counter(real_step(e, sparsity, 0.3))
    assert not Counter(call.payload for call in certain) - real, "every certain call is made, byte for byte"
    refined = real - Counter(call.payload for call in certain)
    assert all(size % (4 << topology.DIGIT_BITS[0]) == 0 for size in refined), "the rest are rows of histograms"
    expected = sum(call.payload for call in rounds)
    assert refined.total() == pytest.approx(len(rounds), abs=3)
    assert sum(size * count for size, count in refined.items()) == pytest.approx(expected, rel=0.25)


def test_the_constants_are_those_of_the_selection():
    assert (topology.SAMPLE, topology.SAMPLE_BINS) == (selection.SAMPLE, 1 << selection.SAMPLE_BITS)
    assert (topology.SIGMAS, topology.SLACK) == (selection.SIGMAS, selection.SLACK) == (chance.SIGMAS, chance.SLACK)
    assert topology.LISTED_WHOLE == selection.SMALL
    assert (topology.DIGIT_BITS, topology.ROUND_BYTES) == (refinement.DIGIT_BITS, refinement.ROUND_BYTES)


def test_it_grows_with_the_logarithm_of_the_ranks():
    e = experiment()
    setting = setting_of(e, 8)
    step = topology.topology_step(e, setting, Machine(gpu_named("a100-80gb")))
    times = list(step.seconds.values())
    assert list(step.seconds) == [1, 4, 16, 64, 256, 1024, 4096, 16384] and times[0] == 0.0
    assert all(a < b for a, b in pairwise(times)) and times[-1] < 0.02
    alone = topology.topology_step(experiment(), setting_of(e, 8).at_stage(0), machine("h200", 8))
    assert alone.payload == 16 * 17 and alone.all_reduces == 1, "replicas only compare digests"
    assert topology.topology_step(load({"model": MODEL}), setting, machine("h200", 8)) is None


def test_ring_volumes():
    assert (
        Call("all-reduce", 800).sent(4) == 1200 and Call("gather", 800).sent(4) == Call("scatter", 800).sent(4) == 600
    )
