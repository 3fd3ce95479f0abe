"""Compact storage trains as dense storage does: the same masks, weights and moments, bit for bit in fp32 on 1 and 2
ranks, with clipping at work; and what a rank keeps and sends follows the density."""

import pytest
import torch
from deepspeed import comm as ds_comm
from torch import nn

from mst_scale import zero_shards
from mst_scale.config import load
from mst_scale.engine import compact_linear
from mst_scale.engine.compaction import make_compact
from mst_scale.models import build
from mst_scale.plan.setting import held, setting_of
from tests.support import pool
from tests.support.compact_pairs import constant_config, course, course_of, differences, started
from tests.support.engines import whole_state
from tests.support.toy_engine import train
from tests.support.toys import allow_fp16, toy_batch

STEPS = 10  # with three topology steps


def both(world, stage, accumulation=1, **more):
    """The courses of rank 0 with compact and with dense storage."""
    configs = [constant_config(stage, world, kind, accumulation=accumulation, **more) for kind in ("auto", "off")]
    compact, dense = (pool.run(course, world, config, STEPS, accumulation)[0] for config in configs)
    assert compact[-1]["moved"] == 9 and any(step["norm"] > 0.05 for step in dense), (
        "masks move, and clipping is active"
    )
    return compact, dense


CASES = [(2, stage, policy) for stage in range(4) for policy in ("set", "rigl")]
CASES += [(1, 0, "set"), (1, 1, "mest"), (1, 2, "rigl"), (1, 3, "mst"), (2, 1, "mst"), (2, 3, "mest")]


@pytest.mark.parametrize(("world", "stage", "policy"), CASES)
def test_bit_equal_to_dense_storage(world, stage, policy):
    assert differences(*both(world, stage, policy=policy)) == []


@pytest.mark.parametrize(("world", "stage", "policy"), [(1, 0, "set"), (2, 2, "rigl"), (2, 3, "set"), (2, 1, "mst")])
def test_bit_equal_with_kernels_that_take_the_values(world, stage, policy):
    assert differences(*both(world, stage, policy=policy, backend="cpu")) == []


def with_rows_of_tokens(rank, world, *given):
    before, compact_linear.FEW = compact_linear.FEW, 0
    try:
        return course(rank, world, *given)
    finally:
        compact_linear.FEW = before


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_bit_equal_with_embeddings_that_expand_the_rows_of_their_tokens(stage):
    configs = [constant_config(stage, 2, kind, policy="rigl", accumulation=2) for kind in ("auto", "off")]
    assert differences(*(pool.run(with_rows_of_tokens, 2, config, STEPS, 2)[0] for config in configs)) == []


@pytest.mark.parametrize("moments", ["active_mean", "zero"])
def test_bit_equal_with_other_moments_of_grown_weights(moments):
    assert differences(*both(2, 2, policy="rigl", topology={"grown_moments": moments})) == []


@pytest.mark.parametrize("stage", [0, 3])
def test_bit_equal_without_regrowth_and_with_topology_steps_in_place_of_updates(stage):
    assert differences(*both(2, stage, policy="mst", topology={"regrow": False, "replaces_update": True})) == []


@pytest.mark.full
@pytest.mark.parametrize(("stage", "policy"), [(0, "set"), (1, "set"), (2, "set"), (3, "rigl")])
def test_bit_equal_with_accumulation(stage, policy):
    assert differences(*both(1, stage, accumulation=2, policy=policy)) == []


def fp16_course(rank, world, config, *how):
    allow_fp16()
    config["fp16"] |= {"initial_scale_power": 20, "hysteresis": 1}
    engine = started(config)
    found = course_of(engine, rank, world, *how)
    return found, engine.skipped_steps


@pytest.mark.full
@pytest.mark.parametrize(("world", "stage", "policy"), [(1, 0, "set"), (2, 1, "rigl"), (2, 2, "mst"), (1, 3, "rigl")])
def test_bit_equal_in_fp16_where_steps_overflow(world, stage, policy):
    configs = [constant_config(stage, world, kind, policy=policy, precision="fp16") for kind in ("auto", "off")]
    (compact, skipped), (dense, same) = (pool.run(fp16_course, world, config, STEPS)[0] for config in configs)
    assert 0 < skipped == same < STEPS and compact[-1]["moved"] > 0
    assert differences(compact, dense) == []


@pytest.mark.full
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "fp32"), (3, "fp32"), (2, "bf16")])
def test_bit_equal_from_masks_of_the_largest_weights(stage, precision):
    """In bf16 these are the largest after rounding, of which many are equal."""
    compact, dense = both(2, stage, policy="rigl", initial="magnitude", precision=precision)
    assert differences(compact, dense, tolerance=0 if precision == "fp32" else 1e-5) == []


ZERO = [(2, {"overlap_comm": True, "reduce_bucket_size": 100}), (3, {"stage3_param_persistence_threshold": 10**6})]
ZERO += [(3, {"sub_group_size": 100}), (1, {"contiguous_gradients": False})]


@pytest.mark.parametrize(("stage", "zero"), ZERO)
@pytest.mark.full
def test_bit_equal_with_other_settings_of_zero(stage, zero):
    assert differences(*both(2, stage, policy="rigl", zero_optimization=zero)) == []


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_bit_equal_beside_a_layer_that_stays_dense(stage):
    """At a low sparsity the distribution gives all weights to the smallest matrix."""
    compact, dense = both(2, stage, policy="rigl", sparsity=0.4)
    assert bool(compact[-1]["out.weight weight"].count_nonzero() == 7 * 13)
    assert differences(compact, dense) == []


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.full
def test_four_ranks_differ_by_the_order_of_sums_alone(stage):
    compact, dense = both(4, stage, policy="rigl")
    assert differences(compact, dense, tolerance=2e-6) == []  # weights of about 1: 16 units in the last place


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.full
def test_bf16_has_the_same_masks_and_weights_within_rounding(stage):
    """Norms of stage 0 are float32 sums there, so clipping may differ by a unit in the last place of float32."""
    compact, dense = both(2, stage, precision="bf16", policy="rigl")
    assert differences(compact, dense, tolerance=1e-5) == []


OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
KERNELS = [{"torch_adam": False}, {"torch_adam": True, "fused": True}]


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kernel", KERNELS, ids=["deepspeed", "fused"])
@pytest.mark.full
def test_kernels_for_cpus_are_within_their_rounding(stage, kernel):
    """They compute the ends of a vector by another formula than its middle, and the ends are elsewhere."""
    adam = {"optimizer": {"type": "AdamW", "params": kernel}}
    compact, dense = both(2, stage, policy="set", **adam)
    assert differences(compact, dense, tolerance=2e-6) == []


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.full
def test_deepspeeds_kernel_with_offload_is_within_its_rounding(stage):
    compact, dense = both(2, stage, policy="rigl", optimizer={"params": {"torch_adam": False}}, **OFFLOAD)
    assert differences(compact, dense, tolerance=2e-6) == []


@pytest.mark.parametrize("stage", [2, 3])
def test_the_optimizer_offloaded(stage):
    """DeepSpeed takes the norm of what it moves to the CPU in float32, so that clipping differs in the last place."""
    compact, dense = both(2, stage, policy="rigl", **OFFLOAD)
    assert differences(compact, dense, tolerance=2e-6) == []
    compact, dense = both(2, stage, policy="rigl", gradient_clipping=0, **OFFLOAD)
    faults = differences(compact, dense)
    assert [fault for fault in faults if "the norm is" not in fault] == []


# --- steps that are skipped ---


def with_an_overflow(rank, world, stage, kind):
    engine = started(constant_config(stage, world, kind, policy="rigl"))
    found = []
    for step in range(7):
        loss = engine(*toy_batch(step, rank))
        engine.backward(loss * float("inf") if step == 2 and rank == 0 else loss)
        engine.step()
        found.append({**whole_state(engine), "moved": engine.mst.changed_at})
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_after_an_overflow_the_topology_step_follows_as_with_dense_storage(stage):
    compact, dense = (pool.run(with_an_overflow, 2, stage, kind)[0] for kind in ("auto", "off"))
    assert [step["moved"] for step in compact] == [0, 0, 0, 4, 4, 6, 6]
    assert differences(compact, dense) == []


def with_a_hidden_overflow(rank, world, stage):
    """A gradient that is not finite where no weight is active, and on one rank alone."""
    engine = started(constant_config(stage, world, "auto", policy="rigl"))
    train(engine, rank, world, 2)
    store, before = engine.mst.store, whole_state(engine)
    reduced = store.reduced

    def damaged(i, gradient):
        found = reduced(i, gradient)
        if found.numel() and (stage == 0 or rank == 1):
            found[0] = float("inf")
        return found

    store.reduced = damaged
    train(engine, rank, world, 1, first=2)
    skipped = differences([whole_state(engine)], [before])
    store.reduced = reduced
    train(engine, rank, world, 1, first=3)
    return skipped, engine.mst.changed_at


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_gradient_of_an_inactive_weight_that_is_not_finite_skips_the_step_on_all_ranks(stage):
    assert pool.run(with_a_hidden_overflow, 2, stage) == [([], 4)] * 2


def lengths(rank, world):
    engine = started(constant_config(2, world, "auto", policy="set"))
    pairs = [(p, zero_shards.index_of(p)) for p in engine.module.parameters()]
    return [(p.numel(), index.count) for p, index in pairs if index is not None]


def test_vectors_are_padded_so_that_what_follows_them_stays_aligned():
    found = pool.run(lengths, 1)[0]
    assert any(count % 64 for _, count in found)
    assert all(stored % 64 == 0 and 0 <= stored - count < 64 for stored, count in found)


# --- what follows the density ---


class Wide(nn.Module):
    """Nearly all of its weights are in matrices."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).square().mean()


def kept_and_sent(rank, world, stage, kind):
    """Values of master weights, bytes of optimizer states and of gradients' and weights' collectives in one step."""
    more = {"policy": "set", "sparsity": 0.96, "comms_logger": {"enabled": True, "prof_all": True}}
    engine = started(constant_config(stage, world, kind, **more), Wide())
    ds_comm.comms_logger.comms_dict.clear()
    for _ in range(2):
        engine.backward(engine(torch.randn(8, 64)))
        engine.step()
        states = ds_comm.comms_logger.comms_dict
        sent = sum(size * entry[0] for sizes in states.values() for size, entry in sizes.items())
        ds_comm.comms_logger.comms_dict.clear()
    optimizer = zero_shards.base_optimizer(engine)
    held = [p for group in optimizer.param_groups for p in group["params"]] or list(optimizer.state)
    bytes_of = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    )
    live = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    return {"masters": sum(p.numel() for p in held), "states": bytes_of, "sent": sent, "parameters": live}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_and_traffic_follow_the_density(stage):
    compact, dense = (pool.run(kept_and_sent, 2, stage, kind)[0] for kind in ("auto", "off"))
    for what, most in compact.items():
        # 4 % of the weights, padded to multiples of 64 for each matrix
        assert 0.04 * dense[what] <= most <= 0.045 * dense[what], (what, most, dense[what])


@pytest.mark.parametrize(
    ("shape", "lm_head"),
    [({}, True), ({}, False), ({"tied_head": False}, True), ({"arch": "bert"}, False), ({"arch": "bert"}, True)],
)
def test_a_plan_stores_what_the_model_stores(shape, lm_head):
    config = constant_config(1, 1, "auto")
    config["mst"]["targets"] = {"lm_head": lm_head}
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "seq_length": 16, "vocab_size": 100}
    experiment = load({**config, "model": {**sizes, **shape}})
    model = build(experiment.model)
    make_compact(model, experiment, None, model.parameters(), {})
    planned = {p.name: p.numel for p in held(experiment.model, setting_of(experiment, 1))}
    assert planned == {name: p.numel() for name, p in model.named_parameters()}
