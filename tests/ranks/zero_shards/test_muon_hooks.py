"""DeepSpeed's Muon still behaves as the reasons of the hooks for Muon say."""

import pytest
import torch

from mst_scale import zero_shards
from tests.support import pool
from tests.support.toys import plain_engine


def muon_of(stage, world, **extra):
    """A bare engine with matrices alone."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(13, 37, bias=False), torch.nn.Linear(37, 7, bias=False))
    made = {"type": "Muon", "params": {"lr": 0.1, "betas": [0.9, 0.95], "weight_decay": 0.5}}
    zero = {"stage": stage, "reduce_scatter": False}
    return plain_engine(model, stage, world, optimizer=made, zero_optimization=zero, **extra)


def by_deepspeeds_muon(rank, world, stage, scale, switched_off):
    """The size of the gradients that are at hand before the model's step, and of what they are clipped by."""
    engine = muon_of(stage, world, gradient_clipping=0.0)
    if switched_off:
        zero_shards.muon._switch_off(engine)
    sizes = []

    def look():
        partitions = [part for parts in engine.optimizer.averaged_gradients.values() for part in parts]
        sizes.append(zero_shards.step.total_norm(partitions))

    zero_shards.around_model_step(engine, look, lambda: None)
    with torch.compiler.set_stance("force_eager"):
        engine.backward(scale * engine(torch.ones(4, 13)).square().mean())
        engine.step()
    return sizes[0], float(engine.get_global_grad_norm())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_muon_orthogonalises_before_the_norm_and_below_stage_3_before_our_step(stage):
    """A gradient grows with the loss, an orthogonalised update does not."""
    for switched_off in (False, True):
        ((small, small_norm),) = pool.run(by_deepspeeds_muon, 1, stage, 1.0, switched_off)
        ((large, large_norm),) = pool.run(by_deepspeeds_muon, 1, stage, 100.0, switched_off)
        at_hand = 100 if switched_off or stage == 3 else 1
        assert large / small == pytest.approx(at_hand, rel=1e-3), f"switched off: {switched_off}"
        assert large_norm / small_norm == pytest.approx(100 if switched_off else 1, rel=1e-3)


def fills(rank, world):
    matrix = torch.zeros(5, 8)
    matrix[:, ::2] = torch.randn(5, 4)
    matrix[0, 0] = 0
    return float(zero_shards.muon.orthogonalised(matrix, "gram")[0, 0])


def test_muon_fills_what_is_0():
    assert abs(pool.run(fills, 1)[0]) > 1e-3


def moved_without_gradients(rank, world):
    engine = muon_of(0, world)
    weight = engine.module[0].weight
    before = weight.detach().clone()
    with torch.compiler.set_stance("force_eager"):
        zero_shards.base_optimizer(engine).step()
    return torch.equal(before, weight)


def test_muon_takes_a_missing_gradient_for_zeros():
    assert pool.run(moved_without_gradients, 1) == [False], "so a held update hides its parameters"
