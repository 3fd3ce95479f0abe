"""Method "fixed": a pruned model is trained on, and its zeros stay; masks come and go in an open format."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import mst_scale
from mst_scale.checkpoints import open_masks
from mst_scale.cli import main
from mst_scale.config import load
from mst_scale.engine import initial_masks
from mst_scale.errors import UserError
from tests.ranks.integrations.test_trainer import arguments
from tests.support import pool
from tests.support.integrated import Words, deepspeed_config, digests, model, opened
from tests.support.toy_engine import STAGES
from tests.support.toys import deepspeed_config as toy_config
from tests.support.toys import toy, toy_batch

SPARSE = ("up.weight", "down.weight")


def kept(name):
    """The masks of the toy's matrices: a third is pruned, and no rule of ours would prune so."""
    shape = {"up.weight": (37, 13), "down.weight": (13, 37)}[name]
    return torch.arange(37 * 13).view(shape) % 3 != 1


def pruned():
    made = toy()
    for name in SPARSE:
        made.get_parameter(name).data *= kept(name)
    return made


def config(stage, world, masks="zeros", **more):
    mst = {"method": "fixed", "masks": masks, "targets": {"include": list(SPARSE)}}
    return toy_config(stage, world, training={"steps": 6}, mst=mst, **more)


def trained(rank, world, stage, masks, made):
    """Six steps: (mask digests, sparsity, weights that moved away from 0, weights that did not move, loss)."""
    engine, *_ = mst_scale.initialize(model=toy() if made == "dense" else pruned(), config=config(stage, world, masks))
    for step in range(6):
        loss = engine(*toy_batch(step, 0))
        engine.backward(loss)
        engine.step()
    wrong = still = 0
    start = pruned()
    shards = engine.mst.store
    for i, part in enumerate(shards.slices):
        flags = kept(part.name).view(-1)[part.start : part.start + part.length]
        before = start.get_parameter(part.name).detach().view(-1)[part.start : part.start + part.length]
        now = shards.weight(i)
        wrong += int((now[~flags] != 0).sum())
        still += int((now[flags] == before[flags]).sum())
    for mask in engine.mst.masks:
        assert mask.ever is None or torch.equal(mask.ever, mask.packed()), "no weight that is given away was ever alive"
    return digests(engine), engine.mst.sparsity, engine.mst.point.sparsity, wrong, still, float(loss.detach())


def for_some_steps(rank, world, stage):
    """Of two pruned matrices, one of which is frozen, masks are removed in the fourth step."""
    made = pruned()
    made.get_parameter("down.weight").requires_grad_(False)
    raw = config(stage, world)
    raw["mst"]["sparsity"] = {"variation": "sd", "warmup": 0, "ultra": 4}
    engine, *_ = mst_scale.initialize(model=made, config=raw)
    for step in range(6):
        engine.backward(engine(*toy_batch(step, 0)))
        engine.step()
    return [mask.active == mask.numel for mask in engine.mst.masks]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_frozen_matrix_keeps_its_mask_when_those_of_others_are_removed(stage):
    assert pool.run(for_some_steps, 1, stage) == [[True, False]]


@pytest.mark.parametrize("stage", STAGES)
def test_zeros_stay_and_the_rest_is_trained(stage):
    (alone,) = pool.run(trained, 1, 0, "zeros", "pruned")
    for masks, sparsity, target, wrong, still, loss in pool.run(trained, 2, stage, "zeros", "pruned"):
        assert masks == alone[0] and sparsity == target == pytest.approx(1 / 3, abs=0.01)
        assert (wrong, still) == (0, 0)
        assert loss == pytest.approx(alone[-1], rel=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_masks_of_a_file(tmp_path, packed):
    path = tmp_path / "masks.safetensors"
    assert open_masks.write(path, ((name, kept(name)) for name in SPARSE), packed) == 2
    (alone,) = pool.run(trained, 1, 0, "zeros", "pruned")
    for stage in (2, 3):
        for found in pool.run(trained, 2, stage, str(path), "dense"):
            assert found[:4] == (alone[0], alone[1], alone[2], 0)


def dense_at_the_end(rank, world, stage, masks):
    """Six steps, four of them sparse: (density after each, loss)."""
    found = config(stage, world, masks)
    found["mst"]["sparsity"] = {"variation": "sd", "warmup": 0, "ultra": 4}
    engine, *_ = mst_scale.initialize(model=toy(), config=found)
    densities = []
    for step in range(6):
        loss = engine(*toy_batch(step, 0))
        engine.backward(loss)
        engine.step()
        densities.append(round(1 - engine.mst.sparsity, 2))
    return densities, engine.mst.masking.describe(), float(loss.detach())


def test_given_masks_may_go_at_the_end(tmp_path):
    path = tmp_path / "masks.safetensors"
    open_masks.write(path, ((name, kept(name)) for name in SPARSE))
    ((densities, said, loss),) = pool.run(dense_at_the_end, 1, 0, str(path))
    assert densities == [0.67, 0.67, 0.67, 1, 1, 1] and said.endswith("until step 4 of 6")
    for other in pool.run(dense_at_the_end, 2, 3, str(path)):
        assert other == (densities, said, pytest.approx(loss, rel=1e-5))


def with_zeros(rank, world, stage, frozen):
    """Warnings about a matrix that is entirely zero, and the number of its weights that a step moves."""
    made, seen = pruned(), []
    made.get_parameter("up.weight").data.zero_()
    made.get_parameter("up.weight").requires_grad_(not frozen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial_masks.logger, "warning", lambda text, *given: seen.append(text % given))
        engine, *_ = mst_scale.initialize(model=made, config=config(stage, world))
        engine.backward(engine(*toy_batch(0, 0)))
        engine.step()
    i = engine.mst.masks.names.index("up.weight")
    return seen, int(engine.mst.store.weight(i).count_nonzero())


@pytest.mark.parametrize("stage", [0, 3])
def test_a_matrix_of_zeros_is_named(stage):
    for seen, moved in pool.run(with_zeros, 2, stage, False):
        (warning,) = seen
        assert "never trained (up.weight): exclude them" in warning and not moved
    for seen, moved in pool.run(with_zeros, 2, stage, True):
        assert (seen, moved) == ([], 0)


def refused(rank, world, masks):
    engine, *_ = mst_scale.initialize(model=toy(), config=config(0, world, masks))
    engine.backward(engine(*toy_batch(0, 0)))
    try:
        engine.step()
    except ValueError as error:
        return str(error)
    return None


def test_masks_that_keep_everything_are_named(tmp_path):
    path = tmp_path / "masks.safetensors"
    open_masks.write(path, ((name, torch.ones_like(kept(name))) for name in SPARSE))
    assert pool.run(refused, 1, str(path))[0].startswith(f"{path} masks no weight")
    assert "load a pruned model" in pool.run(refused, 1, "zeros")[0]


def test_the_open_format_is_what_it_says(tmp_path):
    """Read with nothing of ours: bool, or `numpy.packbits`."""
    for packed in (False, True):
        path = tmp_path / f"{packed}.safetensors"
        open_masks.write(path, ((name, kept(name)) for name in SPARSE), packed)
        for name, found in load_file(path).items():
            flags = np.unpackbits(found.numpy())[: 37 * 13].reshape(kept(name).shape) if packed else found.numpy()
            assert np.array_equal(flags.astype(bool), kept(name).numpy())
        assert all(torch.equal(mask, kept(name)) for name, mask in open_masks.OpenMasks(path))


def saved(rank, world, folder):
    engine, *_ = mst_scale.initialize(model=pruned(), config=config(2, world))
    engine.backward(engine(*toy_batch(0, 0)))
    engine.step()
    engine.save_checkpoint(folder, tag="t")


def test_mst_masks_writes_those_of_a_checkpoint(tmp_path, capsys):
    pool.run(saved, 2, str(tmp_path / "run"))
    out = tmp_path / "masks.safetensors"
    assert main(["masks", str(tmp_path / "run"), str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "out": str(out), "matrices": 2, "weights": 2 * 37 * 13, "kept": int(sum(kept(name).sum() for name in SPARSE)),
    }  # fmt: skip
    assert all(torch.equal(mask, kept(name)) for name, mask in load_file(out).items())
    assert main(["masks", str(tmp_path / "run"), str(out)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["masks", str(out), str(tmp_path / "packed.safetensors"), "--packed"]) == 0
    assert load_file(tmp_path / "packed.safetensors")["up.weight"].numel() == 61


def refusals(rank, world, folder):
    def said(masks="zeros", made=pruned, **more):
        try:
            engine, *_ = mst_scale.initialize(model=made(), config={**config(1, world, masks), **more})
            engine.backward(engine(*toy_batch(0, 0)))
            engine.step()
        except ValueError as error:
            return str(error)
        return None

    save_file({"upp.weight": kept("up.weight")}, f"{folder}/name.safetensors")
    save_file({"up.weight": kept("down.weight").clone()}, f"{folder}/shape.safetensors")
    (torch.zeros(3)).numpy().tofile(f"{folder}/damaged.safetensors")
    return [
        said(made=toy),
        said(f"{folder}/name.safetensors"),
        said(f"{folder}/shape.safetensors"),
        said(f"{folder}/damaged.safetensors"),
        said(f"{folder}/nowhere.safetensors"),
    ]


def test_wrong_masks_are_refused_on_every_rank(tmp_path):
    for found in pool.run(refusals, 2, str(tmp_path)):
        no_zeros, name, shape, damaged, nowhere = found
        assert "load a pruned model" in no_zeros
        assert "'upp.weight', which is not a parameter of this model: the nearest is 'up.weight'" in name
        assert "has shape (13, 37), but the parameter has (37, 13)" in shape
        assert "is not a safetensors file" in damaged and "there is no mask file" in nowhere


def test_masks_go_with_fixed_alone():
    with pytest.raises(UserError, match="choose method fixed"):
        load({"mst": {"method": "rigl", "masks": "zeros"}})
    with pytest.raises(UserError, match=r"leave mst\.topology\.granularity out"):
        load({"mst": {"method": "fixed", "topology": {"granularity": {"block": 16}}}})
    assert load({"mst": {"method": "fixed"}}).mst.masks == "zeros"
    for moving in ({"topology": {"policy": "rigl"}}, {"sparsity": {"variation": "sv"}}):
        with pytest.raises(UserError, match=r"method fixed keeps masks as they are: leave mst\.topology\.policy out"):
            load({"mst": {"method": "fixed", **moving}})


def fine_tuned(rank, world, folder, stage):
    """A pruned folder of transformers, by Trainer, at ZeRO-3 under zero.Init."""
    from transformers import AutoModelForCausalLM, Trainer

    start = f"{folder}/pruned"
    if rank == 0:
        made = model("llama")
        for name, parameter in made.named_parameters():
            if "layers" in name and parameter.dim() == 2:
                parameter.data *= torch.arange(parameter.numel()).view(parameter.shape) % 2 == 0
        made.save_pretrained(start)
    torch.distributed.barrier()
    with opened():
        its = deepspeed_config(stage)
        its["mst"] = {"method": "fixed", "targets": {"include": ["*layers*"]}}
        args = arguments(f"{folder}/out", its, save_strategy="steps", save_steps=6)
        trainer = Trainer(AutoModelForCausalLM.from_pretrained(start), args, train_dataset=Words())
        trainer.train()
        sparsity, masks = trainer.deepspeed.mst.sparsity, digests(trainer.deepspeed)
        trainer.save_model(f"{folder}/tuned")
    with opened():
        args = arguments(f"{folder}/out", its, save_strategy="no")
        again = Trainer(AutoModelForCausalLM.from_pretrained(start), args, train_dataset=Words())
        again.train(resume_from_checkpoint=f"{folder}/out/checkpoint-6")
        same = digests(again.deepspeed) == masks
    return sparsity, same


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_pruned_model_is_fine_tuned_by_trainer(tmp_path, stage, capsys):
    for sparsity, same in pool.run(fine_tuned, 2, str(tmp_path), stage):
        assert sparsity == 0.5 and same
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("pruned", "tuned"))
    for name, value in after.items():
        if "layers" in name and value.dim() == 2:
            assert torch.equal(value == 0, before[name] == 0) and not torch.equal(value, before[name])
    assert main(["masks", str(tmp_path / "tuned"), str(tmp_path / "m.safetensors"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["matrices"] == 15, "and the padding's row"
