"""Compact storage in a pipeline trains as dense storage does in the same pipeline: the same masks, weights and moments,
bit for bit in fp32, with the head tied across the first stage and the last."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import mst_scale
from mst_scale import zero_shards
from mst_scale.checkpoints.mask_report import inspect
from mst_scale.checkpoints.reshape import reshape
from mst_scale.config import load
from mst_scale.errors import Damaged
from mst_scale.plan.memory import memory
from mst_scale.plan.setting import held, setting_of
from mst_scale.plan.traffic import tied_ends
from mst_scale.zero_shards import compact_files
from mst_scale.zero_shards.universal import STATES
from mst_scale.zero_shards.weight_files import states_of, weights_of
from tests.support import pool
from tests.support.compact_pairs import differences
from tests.support.compact_pipelines import MODEL, config, course, started, step
from tests.support.engines import whole_state
from tests.support.layouts import Layout

STEPS = 7  # with two topology steps
MATRICES = ("attention.qkv", "attention.proj", "mlp.up", "mlp.down")


def both(layout, micro_batches=3, changes=None, prepare=None, **more):
    """The courses of every rank with compact and with dense storage, without what they store."""
    raws = [config(layout, kind, micro_batches, **more) for kind in ("auto", "off")]
    compact, dense = (pool.run(course, layout.world, layout, raw, STEPS, changes or {}, prepare) for raw in raws)
    stored = [ranks[-1]["stored"] for ranks in compact]
    assert not any(ranks[-1]["stored"] for ranks in dense)
    assert compact[0][-1]["dead"] == dense[0][-1]["dead"] != []
    for mine in compact[1:]:
        assert differences(mine[:-1], compact[0][:-1]) == [], "all ranks say the same"
    assert compact[0][-2]["moved"] == 6 and any(now["norm"] > 0.05 for now in dense[0][:-1]), "clipping is active"
    return compact[0][:-1], dense[0][:-1], stored


CASES = [(0, 3, "rigl"), (1, 3, "rigl"), (1, 1, "mst"), (0, 2, "mst"), (1, 2, "set")]


@pytest.mark.parametrize(("stage", "micro_batches", "policy"), CASES)
def test_two_stages_are_bit_equal_to_dense_storage(stage, micro_batches, policy):
    compact, dense, stored = both(Layout(pipeline=2, stage=stage), micro_batches, policy=policy)
    assert differences(compact, dense) == []
    assert ["wte.weight" in names for names in stored] == [True, True]
    assert [f"blocks.{b}.{m}.weight" in stored[b == 2] for b in range(3) for m in MATRICES] == [True] * 12


@pytest.mark.parametrize(("stage", "changes", "more"), [
    (1, {"tied_head": False}, {}),
    pytest.param(0, {"activation_checkpointing": True}, {}, marks=pytest.mark.full),
    (1, {"activation_checkpointing": True}, {"policy": "mst"}),
    (1, {}, {"backend": "cpu"}),
    (0, {}, {"initial": "magnitude"}),
    pytest.param(1, {}, {"topology": {"grown_moments": "active_mean"}}, marks=pytest.mark.full),
    pytest.param(0, {}, {"topology": {"regrow": False, "replaces_update": True}}, marks=pytest.mark.full),
    pytest.param(1, {}, {"sparsity": 0.4}, marks=pytest.mark.full),
])  # fmt: skip
def test_bit_equal_with_other_settings(stage, changes, more):
    compact, dense, stored = both(Layout(pipeline=2, stage=stage), 2, changes, **more)
    assert differences(compact, dense) == [] and all(stored)


@pytest.mark.full
@pytest.mark.parametrize(("stage", "policy"), [(0, "rigl"), (1, "rigl"), (1, "mst")])
def test_two_replicas_of_two_stages_are_bit_equal(stage, policy):
    """Each sum has two terms: over the stages of the tied matrix, then over replicas."""
    compact, dense, _ = both(Layout(pipeline=2, data=2, stage=stage), 1, policy=policy)
    assert differences(compact, dense) == []


@pytest.mark.full
@pytest.mark.parametrize(("stage", "policy", "tolerance"), [(0, "set", 0.0), (1, "set", 0.0), (1, "rigl", 2e-6)])
def test_two_replicas_accumulate(stage, policy, tolerance):
    """Growth by gradient adds micro-batches of layers up after replicas, and dense storage before."""
    compact, dense, _ = both(Layout(pipeline=2, data=2, stage=stage), 3, policy=policy)
    assert differences(compact, dense, tolerance) == []


def test_in_bf16_masks_and_weights_are_within_rounding():
    compact, dense, _ = both(Layout(pipeline=2, stage=1), 1, precision="bf16")
    assert differences(compact, dense, tolerance=1e-5) == []


def test_the_masks_are_those_of_one_rank():
    """From the same batches; the gradients of stages and of micro-batches are summed in the order of one rank."""
    compact, _, _ = both(Layout(pipeline=2, stage=1), 2)
    alone = pool.run(course, 1, Layout(), config(Layout(), "off", 2), STEPS, {})[0][:-1]
    assert differences(compact, alone, tolerance=1e-5) == []


def pruned(model, blocks=(0, 1, 2)):
    """Zero two thirds of each matrix of the first block, and more of those of other ones."""
    for name, parameter in zero_shards.named_parameters(model):
        block = int(name.split(".")[1]) if name.startswith("blocks.") and parameter.dim() == 2 else None
        if block in blocks:
            parameter.data *= (torch.arange(parameter.numel()) % (3 + block) == 1).view(parameter.shape)


def fixed(layout, kind):
    """A config that keeps the zeros of the weights."""
    raw = config(layout, kind, 4)
    raw["mst"] = {"method": "fixed", "masks": "zeros", "compute": {"backend": "dense", "compact": kind}}
    return raw


@pytest.mark.full
@pytest.mark.parametrize(("stage", "blocks"), [(0, (0, 1, 2)), (1, (0, 1, 2)), (0, (0, 1)), (1, (2,))])
def test_given_masks_are_compact_and_bit_equal(stage, blocks):
    """A stage without compact layers takes part in whatever all do, such as the norm in float64."""
    layout, prepare = Layout(pipeline=2, stage=stage), partial(pruned, blocks=blocks)
    compact, dense = (pool.run(course, 2, layout, fixed(layout, kind), 4, {}, prepare) for kind in ("auto", "off"))
    assert [len(ranks[-1]["stored"]) for ranks in compact] == [4 * len({0, 1} & {*blocks}), 4 * (2 in blocks)]
    assert differences(compact[0][:-1], dense[0][:-1]) == []


def bytes_held(rank, world, raw):
    layout = Layout(pipeline=2, stage=1)
    mesh, engine = started(layout, raw)
    for number in range(2):
        step(mesh, engine, number)
    index = sum(one.positions.numel() * one.positions.itemsize for one in zero_shards.indexes_of(engine.module))
    return zero_shards.state_bytes(engine), index


def test_the_plan_knows_what_a_stage_holds():
    raw = config(Layout(pipeline=2, stage=1), "auto", 2)
    model = {"n_layer": 3, "n_head": 4, "bias": True, **MODEL}
    experiment = load({**raw, "model": model, "pipeline": {"stages": 2}})
    setting = replace(setting_of(experiment, 2), fused=False)
    wanted, found = memory(experiment, setting), pool.run(bytes_held, 2, raw)
    assert setting.compacted is not None
    assert max(states for states, _ in found) == pytest.approx(wanted.optimizer + wanted.step_gradients, rel=0.02)
    active = [sum(4 * p.active for p in held(experiment.model, setting, stage) if p.active) for stage in range(2)]
    assert [index for _, index in found] == active
    (tied,) = tied_ends(experiment.model, setting)
    assert tied.payload < 0.2 * tied_ends(experiment.model, setting.dense)[0].payload


# --- steps that are skipped ---


def with_a_hidden_overflow(rank, world, stage, name):
    """A gradient that is not finite where no weight is active, on the stage that holds this matrix."""
    layout = Layout(pipeline=2, stage=stage)
    mesh, engine = started(layout, config(layout, "auto", 2))
    for number in range(2):
        step(mesh, engine, number)
    store, before = engine.mst.store, whole_state(engine)
    reduced = store.reduced

    def damaged(i, gradient):
        found = reduced(i, gradient)
        if store.slices[i].name == name:
            found[0] = float("inf")
        return found

    store.reduced = damaged
    step(mesh, engine, 2)
    skipped = differences([whole_state(engine)], [before])
    store.reduced = reduced
    step(mesh, engine, 3)
    return skipped, engine.mst.changed_at


@pytest.mark.parametrize("name", ["blocks.2.mlp.up.weight", "blocks.0.mlp.up.weight", "wte.weight"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_gradient_of_an_inactive_weight_that_is_not_finite_skips_the_step_on_all_stages(stage, name):
    assert pool.run(with_a_hidden_overflow, 2, stage, name) == [([], 4)] * 2


# --- what stays dense, or is rejected ---


def rejected(rank, world, kind):
    layout = Layout(pipeline=2, stage=1)

    def shuffle(model):
        if model.stage_id == 1:
            weight = model.tied_modules["wte"].weight.data
            weight.copy_(weight.flip(0))

    try:
        started(layout, config(layout, kind, 1, initial="magnitude"), shuffle)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", ["auto", "off"])
def test_copies_of_a_tied_matrix_that_would_have_other_masks_are_rejected_on_all_ranks(kind):
    first, second = pool.run(rejected, 2, kind)
    assert first == second and "wte.weight is tied" in first and "give all stages the same weights" in first


def read_by_a_function(rank, world):
    import deepspeed
    from deepspeed.pipe import PipelineModule, TiedLayerSpec
    from torch import nn

    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(4)
    tie = partial(TiedLayerSpec, "tie", nn.Linear, 12, 12, bias=False)
    layers = [tie(), nn.Linear(12, 12), nn.Linear(12, 12), tie(forward_fn=lambda module, x: x @ module.weight)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
    layout = Layout(pipeline=2, stage=1)
    raw = config(layout, "auto", 2, targets={}, sparsity=0.8)
    engine, *_ = mst_scale.initialize(model=model, config=raw)
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        batches = [tuple(torch.randn(2, 12, generator=generator) for _ in range(2)) for _ in range(2)]
        engine.train_batch(iter(batches))
    return zero_shards.is_compact(engine.module), engine.mst.sparsity


def test_a_matrix_that_a_function_of_the_pipeline_reads_keeps_all_stages_dense():
    for compact, sparsity in pool.run(read_by_a_function, 2):
        assert not compact and sparsity == pytest.approx(0.8, abs=0.01)


def sliced(rank, world):
    layout = Layout(pipeline=2, tensor=2, stage=1)
    mesh, engine = started(layout, config(layout, "auto", 1))
    step(mesh, engine, 0)
    return zero_shards.is_compact(engine.module)


def test_slices_of_layers_stay_dense():
    assert pool.run(sliced, 4) == [False] * 4


# --- checkpoints ---

FIRST, MORE = 4, 4  # a topology step lies on either side


def continued(mesh, engine):
    losses = [step(mesh, engine, number) for number in range(FIRST, FIRST + MORE)]
    return {**{f"later {key}": value for key, value in whole_state(engine).items()}, "losses": losses}


def saved(rank, world, layout, kind, folder, blocks=None):  # noqa: PLR0917
    mesh, engine = begun(layout, kind, blocks)
    for number in range(FIRST):
        step(mesh, engine, number)
    engine.save_checkpoint(folder, tag="half")
    return {**whole_state(engine), **continued(mesh, engine)}


def begun(layout, kind, blocks):
    """A run of one sparsity, or with the zeros of some blocks."""
    if blocks is None:
        return started(layout, config(layout, kind, 4 // layout.data))
    return started(layout, fixed(layout, kind), partial(pruned, blocks=blocks))


def resumed(rank, world, layout, kind, folder, blocks=None):  # noqa: PLR0917
    mesh, engine = begun(layout, kind, blocks)
    for number in range(3):
        step(mesh, engine, number)  # over other masks
    engine.load_checkpoint(folder, tag="half")
    return {**whole_state(engine), **continued(mesh, engine)}


@pytest.mark.full
@pytest.mark.parametrize("layout", [
    Layout(pipeline=2, stage=0),
    Layout(pipeline=2, stage=1),
    Layout(pipeline=2, data=2, stage=1),
], ids=str)  # fmt: skip
def test_a_run_resumes_bit_for_bit_and_readers_see_matrices(layout, tmp_path):
    once = pool.run(saved, layout.world, layout, "auto", str(tmp_path))[0]
    again = pool.run(resumed, layout.world, layout, "auto", str(tmp_path))
    assert differences(again, [once] * layout.world) == []
    checkpoint = tmp_path / "half"
    for key, weights in states_of(checkpoint, STATES).items():
        for name in ("wte.weight", "blocks.0.mlp.up.weight", "blocks.2.mlp.down.weight"):
            whole = once[f"{name} {'weight' if key == 'fp32' else key}"]
            assert torch.equal(weights.read(name).view(-1), whole), (name, key)
    assert weights_of(checkpoint).shapes["blocks.2.mlp.up.weight"] == (96, 24)
    layers = {layer.name: layer for layer in inspect(checkpoint).layers}
    assert len(layers) == 13 and layers["wte.weight"].sha256 == once["wte.weight mask"]


PIPE, ALONE = Layout(pipeline=2, stage=1), Layout(stage=2)
CONVERSIONS = [
    ((PIPE, "auto"), (PIPE, "off")),
    pytest.param((PIPE, "off"), (PIPE, "auto"), marks=pytest.mark.full),
    pytest.param((Layout(pipeline=2, stage=0), "auto"), (PIPE, "auto"), marks=pytest.mark.full),
    ((PIPE, "auto"), (ALONE, "auto")),
    pytest.param((PIPE, "auto"), (ALONE, "off"), marks=pytest.mark.full),
    ((Layout(data=2, stage=3), "auto"), (Layout(pipeline=2, stage=0), "auto")),
]


@pytest.mark.full
@pytest.mark.parametrize(("there", "here"), CONVERSIONS, ids=str)
def test_reshape_converts_between_layouts_and_storages(there, here, tmp_path):
    before = pool.run(saved, there[0].world, *there, str(tmp_path))[0]
    reshape(tmp_path / "half")
    assert not list(tmp_path.glob("half/universal/mst/compact*"))
    after = pool.run(resumed, here[0].world, *here, str(tmp_path))[0]
    at_load = {key: value for key, value in after.items() if not key.startswith("later") and key != "losses"}
    assert differences([at_load], [{key: before[key] for key in at_load}]) == []
    if there[0] == here[0]:
        assert differences([after], [before]) == []
    assert after["losses"] == pytest.approx(before["losses"], rel=1e-4)


def test_a_stage_without_compact_layers_saves_and_resumes(tmp_path):
    once = pool.run(saved, 2, PIPE, "auto", str(tmp_path), (2,))[0]
    again = pool.run(resumed, 2, PIPE, "auto", str(tmp_path), (2,))[0]
    assert differences([again], [once]) == []
    assert weights_of(tmp_path / "half").shapes["blocks.2.mlp.up.weight"] == (96, 24)


def test_a_missing_or_foreign_file_of_a_stage_is_damage(tmp_path):
    pool.run(saved, 2, PIPE, "auto", str(tmp_path))
    first, second = (compact_files.file_of(tmp_path / "half", stage) for stage in range(2))
    kept = second.read_bytes()
    second.unlink()
    with pytest.raises(Damaged, match="is missing"):
        compact_files.read(tmp_path / "half")
    second.write_bytes(first.read_bytes())
    with pytest.raises(Damaged, match="stage 0"):
        compact_files.read(tmp_path / "half")
    second.write_bytes(kept)
    assert len(compact_files.read(tmp_path / "half")) == 13


def warm(rank, world, layout, kind, folder):
    _, engine = started(layout, config(layout, kind, 2))
    mst_scale.warm_start(engine, Path(folder) / "half")
    found = whole_state(engine)
    return {**{key: value for key, value in found.items() if "exp_avg" not in key}, "step": engine.global_steps}


def test_a_warm_start_takes_weights_and_masks(tmp_path):
    pool.run(saved, 2, PIPE, "auto", str(tmp_path))
    compact, dense, alone = (
        pool.run(warm, layout.world, layout, kind, str(tmp_path))[0]
        for layout, kind in ((PIPE, "auto"), (PIPE, "off"), (ALONE, "auto"))
    )
    assert differences([compact], [dense]) == [] and differences([alone], [dense]) == []
