"""Checkpoints of compact storage: resumed bit for bit, read as matrices, and converted to other layouts and to dense
storage and back."""

import json
import shutil
import subprocess
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.utils import parametrizations, prune

import mst_scale
from mst_scale import zero_shards
from mst_scale.checkpoints.mask_report import inspect
from mst_scale.checkpoints.reshape import make_dense, reshape
from mst_scale.config import ModelConfig
from mst_scale.errors import Damaged, UserError
from mst_scale.models import GPT
from mst_scale.zero_shards.universal import STATES
from mst_scale.zero_shards.weight_files import states_of, weights_of
from tests.support import pool
from tests.support.compact_pairs import constant_config, differences, started
from tests.support.engines import whole_state
from tests.support.toy_engine import train
from tests.support.toys import toy_batch

FIRST, MORE = 5, 5  # a topology step lies on either side


def saved(rank, world, stage, kind, folder):
    engine = started(constant_config(stage, world, kind, policy="rigl"))
    train(engine, rank, world, FIRST)
    engine.save_checkpoint(folder, tag="half")
    return {**whole_state(engine), **continued(engine, rank, world)}


def continued(engine, rank, world):
    losses = train(engine, rank, world, MORE, first=FIRST)
    return {**{f"later {key}": value for key, value in whole_state(engine).items()}, "losses": losses}


def resumed(rank, world, stage, kind, folder):
    engine = started(constant_config(stage, world, kind, policy="rigl"))
    train(engine, rank, world, 4)  # over other masks
    engine.load_checkpoint(folder, tag="half")
    return {**whole_state(engine), **continued(engine, rank, world)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_run_resumes_bit_for_bit(stage, tmp_path):
    once = pool.run(saved, 2, stage, "auto", str(tmp_path))[0]
    again = pool.run(resumed, 2, stage, "auto", str(tmp_path))[0]
    assert differences([again], [once]) == []


def amsgrad(rank, world, folder):
    """Weights of an AMSGrad run, and of one that resumes after `make_dense` has seen its checkpoint."""
    optimizer = {"type": "AdamW", "params": {"torch_adam": True, "amsgrad": True}}
    config = constant_config(2, world, "auto", policy="rigl", optimizer=optimizer)
    whole, resumed = started(config), started(config)
    train(whole, rank, world, FIRST)
    whole.save_checkpoint(folder, tag="half")
    form = make_dense(Path(folder) / "half")
    resumed.load_checkpoint(folder, tag="half")
    return form, continued(whole, rank, world), continued(resumed, rank, world)


def test_states_that_the_universal_layout_has_no_place_for_stay_in_the_checkpoint(tmp_path):
    ((form, whole, resumed),) = pool.run(amsgrad, 1, str(tmp_path))
    assert form == {}
    assert differences([resumed], [whole]) == []


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_readers_see_matrices(stage, tmp_path):
    found = pool.run(saved, 2, stage, "auto", str(tmp_path))[0]
    checkpoint = tmp_path / "half"
    for key, weights in states_of(checkpoint, STATES).items():
        for name in ("up.weight", "down.weight", "out.weight"):
            whole = found[f"{name} {'weight' if key == 'fp32' else key}"]
            assert torch.equal(weights.read(name).view(-1), whole), (name, key)
            assert torch.equal(weights.span(name, 5, 47), whole[5:47])
    assert weights_of(checkpoint).shapes["up.weight"] == (37, 13)
    layers = {layer.name: layer for layer in inspect(checkpoint).layers}
    assert layers["up.weight"].sha256 == found["up.weight mask"]


CONVERSIONS = [((2, 2, "auto"), (2, 2, "off")), ((2, 2, "off"), (2, 2, "auto")), ((2, 3, "auto"), (1, 0, "auto"))]
CONVERSIONS += [((1, 0, "off"), (2, 3, "auto")), ((2, 1, "auto"), (1, 2, "off"))]


@pytest.mark.full
@pytest.mark.parametrize(("there", "here"), CONVERSIONS)
def test_reshape_converts_between_layouts_and_storages(there, here, tmp_path):
    """Each is (ranks, ZeRO stage, storage)."""
    before = pool.run(saved, *there, str(tmp_path))[0]
    reshape(tmp_path / "half")
    after = pool.run(resumed, *here, str(tmp_path))[0]
    at_load = {key: value for key, value in after.items() if not key.startswith("later") and key != "losses"}
    assert differences([at_load], [{key: before[key] for key in at_load}]) == []
    if there[0] == here[0]:
        assert differences([after], [before]) == []


def loads_the_other_kind(rank, world, kind, folder):
    engine = started(constant_config(2, world, kind, policy="rigl"))
    with pytest.raises(UserError, match=r"stores .*Run `mst reshape"):
        engine.load_checkpoint(folder, tag="half")
    return True


@pytest.mark.parametrize(("kind", "other"), [("auto", "off"), ("off", "auto")])
def test_a_checkpoint_of_the_other_storage_is_rejected_with_what_to_do(kind, other, tmp_path):
    pool.run(saved, 1, 2, kind, str(tmp_path))
    assert pool.run(loads_the_other_kind, 1, other, str(tmp_path)) == [True]


def loads_another_count(rank, world, folder):
    engine = started(constant_config(2, world, "auto", sparsity=0.7))
    before = whole_state(engine)
    with pytest.raises(UserError, match="active weights in the checkpoint"):
        engine.load_checkpoint(folder, tag="half")
    assert differences([whole_state(engine)], [before]) == []
    return True


def test_a_mask_with_another_number_of_weights_is_rejected(tmp_path):
    pool.run(saved, 1, 2, "auto", str(tmp_path))
    assert pool.run(loads_another_count, 1, str(tmp_path)) == [True]


def warm(rank, world, kind, folder, weights_only):
    engine = started(constant_config(2, world, kind, policy="rigl"))
    mst_scale.warm_start(engine, Path(folder) / "half", weights_only=weights_only)
    found = whole_state(engine)
    return {**{key: value for key, value in found.items() if "exp_avg" not in key}, "step": engine.global_steps}


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize(("kind", "stage"), [("auto", 2), ("off", 3)])
def test_a_warm_start_takes_the_weights_of_either_storage(kind, stage, weights_only, tmp_path):
    pool.run(saved, 2, stage, kind, str(tmp_path))
    compact, dense = (pool.run(warm, 2, to, str(tmp_path), weights_only)[0] for to in ("auto", "off"))
    assert differences([compact], [dense]) == []


def saved_dense(rank, world, stage, in_background, folder):
    return saved_with(rank, world, stage, in_background, folder, {"rate": 1} if in_background else Namespace(rate=1))


def saved_with(rank, world, *how):
    stage, in_background, folder, arguments = how
    config = constant_config(stage, world, "auto", policy="rigl")
    config["training"] |= {"checkpoint_form": "dense", "async_save": in_background}
    engine = started(config)
    train(engine, rank, world, 2)
    state = {"arguments": arguments}
    engine.save_checkpoint(folder, tag="half", client_state=state)
    train(engine, rank, world, FIRST - 2, first=2)
    engine.save_checkpoint(folder, tag="half", client_state=state)
    found = {**whole_state(engine), **continued(engine, rank, world)}
    engine.mst.finish_save()
    return found


def resumed_from_latest(rank, world, stage, kind, folder):
    engine = started(constant_config(stage, world, kind, policy="rigl"))
    train(engine, rank, world, 4)  # over other masks
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    return {**whole_state(engine), **continued(engine, rank, world)}


@pytest.mark.parametrize(("stage", "in_background"), [(0, False), (1, True), (2, False), (3, False)])
def test_own_loops_save_the_dense_form_if_the_config_says_so(stage, in_background, tmp_path):
    """Any layout and either storage load it by `latest` alone; the next save of the tag has the compact form again."""
    folder, half = str(tmp_path), tmp_path / "half"
    half.mkdir()
    (half / "sampler.pt").touch()  # the loop's own
    once = pool.run(saved_dense, 2, stage, in_background, folder)[0]
    assert (half / "zero").is_dir() and not [*half.glob("*_optim_states.pt"), *half.glob("mst/compact*")]
    assert (half / "sampler.pt").is_file() and not [*tmp_path.rglob("*.partial"), *tmp_path.rglob("zero.old")]
    assert (tmp_path / "latest").read_text() == (tmp_path / "latest_universal").read_text() == "half"
    assert differences([pool.run(resumed_from_latest, 2, stage, "auto", folder)[0]], [once]) == []
    elsewhere = pool.run(resumed_from_latest, 1, 2, "off", folder)[0]
    at_load = {key: value for key, value in elsewhere.items() if not key.startswith("later") and key != "losses"}
    assert differences([at_load], [{key: once[key] for key in at_load}]) == []
    pool.run(saved, 2, stage, "auto", folder)
    assert not (half / "zero").exists() and (half / "mst" / "compact.safetensors").is_file()


def test_objects_in_a_background_save_keep_the_compact_form(tmp_path):
    """Its writer opens data alone."""
    folder, half = str(tmp_path), tmp_path / "half"
    once = pool.run(saved_with, 2, 1, True, folder, Namespace(rate=1))[0]
    assert (half / "mst" / "compact.safetensors").is_file() and not (half / "zero").exists()
    assert not [*tmp_path.rglob("*.partial")] and not (tmp_path / "latest_universal").exists()
    assert (tmp_path / "latest").read_text() == "half"
    assert differences([pool.run(resumed_from_latest, 2, 1, "auto", folder)[0]], [once]) == []


# --- state dicts, copies, second derivatives ---


def state_dicts(rank, world, stage):
    found = {}
    for kind in ("auto", "off"):
        engine = started(constant_config(stage, world, kind, policy="rigl"))
        train(engine, rank, world, 4)
        generator = torch.Generator().manual_seed(7)
        new = {name: torch.randn(value.shape, generator=generator) for name, value in matrices(engine).items()}
        mst_scale.load_weights(engine, new)
        found[kind] = [whole_state(engine)]
        if stage < 3:
            found[kind].append({name: value.clone() for name, value in engine.module.state_dict().items()})
        train(engine, rank, world, 3, first=4)
        found[kind].append(whole_state(engine))
    return differences(found["auto"], found["off"])


def matrices(engine):
    names = dict(zero_shards.named_parameters(engine.module))
    return {name: torch.empty(zero_shards.shape_of(p)) for name, p in names.items()}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_load_weights_and_state_dict_have_matrices(stage):
    assert pool.run(state_dicts, 2, stage) == [[], []]


def consolidated(rank, world, folder):
    extra = {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}}
    engine = started(constant_config(3, world, "auto", policy="rigl", **extra))
    train(engine, rank, world, 4)
    engine.save_16bit_model(folder, "weights.pt")
    return whole_state(engine)


def test_consolidated_weights_of_stage_3_are_matrices(tmp_path):
    found = pool.run(consolidated, 2, str(tmp_path))[0]
    weights = torch.load(tmp_path / "weights.pt")
    for name in ("up.weight", "down.weight", "out.weight"):
        assert weights[name].dim() == 2 and torch.equal(weights[name].view(-1), found[f"{name} weight"])


def load_state_dict(rank, world):
    found = {}
    for kind in ("auto", "off"):
        engine = started(constant_config(0, world, kind, policy="rigl"))
        train(engine, rank, world, 4)
        state = {name: torch.full_like(value, 0.5) for name, value in engine.module.state_dict().items()}
        engine.module.load_state_dict(state)
        train(engine, rank, world, 3, first=4)
        found[kind] = [whole_state(engine)]
    return differences(found["auto"], found["off"])


def test_load_state_dict_takes_a_matrix():
    """Without a master copy, as with dense storage, the active weights of what is loaded are taken."""
    assert pool.run(load_state_dict, 1) == [[]]


def undone(rank, world):
    engine = started(constant_config(2, world, "auto", policy="rigl"))
    engine.module.load_state_dict({n: torch.full_like(v, 0.5) for n, v in engine.module.state_dict().items()})
    with pytest.raises(UserError, match="load_weights"):
        train(engine, rank, world, 1)
    return True


def test_load_state_dict_is_rejected_where_a_master_copy_would_undo_it():
    assert pool.run(undone, 1) == [True]


def not_followed(rank, world):
    import copy

    engine = started(constant_config(0, world, "auto", policy="rigl"))
    with pytest.raises(UserError, match=r"set mst\.compute\.compact to off"):
        copy.deepcopy(engine.module)
    x = torch.randn(3, 13, requires_grad=True)
    with pytest.raises(UserError, match=r"torch\.func"):
        torch.func.grad(lambda x: engine.module.up(x).sum())(x)
    up, down = engine.module.up, engine.module.down
    for change in (partial(prune.l1_unstructured, up, "weight", 0.1), partial(parametrizations.weight_norm, down)):
        with pytest.raises(UserError, match=r"(up|down)\.weight.*set mst\.compute\.compact to off"):
            change()
    up(torch.randn(3, 13)), down(torch.randn(3, 37))  # they are as they were
    return True


def test_copies_and_transforms_are_rejected_in_one_line():
    assert pool.run(not_followed, 1) == [True]


def second_derivatives(rank, world):
    """Of the squared gradient of the active weights, with compact and with dense storage."""
    compact, dense = (started(constant_config(0, world, kind, policy="rigl")).module for kind in ("auto", "off"))
    weight = dict(compact.named_parameters())["up.weight"]
    index = zero_shards.index_of(weight)
    (first,) = torch.autograd.grad(compact(*toy_batch(0, 0)), weight, create_graph=True)
    (mine,) = torch.autograd.grad(first.square().sum(), weight)
    (first,) = torch.autograd.grad(dense(*toy_batch(0, 0)), dense.up.weight, create_graph=True)
    (theirs,) = torch.autograd.grad(index.collect(first).square().sum(), dense.up.weight)
    return mine, index.to_store(theirs)


def test_second_derivatives_are_those_of_dense_storage():
    ((mine, theirs),) = pool.run(second_derivatives, 1)
    torch.testing.assert_close(mine, theirs)


def two_steps_saved(rank, world, folder):
    engine = started(constant_config(0, world, "auto", policy="rigl"))
    for tag in ("one", "two"):
        train(engine, rank, world, FIRST)
        engine.save_checkpoint(folder, tag=tag)


def index_file(checkpoint):
    return checkpoint / "mst" / "compact.safetensors"


def rewritten(path, change):
    """Write a safetensors file again after changing its tensors and its head."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        head = json.loads(file.metadata()["mst"])
    change(tensors, head)
    save_file(tensors, path, {"mst": json.dumps(head)})


def test_an_index_of_another_step_is_rejected(tmp_path):
    pool.run(two_steps_saved, 1, str(tmp_path))
    shutil.copy(index_file(tmp_path / "one"), index_file(tmp_path / "two"))
    weights_of(tmp_path / "one")
    for reader in (weights_of, reshape):
        with pytest.raises(Damaged, match="belongs to another checkpoint"):
            reader(tmp_path / "two")


def test_an_index_of_more_weights_is_rejected_although_the_padding_has_room(tmp_path):
    pool.run(two_steps_saved, 1, str(tmp_path))

    def activate_another(tensors, head):
        bits = tensors["up.weight"]
        byte = int((bits != 255).nonzero()[0])
        bits[byte] = int(bits[byte]) | int(bits[byte]) + 1  # sets the lowest bit that was not

    rewritten(index_file(tmp_path / "one"), activate_another)
    with pytest.raises(Damaged, match="belongs to another checkpoint"):
        weights_of(tmp_path / "one")


def test_an_index_of_another_version_is_rejected_in_one_line(tmp_path):
    pool.run(two_steps_saved, 1, str(tmp_path))
    rewritten(index_file(tmp_path / "one"), lambda tensors, head: head.update(format="mst_scale compact 0"))
    with pytest.raises(UserError, match="with the version that saved it") as raised:
        weights_of(tmp_path / "one")
    assert "\n" not in str(raised.value) and str(raised.value).count("compact.safetensors") == 1
    index_file(tmp_path / "two").write_bytes(index_file(tmp_path / "two").read_bytes()[:100])
    with pytest.raises(Damaged, match="damaged or cut short"):
        weights_of(tmp_path / "two")


def test_deepspeeds_scripts_are_replaced_by_ones_that_name_our_commands(tmp_path):
    pool.run(saved, 2, 2, "auto", str(tmp_path))
    for name in ("zero_to_fp32.py", "zero_to_torch.py"):
        done = subprocess.run(
            [sys.executable, name, ".", "out"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1 and "mst export" in done.stderr and done.stderr.count("\n") == 1
    pool.run(saved, 2, 2, "off", str(tmp_path))
    assert "argparse" in (tmp_path / "zero_to_fp32.py").read_text()


def sizes(rank, world, kind, folder):
    """Train a small GPT with a sparse head, save it, and return how many bytes all files of the checkpoint take."""
    config = constant_config(1, world, kind, sparsity=0.96)
    config["mst"] |= {"targets": {"lm_head": True}, "attention": {"pattern": "dense"}}
    torch.manual_seed(0)
    shape = ModelConfig(n_layer=2, n_head=4, n_embd=256, seq_length=16, vocab_size=2048)
    engine = started(config, GPT(shape))
    tokens = torch.randint(2048, (8, 16))
    engine.backward(engine(tokens, tokens))
    engine.step()
    engine.save_checkpoint(folder, tag="one")
    return sum(path.stat().st_size for path in Path(folder, "one").rglob("*") if path.is_file())


def test_a_compact_checkpoint_at_96_percent_takes_a_fifteenth_of_a_dense_one(tmp_path):
    compact, dense = (pool.run(sizes, 2, kind, str(tmp_path / kind))[0] for kind in ("auto", "off"))
    assert 0.04 * dense < compact < 0.08 * dense
