"""Whole channels that live and die: alike on any ranks and stage, born unnoticed, multiplied as what lives alone."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import mst_scale
from mst_scale.checkpoints.mask_report import inspect
from mst_scale.config import load
from mst_scale.config.blocks import ModelConfig
from mst_scale.dead_units.live import Channels, spread
from mst_scale.dead_units.units import find_units
from mst_scale.errors import UserError
from mst_scale.mixed_growing import packed_bits
from mst_scale.models import GPT, build
from mst_scale.shard import Cut, Shard
from tests.ranks.dead_units.test_live import CONTEXT, VOCAB, advance, batch
from tests.support import layouts, pool
from tests.support.engines import whole_masks
from tests.support.layouts import Layout, Recipe
from tests.support.toy_engine import full
from tests.support.toys import deepspeed_config

pytestmark = pytest.mark.full

STEPS = 12
CHANNELS = {
    "sparsity": {"max": 0.75, "warmup": 0, "ultra": 4, "restore": 6, "stages": 3, "distribution": "uniform"},
    "topology": {
        "interval": 2, "policy": "static", "granularity": "channel", "random_ratio": 1.0,
        "grown_moments": "active_mean",
    },
    "targets": {"lm_head": False},
    "attention": {"pattern": "dense"},
}  # fmt: skip


def model(bias: bool = False):
    """Odd widths, so that rows straddle ranks."""
    torch.manual_seed(4)
    shape = {"n_layer": 2, "n_head": 3, "n_embd": 15, "d_ff": 37, "seq_length": CONTEXT, "vocab_size": VOCAB}
    made = build(ModelConfig(**shape, vocab_multiple=1, bias=bias))
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    return made


def config(stage, world, precision="fp32", **mst):
    raw = deepspeed_config(stage, world, precision)
    raw["optimizer"]["params"]["torch_adam"] = True
    raw["training"] = {"steps": STEPS, "seed": 3}
    raw["mst"] = {"method": "mst", **CHANNELS, **mst}
    return raw


# --- which live ---


def test_every_head_has_as_many_active_units_and_denser_models_keep_those_of_sparser_ones():
    units = find_units(model())[0]
    channels = Channels(units, [name for some in units for name in some.matrices], 3, lambda step: 0.0, lambda: 0)
    assert {some.kind: (some.count, some.groups) for some in units} == {
        "mlp": (37, 1), "value": (15, 3), "query_key": (15, 3),
    }  # fmt: skip
    for some in units:
        before = torch.zeros(some.count, dtype=torch.bool)
        for sparsity in (0.99, 0.8, 0.5, 0.3, 0.0):
            is_active = channels.active(some, sparsity)
            size = some.count // some.groups
            kept = max(1, math.floor((1 - sparsity) * size + 0.5))
            assert is_active.view(some.groups, size).sum(1).tolist() == [kept] * some.groups
            assert not (before & ~is_active).any()
            before = is_active
    one, other = (channels.active(some, 0.5) for some in units if some.kind == "mlp")
    assert not torch.equal(one, other), "each layer has its own"


def test_the_number_of_active_units_is_a_multiple_of_eight():
    wide = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=128, seq_length=8, vocab_size=VOCAB))
    units = find_units(wide)[0]
    channels = Channels(units, [name for some in units for name in some.matrices], 3, lambda step: 0.0, lambda: 0)
    for sparsity, of_head, of_mlp in ((0.99, 8, 8), (0.8, 16, 104), (0.5, 32, 256), (0.0, 64, 512)):
        for some in units:
            is_active = channels.active(some, sparsity).view(some.groups, -1).sum(1)
            assert set(is_active.tolist()) == {of_mlp if some.kind == "mlp" else of_head}


def test_a_slice_equals_its_part_of_the_whole_mask():
    rows, columns = torch.rand(13) < 0.5, torch.rand(21) < 0.5
    whole = rows[:, None] & columns
    for start, length in ((0, 273), (5, 100), (20, 1), (77, 196), (273, 0)):
        found = spread(Shard.of_range("w", (13, 21), start, length), rows, columns, torch.device("cpu"))
        assert torch.equal(packed_bits.unpack(found, length), whole.view(-1)[start : start + length])
    cut = Cut((13, 21), ((2, 4), (9, 13)), ((0, 5), (11, 20)))
    found = spread(Shard("w", cut, 3, 60), rows, columns, torch.device("cpu"))
    assert torch.equal(packed_bits.unpack(found, 60), cut.of(whole).view(-1)[3:63])


def test_parameters_without_channels_or_with_parts_of_units_are_rejected():
    units = find_units(model())[0]
    names = [name for some in units for name in some.matrices]
    with pytest.raises(UserError, match=r"wte.weight.*lm_head = false"):
        Channels(units, [*names, "wte.weight"], 3, lambda step: 0.0, lambda: 0)
    with pytest.raises(UserError, match=r"mlp units .* mst.targets leaves out blocks.1.mlp.down.weight"):
        Channels(units, [n for n in names if n != "blocks.1.mlp.down.weight"], 3, lambda step: 0.0, lambda: 0)


@pytest.mark.parametrize(
    ("block", "value"),
    [
        ("topology", {"policy": "mst"}),
        ("topology", {"grown_moments": "seeded"}),
        ("topology", {"random_ratio": 0.5}),
        ("sparsity", {"distribution": "erk"}),
    ],
)
def test_a_config_that_would_rank_or_exchange_channels_is_rejected(block, value):
    raw = config(0, 1)
    raw["mst"] = {**raw["mst"], block: {**raw["mst"][block], **value}}
    with pytest.raises(UserError, match=r'granularity = "channel" .*policy static'):
        load(raw)


# --- a run ---


def standing(rank, world, stage):
    """Weights move by masks and births alone: masks, weights and the loss of one batch after every step."""
    raw = config(stage, world)
    raw["optimizer"]["params"] |= {"lr": 0.0, "weight_decay": 0.0}
    engine, *_ = mst_scale.initialize(model=model(), config=raw)
    mst, found, losses = engine.mst, [], []
    for step in range(STEPS):
        advance(engine, rank, step, step + 1)
        weights = [full(engine, mst.store.weight(i), i, world).numpy().tobytes() for i in range(len(mst.masks))]
        found.append((whole_masks(engine), weights, mst.sparsity, mst.dead_units()))
        with torch.no_grad():
            losses.append(float(engine(*batch(99, 0))))
    return found, losses


def test_masks_and_births_are_bit_identical_on_any_ranks_and_stage_and_change_no_loss():
    reference = None
    for stage, world in ((0, 1), (0, 2), (2, 3), (3, 2)):
        (result, *others) = pool.run(standing, world, stage)
        assert all(other == result for other in others)
        found, losses = result
        reference = reference or found
        assert found == reference, f"stage {stage}, {world} ranks"
        assert max(losses) - min(losses) < 2e-6, "births add nothing"  # but zeros to float32 sums of another length
    sparsities = [sparsity for _, _, sparsity, _ in reference]
    assert sparsities[0] == pytest.approx(0.75, abs=0.06) and sparsities[-1] == 0
    assert len(set(sparsities)) >= 3 and all(a >= b for a, b in pairwise(sparsities))
    dead = [sum(count for count, _ in units.values()) for *_, units in reference]
    assert dead[0] > 50 and dead[-1] == 0


def learning(rank, world, stage, precision, backend, bias=False):  # noqa: PLR0917
    raw = config(stage, world, precision, compute={"backend": backend})
    engine, *_ = mst_scale.initialize(model=model(bias), config=raw)
    losses, narrow, chained = [], 0, 0
    for step in range(STEPS):
        indices = [
            product.index for product in engine.mst.compute.layers.products.values() if product.index is not None
        ]
        narrow, chained = narrow + len(indices), chained + sum(index.chained_out for index in indices)
        loss = engine(*batch(step, rank))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses, narrow, chained


@pytest.mark.parametrize(("stage", "bias"), [(0, True), (3, False)])
def test_products_of_active_channels_train_like_masked_dense_ones(stage, bias):
    narrow, dense = (pool.run(learning, 2, stage, "fp32", backend, bias)[0] for backend in ("auto", "dense"))
    assert narrow[1] >= 8 * 4 and narrow[2] == narrow[1] / 2 and dense[1] == 0
    assert narrow[0] == pytest.approx(dense[0], rel=1e-5)


def other_seed(rank, world):
    engine, *_ = mst_scale.initialize(model=model(), config=config(0, world))
    engine.mst.topology.elements.seed += 1
    engine.mst.topology.elements._drawn.clear()
    try:
        advance(engine, rank, 0, 8)
    except ValueError as error:
        return str(error)
    return None


def test_channels_of_another_seed_are_rejected_on_every_rank():
    for said in pool.run(other_seed, 2):
        assert "training.seed" in said


def save_and_go_on(rank, world, folder):
    engine, *_ = mst_scale.initialize(model=model(), config=config(2, world))
    advance(engine, rank, 0, 7)
    engine.save_checkpoint(folder, tag="here")
    advance(engine, rank, 7, STEPS)
    other, *_ = mst_scale.initialize(model=model(), config=config(2, world))
    other.load_checkpoint(folder, tag="here")
    advance(other, rank, 7, STEPS)
    one, two = engine.mst.store, other.mst.store
    same = all(torch.equal(one.weight(i), two.weight(i)) for i in range(len(one.slices)))
    return whole_masks(engine) == whole_masks(other), same


def test_a_checkpoint_continues_with_the_same_channels(tmp_path):
    assert all(all(found) for found in pool.run(save_and_go_on, 2, str(tmp_path)))
    assert inspect(tmp_path / "here").granularity == "channel"


CUT = [Layout(tensor=2), Layout(tensor=2, data=2, stage=1), Layout(pipeline=2), Layout(sequence=2, stage=1)]


@pytest.mark.parametrize("layout", CUT, ids=str)
def test_layers_that_are_cut_have_the_same_masks(layout):
    how = Recipe(mst={**CHANNELS, "topology": {**CHANNELS["topology"], "interval": 1}})
    alone = layouts.alone(how)
    assert len(alone["masks"]) >= 1
    for found in pool.run(layouts.trained, layout.world, layout, how):
        for what in ("masks", "digests", "sparsity", "densities", "changes"):
            assert found[what] == alone[what]
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-4)


def of_transformers():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(4)
    shape = {"n_layer": 1, "n_head": 3, "n_embd": 12, "n_positions": CONTEXT, "vocab_size": VOCAB}
    made = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**shape, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, initializer_range=0.2)
    )
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.2)
    return made


def learning_of_transformers(rank, world, stage, backend):
    raw = config(stage, world, compute={"backend": backend}, targets={"include": ["*.h.*"], "lm_head": False})
    engine, *_ = mst_scale.initialize(model=of_transformers(), config=raw)
    losses, narrow, sparsities = [], 0, []
    for step in range(STEPS):
        narrow += sum(product.index is not None for product in engine.mst.compute.layers.products.values())
        tokens = batch(step, rank)[0]
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        sparsities.append(engine.mst.sparsity)
    return losses, narrow, sparsities


@pytest.mark.parametrize("stage", [0, 3])
def test_a_transformers_gpt_multiplies_by_active_channels_too(stage):
    narrow, dense = (pool.run(learning_of_transformers, 2, stage, backend)[0] for backend in ("auto", "dense"))
    assert narrow[1] >= 4 * 4 and dense[1] == 0 and narrow[2] == dense[2] and max(dense[2]) > 0.6
    assert narrow[0] == pytest.approx(dense[0], rel=1e-5)
    assert narrow[0][-1] < narrow[0][0]


def test_a_gpt_of_transformers_has_channels_too():
    made = of_transformers()
    assert {some.kind: some.groups for some in find_units(made)[0]} == {"mlp": 1, "value": 3, "query_key": 3}
    ours = GPT(ModelConfig(n_layer=1, n_head=3, n_embd=12, seq_length=8, vocab_size=VOCAB))
    assert [some.groups for some in find_units(ours)[0]] == [3, 3, 1]
