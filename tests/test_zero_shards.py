"""Slices of all ranks, put together, are the parameter: its master weight, its reduced gradient, its Adam states."""

import pytest
import torch

import mst_scale
from mst_scale import zero_shards
from tests import pool
from tests.toys import deepspeed_config, toy, toy_batch

MATRICES = ("embed.weight", "up.weight", "down.weight", "out.weight")
CASES = [(0, "fp32", {}), (1, "fp32", {}), (2, "fp32", {}), (3, "fp32", {})]
CASES += [(stage, "bf16", {}) for stage in range(4)]
CASES += [(stage, "bf16", {"data_types": {"grad_accum_dtype": "fp32"}}) for stage in (2, 3)]
TORCH_ADAM = {"optimizer": {"params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}}}
CASES += [(stage, "fp32", TORCH_ADAM) for stage in range(4)] + [(2, "bf16", TORCH_ADAM)]
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
CASES += [(2, "bf16", OFFLOAD), (3, "bf16", OFFLOAD), (2, "fp32", OFFLOAD), (3, "fp32", OFFLOAD)]


def assembled(rank: int, world: int, stage: int, precision: str, extra: dict) -> dict:
    """Every rank's slices after one step: [(name, what, start, values)], and the norm DeepSpeed reports."""
    engine, *_ = mst_scale.initialize(model=toy(), config=deepspeed_config(stage, world, precision, **extra))
    parameters = {name: p for name, p in engine.module.named_parameters() if name in MATRICES}
    shards = zero_shards.shards_of(engine, parameters)
    found = []

    def look(what: str) -> None:
        for i, s in enumerate(shards.slices):
            if what == "gradient":
                value = shards.gradient(i)
            elif what == "weight":
                value = shards.weight(i)
            else:
                value = shards.states(i)[what]
            assert value.numel() == s.length
            found.append((s.name, what, s.start, value.float().clone()))

    zero_shards.around_model_step(engine, before=lambda: look("gradient"), after=lambda: None)
    updated: list[set] = []
    zero_shards.after_master_update(engine, updated.append)
    loss = engine(*toy_batch(0, rank))
    engine.backward(loss)
    look("weight")
    engine.step()
    for key in ("exp_avg", "exp_avg_sq"):
        look(key)
    owners = {id(shards.owner(i)) for i in range(len(shards.slices))}
    assert owners <= set().union(*updated), "the hook names the tensors that hold our masters"
    return {"slices": found, "norm": zero_shards.grad_norm(engine), "group": shards.group is not None}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("stage", "precision", "extra"), CASES)
def test_slices_make_up_the_parameter(stage, precision, extra, world):
    results = pool.run(assembled, world, stage, precision, extra)
    reference = toy()
    if precision == "bf16":
        reference = reference.bfloat16()
    sum(reference(*toy_batch(0, rank)) for rank in range(world)).div(world).backward()
    full = dict(reference.named_parameters())
    squares = sum(p.grad.double().square().sum() for p in full.values())
    # reduction order: float32 eps × a few additions; bf16 gradients carry 8 bits and are summed in bf16
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if precision == "fp32" else {"rtol": 3e-2, "atol": 3e-3}
    scale = min(1.0, 1.0 / float(squares.sqrt()))
    ranks = results if results[0]["group"] else results[:1]
    for name in MATRICES:
        gradient = full[name].grad.float().flatten()
        expected = {
            "weight": full[name].detach().float().flatten(),
            "gradient": gradient,
            "exp_avg": 0.1 * scale * gradient,
            "exp_avg_sq": 0.05 * (scale * gradient) ** 2,
        }
        for what, values in expected.items():
            covered = torch.zeros(values.numel(), dtype=torch.int)
            for result in ranks:
                for other, kind, start, value in result["slices"]:
                    if (other, kind) == (name, what):
                        covered[start : start + value.numel()] += 1
                        torch.testing.assert_close(value, values[start : start + value.numel()], **tolerance)
            assert (covered == 1).all(), f"{what} of {name}: every weight lies on exactly one rank"
    for result in results:
        assert result["norm"] == pytest.approx(float(squares.sqrt()), rel=1e-5 if precision == "fp32" else 2e-2)


def skipped_update(rank: int, world: int, stage: int) -> tuple:
    engine, *_ = mst_scale.initialize(model=toy(), config=deepspeed_config(stage, world))
    parameters = {name: p for name, p in engine.module.named_parameters() if name in MATRICES}
    shards = zero_shards.shards_of(engine, parameters)
    before = [shards.weight(i).clone() for i in range(len(MATRICES))]
    loss = engine(*toy_batch(0, rank)) * (float("nan") if rank == world - 1 else 1.0)
    engine.backward(loss)
    engine.step()
    same = all(torch.equal(a, shards.weight(i)) for i, a in enumerate(before))
    loss = engine(*toy_batch(1, rank))
    engine.backward(loss)
    engine.step()
    moved = not all(torch.equal(a, shards.weight(i)) for i, a in enumerate(before) if a.numel())
    finite = all(bool(shards.weight(i).isfinite().all()) for i in range(len(MATRICES)))
    return same, moved, finite, engine.skipped_steps


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_update_on_a_gradient_that_is_not_finite_and_training_goes_on(stage):
    assert pool.run(skipped_update, 2, stage) == [(True, True, True, 1)] * 2


def refused(rank: int, world: int, config: dict) -> str:
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    try:
        zero_shards.shards_of(engine, dict(engine.module.named_parameters()))
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("extra", "precision", "message"),
    [
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "bf16", "use ZeRO-2"),
        ({"zero_optimization": {"round_robin_gradients": True}}, "fp32", "round_robin_gradients"),
    ],
)
def test_what_cannot_be_right_is_refused_with_the_cure(extra, precision, message):
    (text,) = pool.run(refused, 1, deepspeed_config(1, 1, precision, **extra))
    assert message in text
