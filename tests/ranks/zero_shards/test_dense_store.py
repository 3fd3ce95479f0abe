"""Slices of all ranks, put together, are the parameter: its master weight, its reduced gradient, its Adam states."""

from types import SimpleNamespace

import pytest
import torch
from deepspeed.accelerator import get_accelerator

import mst_scale
from mst_scale import zero_shards
from mst_scale.shard import Shard
from mst_scale.zero_shards import dense_store, step
from tests.support import pool
from tests.support.toys import allow_fp16, deepspeed_config, toy, toy_batch

MATRICES = ("embed.weight", "up.weight", "down.weight", "out.weight")
CASES = [(0, "fp32", {}), (1, "fp32", {}), (2, "fp32", {}), (3, "fp32", {})]
CASES += [(stage, "bf16", {}) for stage in range(4)]
CASES += [(stage, "bf16", {"data_types": {"grad_accum_dtype": "fp32"}}) for stage in (2, 3)]
TORCH_ADAM = {"optimizer": {"params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}}}
CASES += [(stage, "fp32", TORCH_ADAM) for stage in range(4)] + [(2, "bf16", TORCH_ADAM)]
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
CASES += [(2, "bf16", OFFLOAD), (3, "bf16", OFFLOAD), (2, "fp32", OFFLOAD), (3, "fp32", OFFLOAD)]
CASES += [(stage, "fp16", {}) for stage in range(4)] + [(stage, "fp16", OFFLOAD) for stage in (2, 3)]
TWICE = {**OFFLOAD, "accumulation": 2}
CASES += [(stage, precision, TWICE) for stage in (2, 3) for precision in ("fp32", "bf16", "fp16")]


def assembled(rank: int, world: int, stage: int, precision: str, extra: dict) -> dict:
    """Every rank's slices after one step: [(name, what, start, values)], and the norm DeepSpeed reports."""
    allow_fp16()
    engine, *_ = mst_scale.initialize(model=toy(), config=deepspeed_config(stage, world, precision, **extra))
    parameters = {name: p for name, p in engine.module.named_parameters() if name in MATRICES}
    shards = zero_shards.shards_of(engine, parameters)
    found = []

    def look(what: str) -> None:
        for i, s in enumerate(shards.slices):
            if what == "gradient":
                value = shards.gradient(i).float() / zero_shards.loss_scale(engine)
            elif what == "weight":
                value = shards.weight(i)
            else:
                value = shards.states(i)[what]
            assert value.numel() == s.length
            found.append((s.name, what, s.start, value.float().clone()))

    zero_shards.around_model_step(engine, before=lambda: look("gradient"), after=lambda: None)
    updated: list[set] = []
    zero_shards.step.after_master_update(engine, updated.append)
    look("weight")
    for k in range(engine.gradient_accumulation_steps()):
        loss = engine(*toy_batch(0, k * world + rank))
        engine.backward(loss)
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
    if precision != "fp32":
        reference = reference.to({"bf16": torch.bfloat16, "fp16": torch.float16}[precision])
    batches = world * extra.get("accumulation", 1)
    sum(reference(*toy_batch(0, position)) for position in range(batches)).div(batches).backward()
    full = dict(reference.named_parameters())
    squares = sum(p.grad.double().square().sum() for p in full.values())
    # reduction order: float32 eps × a few additions; bf16 gradients carry 8 bits and are summed in bf16
    tolerance = {
        "fp32": {"rtol": 1e-5, "atol": 1e-7},
        "bf16": {"rtol": 3e-2, "atol": 3e-3},
        "fp16": {"rtol": 4e-3, "atol": 4e-4},  # 11 bits
    }[precision]
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
        assert result["norm"] == pytest.approx(
            float(squares.sqrt()), rel={"fp32": 1e-5, "bf16": 2e-2, "fp16": 3e-3}[precision]
        )


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
        ({"zero_optimization": {"compute_grad_norm": False}, "gradient_clipping": 0.0}, "fp32", "compute_grad_norm"),
    ],
)
def test_what_cannot_be_right_is_refused_with_the_cure(extra, precision, message):
    (text,) = pool.run(refused, 1, deepspeed_config(1, 1, precision, **extra))
    assert message in text


def test_the_norm_of_an_offloaded_gradient_lies_where_deepspeed_adds_it_up(monkeypatch):
    """Gradient and masks are on the CPU, but norms of what is not sparse were recorded on the accelerator."""
    monkeypatch.setattr(get_accelerator(), "current_device_name", lambda: "meta")
    live = torch.tensor([3.0, 0.0, 4.0, 9.0])
    partition = lambda parameter, release_swap_buffers: (live, 0)  # noqa: E731
    zero = SimpleNamespace(norm_for_param_grads={}, get_param_id=lambda parameter: 7)
    zero._get_fp32_grad_state_partition = partition
    shards = object.__new__(dense_store.CutParameters)
    shards._frozen, shards.offloaded = [False], True
    shards.zero, shards.parameters, shards.slices = zero, [torch.nn.Parameter(torch.zeros(3))], [Shard.whole("w", (3,))]
    gradient = shards.gradient(0)
    assert gradient.data_ptr() == live.data_ptr() and gradient.tolist() == [3, 0, 4], "live, without the padding"
    shards.put_gradient(0, gradient)
    assert zero.norm_for_param_grads[7].device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_norm_is_summed_in_float32_or_more_whatever_the_gradient_is_kept_in(dtype):
    """DeepSpeed may keep offloaded gradients in bfloat16 (bf16_master_weights_and_grads)."""
    gradients = [torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype) for size in (200_000, 7, 0)]
    exact = float(torch.cat([g.double() for g in gradients]).norm())
    assert step.total_norm(gradients) == pytest.approx(exact, rel=1e-5)  # float32 sums of 65,536 squares


def test_the_norm_of_a_sparse_gradient():
    """An index may occur twice."""
    gradient = torch.sparse_coo_tensor([[0, 2, 2]], torch.ones(3, 4), (5, 4), check_invariants=True)
    assert step.total_norm([gradient, torch.ones(2)]) == pytest.approx((4 + 16 + 2) ** 0.5)
