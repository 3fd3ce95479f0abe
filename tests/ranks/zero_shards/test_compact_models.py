"""Compact storage of other models and of given masks equals dense storage bit for bit, or the model stays dense."""

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import mst_scale
from mst_scale import zero_shards
from mst_scale.checkpoints import open_masks
from mst_scale.comm import Mesh, ParallelDims
from mst_scale.config import ModelConfig, load
from mst_scale.engine.compaction import make_compact
from mst_scale.errors import UserError
from mst_scale.models import GPT
from mst_scale.plan.setting import setting_of
from tests.support import cut_sequences, pool
from tests.support.compact_pairs import constant_config, differences, started
from tests.support.engines import whole_state
from tests.support.integrated import digests
from tests.support.toy_engine import train
from tests.support.toys import toy, toy_batch


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
    return losses, whole_state(engine), counters["stats"]["unique_graphs"], dict(counters["graph_break"])


def test_bit_equal_with_compiled_blocks_which_share_one_graph():
    """Steps that read dense gradients run eagerly, so that they do not break the graph of the steps after them."""
    (losses, state, none, _), (same, compiled, graphs, breaks) = (
        pool.run(compiled_course, 1, kind)[0] for kind in ("eager", "compiled")
    )
    assert losses == same and (none, graphs, breaks) == (0, 1, {})
    assert all(torch.equal(value, compiled[key]) for key, value in state.items() if torch.is_tensor(value))


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
        found.append({**whole_state(engine), "losses": losses})
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
        found.append({**whole_state(engine), **now})
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
        found.append({**whole_state(engine), "losses": [float(loss.detach())], "moved": engine.mst.changed_at})
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
            found.append({**whole_state(engine), "losses": [float(loss.detach())], "moved": engine.mst.changed_at})
        return found


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.full
def test_bit_equal_with_sequences_cut_over_ranks(stage):
    compact, dense = (pool.run(sequences_course, 2, stage, kind)[0] for kind in ("auto", "off"))
    assert compact[-1]["moved"] == 6 and differences(compact, dense) == []


WHY = [
    ({"mst.sparsity.variation": "sv"}, "only long phases of one sparsity are compact, of GPTs in mst_scale.pretrain"),
    ({"mst.sparsity.variation": "sv", "tensor_parallel": {"autotp_size": 2}}, "layers are split over ranks"),
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
    ranks = config.get("tensor_parallel", {}).get("autotp_size", 1)
    assert setting_of(load(config), ranks).compacted is None, "mst plan"


@pytest.mark.parametrize("sizes", [ParallelDims(tensor=2), None])
def test_the_reason_names_what_an_mpu_does(sizes, caplog):
    mpu, reason, model = object(), "the mpu is not a mst_scale.comm.Mesh", toy()
    if sizes is not None:
        mpu, reason = Mesh.__new__(Mesh), "layers are split over ranks"  # without process groups
        mpu.sizes = sizes
    with caplog.at_level(logging.INFO, "mst_scale"):
        make_compact(model, load(constant_config(1, 1, "auto")), None, model.parameters(), {"mpu": mpu})
    assert f"kept as zeros, because {reason}" in caplog.text and not zero_shards.indexes_of(model)


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


def averaged(rank, world, stage, kind, disturbed=True):
    """Evaluate with averaged weights in the middle of a run; return the losses of training, and that one."""
    engine = started(constant_config(stage, world, kind, policy="rigl"))
    losses, evaluated = train(engine, rank, world, 4), None
    if not disturbed:
        return losses + train(engine, rank, world, 6, first=4), evaluated
    average = {name: value.clone() for name, value in engine.module.state_dict().items()}
    losses += train(engine, rank, world, 3, first=4)
    own = {name: value.clone() for name, value in engine.module.state_dict().items()}
    for name, value in own.items():
        average[name].mul_(0.9).add_(value, alpha=0.1)
    mst_scale.load_weights(engine, average)
    engine.eval()
    evaluated = float(engine(*toy_batch(0, rank)))
    engine.train()
    mst_scale.load_weights(engine, own)
    return losses + train(engine, rank, world, 3, first=7), evaluated


@pytest.mark.parametrize("stage", [0, 2])
def test_a_moving_average_of_the_weights_evaluates_and_leaves_the_run_as_it_was(stage):
    compact, dense = (pool.run(averaged, 2, stage, kind) for kind in ("auto", "off"))
    assert compact == dense
    undisturbed = pool.run(averaged, 2, stage, "auto", False)
    assert [losses for losses, _ in compact] == [losses for losses, _ in undisturbed]


def swapped(rank, world, kind):
    """Halve all weights in place for an evaluation, put them back, and train on."""
    engine = started(constant_config(0, world, kind, policy="rigl"))
    losses, evaluated = train(engine, rank, world, 4), None
    kept = [p.detach().clone() for p in engine.module.parameters()]
    with torch.no_grad():
        for p in engine.module.parameters():
            p.mul_(0.5)
        engine.eval()
        evaluated = float(engine(*toy_batch(0, rank)))
        engine.train()
        for p, value in zip(engine.module.parameters(), kept, strict=True):
            p.copy_(value)
    return losses + train(engine, rank, world, 3, first=4), evaluated


def test_weights_may_be_swapped_in_place_for_an_evaluation():
    compact, dense = (pool.run(swapped, 1, kind)[0] for kind in ("auto", "off"))
    assert compact == dense
    ((undisturbed, _),) = pool.run(averaged, 1, 0, "auto", False)
    assert compact[0] == undisturbed[:7]


def frozen_before(rank, world, kind):
    model = toy()
    model.embed.weight.requires_grad_(False)
    model.down.weight.requires_grad_(False)
    engine = started(constant_config(2, world, kind, policy="rigl"), model)
    before = model.embed.weight.detach().clone(), model.down.weight.detach().clone()
    losses = train(engine, rank, world, 5)
    assert torch.equal(model.embed.weight, before[0]) and torch.equal(model.down.weight, before[1])
    return losses, zero_shards.is_compact(engine.module)


def test_frozen_weights_stay_as_they_are():
    (compact, yes), (dense, no) = (pool.run(frozen_before, 2, kind)[0] for kind in ("auto", "off"))
    assert (yes, no) == (True, False) and compact == dense


def frozen_during(rank, world, stage):
    engine = started(constant_config(stage, world, "auto", policy="rigl"))
    train(engine, rank, world, 2)
    dict(engine.module.named_parameters())["up.weight"].requires_grad_(False)
    with pytest.raises(UserError, match=r"up\.weight was frozen"):
        train(engine, rank, world, 1, first=2)
    return True


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_freezing_a_compact_weight_during_a_run_is_rejected(stage):
    assert pool.run(frozen_during, 1, stage) == [True]
