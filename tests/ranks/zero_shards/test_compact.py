"""Compact storage trains as dense storage does: the same masks, weights and moments, bit for bit in fp32 on 1 and 2
ranks, with clipping at work; and what a rank keeps and sends follows the density."""

import logging
from pathlib import Path

import pytest
import torch
from deepspeed import comm as ds_comm
from torch import nn
from torch._dynamo.utils import counters

import mst_scale
from mst_scale import zero_shards
from mst_scale.checkpoints import open_masks
from mst_scale.config import ModelConfig, load
from mst_scale.engine import compact_linear
from mst_scale.engine.compaction import make_compact
from mst_scale.errors import UserError
from mst_scale.models import GPT, build
from mst_scale.plan.setting import held, setting_of
from tests.support import cut_sequences, pool
from tests.support.compact_pairs import constant_config, course, course_of, differences, looked_at, started
from tests.support.integrated import digests
from tests.support.toy_engine import train
from tests.support.toys import allow_fp16, toy, toy_batch

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


@pytest.mark.parametrize(("stage", "policy"), [(0, "set"), (1, "set"), (2, "set"), (3, "rigl")])
def test_bit_equal_with_accumulation(stage, policy):
    assert differences(*both(1, stage, accumulation=2, policy=policy)) == []


def fp16_course(rank, world, config, *how):
    allow_fp16()
    config["fp16"] |= {"initial_scale_power": 20, "hysteresis": 1}
    engine = started(config)
    found = course_of(engine, rank, world, *how)
    return found, engine.skipped_steps


@pytest.mark.parametrize(("world", "stage", "policy"), [(1, 0, "set"), (2, 1, "rigl"), (2, 2, "mst"), (1, 3, "rigl")])
def test_bit_equal_in_fp16_where_steps_overflow(world, stage, policy):
    configs = [constant_config(stage, world, kind, policy=policy, precision="fp16") for kind in ("auto", "off")]
    (compact, skipped), (dense, same) = (pool.run(fp16_course, world, config, STEPS)[0] for config in configs)
    assert 0 < skipped == same < STEPS and compact[-1]["moved"] > 0
    assert differences(compact, dense) == []


def compiled_course(rank, world, kind):
    """The losses and weights of a GPT, the number of graphs that torch.compile made of its three blocks, and breaks."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    shape = ModelConfig(n_layer=3, n_head=2, n_embd=32, seq_length=16, vocab_size=64)
    config = constant_config(2, world, "auto", policy="rigl")
    config["mst"]["attention"] = {"pattern": "dense"}
    engine = started(config, GPT(shape))
    for block in engine.module.blocks if kind == "compiled" else ():
        block.compile(backend="aot_eager")
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(8):
        tokens = torch.randint(shape.vocab_size, (8, shape.seq_length), generator=generator)
        loss = engine(tokens, tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert engine.mst.changed_at > 3, "growth has read dense gradients"
    return losses, looked_at(engine, world), counters["stats"]["unique_graphs"], dict(counters["graph_break"])


def test_bit_equal_with_compiled_blocks_which_share_one_graph():
    """Steps that read dense gradients run eagerly, so that they do not break the graph of the steps after them."""
    (losses, state, none, _), (same, compiled, graphs, breaks) = (
        pool.run(compiled_course, 1, kind)[0] for kind in ("eager", "compiled")
    )
    assert losses == same and (none, graphs, breaks) == (0, 1, {})
    assert all(torch.equal(value, compiled[key]) for key, value in state.items() if torch.is_tensor(value))


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "fp32"), (3, "fp32"), (2, "bf16")])
def test_bit_equal_from_masks_of_the_largest_weights(stage, precision):
    """In bf16 these are the largest after rounding, of which many are equal."""
    compact, dense = both(2, stage, policy="rigl", initial="magnitude", precision=precision)
    assert differences(compact, dense, tolerance=0 if precision == "fp32" else 1e-5) == []


def pruned():
    """A toy without any weight in one matrix and with all of them in another."""
    model = toy()
    for number, parameter in enumerate(p for p in model.parameters() if p.dim() == 2):
        keeps = [torch.arange(parameter.numel()) % 3 == 1, torch.ones(parameter.numel()) == 0, None][number % 3]
        if keeps is not None:
            parameter.data *= keeps.view(parameter.shape)
    return model


def fixed_course(rank, world, stage, kind, masks):
    config = constant_config(stage, world, kind)
    config["mst"] = {"method": "fixed", "masks": masks, "compute": {"backend": "dense", "compact": kind}}
    engine = started(config, toy() if masks.endswith("safetensors") else pruned())
    found = []
    for k in range(4):
        losses = train(engine, rank, world, 1, first=k)
        found.append({**looked_at(engine, world), "losses": losses})
    stored = {index.name: (index.count, index.stored) for index in zero_shards.indexes_of(engine.module)}
    return found, stored, engine.mst.sparsity


@pytest.mark.parametrize("masks", ["zeros", "file"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_given_masks_are_compact_and_bit_equal(stage, masks, tmp_path):
    given = {name: p != 0 for name, p in pruned().named_parameters() if p.dim() == 2 and name != "embed.weight"}
    if masks == "file":
        masks = str(tmp_path / "masks.safetensors")
        open_masks.write(Path(masks), given.items())
    (compact, stored, sparsity), (dense, none, same) = (
        pool.run(fixed_course, 2, stage, kind, masks)[0] for kind in ("auto", "off")
    )
    assert differences(compact, dense) == [] and sparsity == same > 0.3 and none == {}
    expected = {name: int(mask.sum()) for name, mask in given.items() if not mask.all()}
    assert {name: count for name, (count, _) in stored.items()} == expected and 0 in expected.values()


def disagreeing(rank, world, masks):
    config = constant_config(1, world, "auto", initial="magnitude")
    if masks is not None:
        config["mst"] = {"method": "fixed", "masks": masks, "compute": {"compact": "auto"}}
    model = pruned()
    if rank:
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
    return digests(started(config, model))


@pytest.mark.parametrize("masks", [None, "zeros"])
def test_the_weights_of_rank_0_decide(masks):
    (alone,) = pool.run(disagreeing, 1, masks)
    assert pool.run(disagreeing, 2, masks) == [alone] * 2


def loaded_anew(rank, world, masks, folder):
    config = constant_config(1, world, "auto", initial="magnitude")
    if masks is not None:
        config["mst"] = {"method": "fixed", "masks": masks, "compute": {"compact": "auto"}}
    dense, *_ = mst_scale.initialize(model=pruned(), config={**config, "mst": {"method": "dense"}})
    dense.save_checkpoint(folder, tag="t")
    engine = started(config, pruned())
    try:
        mst_scale.warm_start(engine, f"{folder}/t", weights_only=True)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("masks", [None, "zeros"])
def test_masks_that_were_read_off_other_weights_are_not_kept(masks, tmp_path):
    (message,) = pool.run(loaded_anew, 1, masks, str(tmp_path))
    assert message is not None and "mst.compute.compact" in message and "before" in message


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


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.full
def test_deepspeeds_kernel_for_cpus_is_within_its_rounding(stage):
    """It computes the ends of a vector by another formula than its middle, and the ends are elsewhere."""
    adam = {"optimizer": {"type": "AdamW", "params": {"torch_adam": False}}}
    compact, dense = both(2, stage, policy="set", **adam)
    assert differences(compact, dense, tolerance=2e-6) == []


@pytest.mark.parametrize("stage", [2, 3])
def test_bit_equal_with_the_optimizer_offloaded(stage):
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    compact, dense = both(2, stage, policy="rigl", **offload)
    assert differences(compact, dense, tolerance=2e-6) == []  # DeepSpeed's kernel, as above


# --- steps that are skipped ---


def with_an_overflow(rank, world, stage, kind):
    engine = started(constant_config(stage, world, kind, policy="rigl"))
    found = []
    for step in range(7):
        loss = engine(*toy_batch(step, rank))
        engine.backward(loss * float("inf") if step == 2 and rank == 0 else loss)
        engine.step()
        found.append({**looked_at(engine, world), "moved": engine.mst.changed_at})
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
    store, before = engine.mst.store, looked_at(engine, world)
    reduced = store.reduced

    def damaged(i, gradient):
        found = reduced(i, gradient)
        if found.numel() and (stage == 0 or rank == 1):
            found[0] = float("inf")
        return found

    store.reduced = damaged
    train(engine, rank, world, 1, first=2)
    skipped = differences([looked_at(engine, world)], [before])
    store.reduced = reduced
    train(engine, rank, world, 1, first=3)
    return skipped, engine.mst.changed_at


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_gradient_of_an_inactive_weight_that_is_not_finite_skips_the_step_on_all_ranks(stage):
    assert pool.run(with_a_hidden_overflow, 2, stage) == [([], 4)] * 2


# --- the tied head, activation checkpointing ---


def gpt_course(rank, world, stage, kind, recompute, backend, precision="fp32"):  # noqa: PLR0917
    config = constant_config(stage, world, kind, policy="rigl", sparsity=0.9, backend=backend, precision=precision)
    config["mst"]["targets"] = {"lm_head": True}
    model = {"vocab_size": 61, "seq_length": 16, "n_layer": 2, "n_head": 2, "n_embd": 24}
    settings = load({**config, "model": {**model, "activation_checkpointing": recompute}}).model
    torch.manual_seed(5)
    engine = started(config, GPT(settings))
    found = []
    for step in range(7):
        tokens = torch.randint(61, (8, 17), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = engine(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        engine.backward(loss)
        engine.step()
        now = {"losses": [float(loss.detach())], "moved": engine.mst.changed_at, "dead": dict(engine.mst.dead_units())}
        found.append({**looked_at(engine, world), **now})
    assert found[-1]["dead"]
    names = [index.name for index in zero_shards.indexes_of(engine.module)]
    assert ("wte.weight" in names) == (kind == "auto")
    return found


CASES_OF_HEADS = [(0, False, "dense"), (2, True, "dense"), (3, True, "dense"), (0, False, "cpu"), (3, True, "cpu")]


@pytest.mark.parametrize(("stage", "recompute", "backend"), CASES_OF_HEADS)
def test_the_tied_head_is_compact_and_bit_equal(stage, recompute, backend):
    compact, dense = (pool.run(gpt_course, 2, stage, kind, recompute, backend)[0] for kind in ("auto", "off"))
    assert compact[-1]["moved"] == 6 and differences(compact, dense) == []


@pytest.mark.parametrize("stage", [2, 3])
def test_in_bf16_the_two_uses_of_a_tied_matrix_are_added_up_as_autograd_does(stage):
    """In bf16, and not in float32 after the reduction: else growth by gradient chooses other weights."""
    courses = [pool.run(gpt_course, 1, stage, kind, False, "dense", "bf16")[0] for kind in ("auto", "off")]
    assert courses[0][-1]["moved"] == 6 and differences(*courses) == []


def lengths(rank, world):
    engine = started(constant_config(2, world, "auto", policy="set"))
    pairs = [(p, zero_shards.index_of(p)) for p in engine.module.parameters()]
    return [(p.numel(), index.count) for p, index in pairs if index is not None]


def test_vectors_are_padded_so_that_what_follows_them_stays_aligned():
    found = pool.run(lengths, 1)[0]
    assert any(count % 64 for _, count in found)
    assert all(stored % 64 == 0 and 0 <= stored - count < 64 for stored, count in found)


def hugging_face_course(rank, world, stage, kind):
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 24, "vocab_size": 61, "n_positions": 16}
    config = constant_config(stage, world, kind, policy="rigl", sparsity=0.9)
    config["mst"]["targets"] = {"lm_head": True}
    torch.manual_seed(5)
    engine = started(config, GPT2LMHeadModel(GPT2Config(**shape, **none)))
    found = []
    for step in range(7):
        tokens = torch.randint(61, (8, 16), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = engine(tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        found.append({**looked_at(engine, world), "losses": [float(loss.detach())], "moved": engine.mst.changed_at})
    names = [index.name for index in zero_shards.indexes_of(engine.module)]
    assert ("transformer.wte.weight" in names and "transformer.h.0.mlp.c_fc.weight" in names) == (kind == "auto")
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_of_transformers_is_compact_and_bit_equal(stage):
    pytest.importorskip("transformers")
    compact, dense = (pool.run(hugging_face_course, 2, stage, kind)[0] for kind in ("auto", "off"))
    assert compact[-1]["moved"] == 6 and differences(compact, dense) == []


def sequences_course(rank, world, stage, kind):
    with cut_sequences.mesh_of(2) as mesh:
        own = constant_config(stage, world, kind, policy="rigl")
        config = {**own, **cut_sequences.config(stage, mesh, "fp32", 30), "mst": own["mst"]}
        config["optimizer"] = own["optimizer"]
        engine, *_ = mst_scale.initialize(model=cut_sequences.model(), mpu=mesh, config=config)
        if kind == "off":
            zero_shards.step.norm_in_float64(engine)
        assert bool(zero_shards.indexes_of(engine.module)) == (kind == "auto")
        found = []
        for step in range(7):
            loss = engine(*cut_sequences.mine(mesh, *cut_sequences.batch(step, 32)))
            engine.backward(loss)
            engine.step()
            found.append({**looked_at(engine, world), "losses": [float(loss.detach())], "moved": engine.mst.changed_at})
        return found


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.full
def test_bit_equal_with_sequences_cut_over_ranks(stage):
    compact, dense = (pool.run(sequences_course, 2, stage, kind)[0] for kind in ("auto", "off"))
    assert compact[-1]["moved"] == 6 and differences(compact, dense) == []


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
    live = sum(p.numel() for p in engine.module.parameters())
    return {"masters": sum(p.numel() for p in held), "states": bytes_of, "sent": sent, "parameters": live}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_and_traffic_follow_the_density(stage):
    compact, dense = (pool.run(kept_and_sent, 2, stage, kind)[0] for kind in ("auto", "off"))
    for what, most in compact.items():
        assert most <= 0.05 * dense[what] + 4096, (what, most, dense[what])  # 4 % of the weights, and small messages


# --- what stays dense ---

WHY = [
    ({"mst.sparsity.variation": "sv"}, "the sparsity changes"),
    ({"mst.topology.policy": "snfs"}, "reads momentum"),
    ({"mst.topology.granularity": {"block": 4}}, "granularity is not element"),
    ({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, "not the config's Adam"),
]


@pytest.mark.parametrize(("changes", "reason"), WHY, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_compact_stays_dense_and_one_line_says_why(changes, reason, caplog):
    config = constant_config(1, 1, "auto")
    for key, value in changes.items():
        *path, name = key.split(".")
        place = config
        for part in path:
            place = place[part]
        place[name] = value
    model = toy()
    with caplog.at_level(logging.INFO, "mst_scale"):
        make_compact(model, load(config), None, model.parameters(), {})
    lines = [record.getMessage() for record in caplog.records if "mst.compute.compact" in record.getMessage()]
    assert len(lines) == 1 and reason in lines[0]
    assert not zero_shards.indexes_of(model)
    assert setting_of(load(config), 1).compacted is None, "mst plan"


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


def test_a_layer_of_another_kind_stays_dense(caplog):
    class Own(nn.Linear):
        pass

    model = toy()
    model.down = Own(37, 13, bias=False)
    with caplog.at_level(logging.INFO, "mst_scale"):
        make_compact(model, load(constant_config(1, 1, "auto")), None, model.parameters(), {})
    assert "down.weight belongs to a Own" in caplog.text and not zero_shards.indexes_of(model)


def test_a_layer_whose_weight_a_fused_kernel_reads_stays_dense(caplog):
    model, config = nn.TransformerEncoderLayer(8, 2, 16), constant_config(1, 1, "auto")
    config["mst"]["targets"] = {"include": ["linear1.*", "linear2.*"], "lm_head": False}
    with caplog.at_level(logging.INFO, "mst_scale"):
        make_compact(model, load(config), None, model.parameters(), {})
    assert "fuses its products" in caplog.text
    assert not zero_shards.indexes_of(model)


def test_it_is_off_unless_asked_for():
    config = constant_config(1, 1, "auto")
    del config["mst"]["compute"]
    model = toy()
    make_compact(model, load(config), None, model.parameters(), {})
    assert not zero_shards.indexes_of(model)
