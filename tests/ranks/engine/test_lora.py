"""LoRA on a pruned base: adapters train and are never sparse, the frozen base is masked and not trained."""

import copy

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, PromptTuningConfig, get_peft_model

import mst_scale
from mst_scale.checkpoints import open_masks
from mst_scale.cli import main
from mst_scale.config import TargetsConfig
from mst_scale.engine.adapters import adapters_of, base_name
from mst_scale.engine.targets import choose_targets
from mst_scale.errors import UserError
from mst_scale.hugging_face.export import export
from mst_scale.zero_shards import grad_norm, is_compact
from tests.ranks.integrations.test_trainer import arguments
from tests.support import pool
from tests.support.integrated import Words, digests, opened
from tests.support.integrated import deepspeed_config as trainer_config
from tests.support.integrated import model as transformer
from tests.support.toy_engine import STAGES, full
from tests.support.toys import deepspeed_config

pytestmark = pytest.mark.full

PRECISIONS = ["fp32", "bf16"]
LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def kept(parameter):
    """A third is pruned, by no rule of ours."""
    return torch.arange(parameter.numel()).view(parameter.shape) % 3 != 1


def is_pruned(name, parameter):
    return "layers" in name and parameter.dim() == 2


def pruned(kind="llama"):
    made = transformer(kind)
    for name, parameter in made.named_parameters():
        if is_pruned(name, parameter):
            parameter.data *= kept(parameter)
    return made


def wrapped(config=LORA):
    return get_peft_model(pruned(), copy.deepcopy(config))


def base_of(model):
    """Whole weights of the base, by their plain names."""
    adapters = adapters_of(model)
    return {base_name(n): p.detach().clone() for n, p in model.named_parameters() if id(p) not in adapters}


def config(stage, world, precision="fp32", **mst):
    found = deepspeed_config(stage, world, precision, training={"steps": 8})
    found["mst"] = {"method": "fixed", "targets": {"include": ["*layers*"]}, **mst}
    return found


def step(engine, rank, number):
    generator = torch.Generator().manual_seed(100 * number + rank)
    tokens = torch.randint(64, (8, 16), generator=generator)
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


# --- training ---


def trained(rank, world, stage, precision, folder):
    model, wrong = wrapped(), []
    base = base_of(model)
    engine, *_ = mst_scale.initialize(model=model, config=config(stage, world, precision))
    mst = engine.mst
    for number in range(4):
        step(engine, rank, number)
        if not grad_norm(engine) > 0:
            wrong.append(f"step {number + 1}: the adapters have no gradient")
    dtype = next(engine.module.parameters()).dtype
    for i, mask in enumerate(mst.masks):
        expected = kept(torch.empty(mask.shape)).flatten()
        if not torch.equal(full(engine, mask.flags(), i, world).bool(), expected):
            wrong.append(f"{mask.name}: another mask")
        weight = full(engine, mst.store.weight(i), i, world)
        if not torch.equal(weight, base[base_name(mask.name)].to(dtype).float().flatten()):
            wrong.append(f"{mask.name}: the base has moved")
        if "lora_" in mask.name or not mst.store.frozen(i):
            wrong.append(f"{mask.name} is masked")
    engine.save_checkpoint(f"{folder}/whole", tag="t")
    engine.save_checkpoint(f"{folder}/adapters", tag="t", exclude_frozen_parameters=True)
    digests, sparsity = list(mst.state.digests), mst.sparsity
    after = [step(engine, rank, number) for number in range(4, 6)]
    for name in ("whole", "adapters"):
        made = wrapped() if name == "adapters" else get_peft_model(transformer("llama"), copy.deepcopy(LORA))
        again, *_ = mst_scale.initialize(model=made, config=config(stage, world, precision, masks="zeros"))
        path, _ = again.load_checkpoint(f"{folder}/{name}", load_module_strict=name == "whole")
        if path is None or again.mst.state.digests != digests or again.mst.sparsity != sparsity:
            wrong.append(f"{name}: other masks after a resume")
        if [step(again, rank, number) for number in range(4, 6)] != after:
            wrong.append(f"{name}: the resumed run goes elsewhere")
    return wrong, len(mst.masks), sparsity, digests


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_frozen_base_is_masked_and_its_adapters_train(stage, precision, tmp_path):
    digests = []
    for wrong, matrices, sparsity, found in pool.run(trained, 2, stage, precision, str(tmp_path)):
        assert wrong == [] and matrices == 14 and sparsity == pytest.approx(1 / 3, abs=0.01)
        digests.append(found)
    assert digests[0] == digests[1]


def another_base(rank, world, stage, folder):
    """Adapters alone in the checkpoint, and a base that was never pruned: its inactive weights are 0 all the same."""
    engine, *_ = mst_scale.initialize(model=wrapped(), config=config(stage, world))
    step(engine, rank, 0)
    engine.save_checkpoint(folder, tag="t", exclude_frozen_parameters=True)
    dense = get_peft_model(transformer("llama"), copy.deepcopy(LORA))
    again, *_ = mst_scale.initialize(model=dense, config=config(stage, world))
    again.load_checkpoint(folder, load_module_strict=False)
    stray = sum(mask.count_inactive(again.mst.store.read(i)) for i, mask in enumerate(again.mst.masks))
    return again.mst.sparsity, stray


@pytest.mark.parametrize("stage", STAGES)
def test_the_masks_of_a_checkpoint_are_applied_to_the_base_that_the_model_came_with(stage, tmp_path):
    for sparsity, stray in pool.run(another_base, 2, stage, str(tmp_path)):
        assert sparsity == pytest.approx(1 / 3, abs=0.01) and stray == 0


def computed(rank, world, backend):
    """Losses with the layers of the frozen base multiplied by these kernels, the forward's and the gradient's."""
    engine, *_ = mst_scale.initialize(model=wrapped(), config=config(0, world, compute={"backend": backend}))
    return [step(engine, rank, number) for number in range(4)]


def test_sparse_kernels_multiply_with_a_frozen_base():
    (dense,), (sparse,) = (pool.run(computed, 1, backend) for backend in ("dense", "cpu"))
    assert sparse == pytest.approx(dense, rel=1e-5)


def test_a_frozen_base_keeps_dense_storage():
    (compact,), (dense,) = (pool.run(stored, 1, kind) for kind in ("auto", "off"))
    assert compact == dense and compact[-1] is False


def stored(rank, world, kind):
    engine, *_ = mst_scale.initialize(model=wrapped(), config=config(1, world, compute={"compact": kind}))
    return [*(step(engine, rank, number) for number in range(3)), is_compact(engine.module)]


def by_a_file(rank, world, path):
    dense = get_peft_model(transformer("llama"), copy.deepcopy(LORA))
    engine, *_ = mst_scale.initialize(model=dense, config=config(2, world, masks=path))
    step(engine, rank, 0)
    mst, wrong = engine.mst, []
    for i, mask in enumerate(mst.masks):
        flags = full(engine, mask.flags(), i, world).bool()
        read = mst.store.parameters[i].detach().flatten()
        if not torch.equal(flags, kept(torch.empty(mask.shape)).flatten()) or read[~flags].count_nonzero():
            wrong.append(mask.name)
    return wrong, len(mst.masks)


def test_a_file_of_masks_has_the_names_of_the_model_without_adapters(tmp_path):
    path = tmp_path / "masks.safetensors"
    open_masks.write(path, ((n, kept(p)) for n, p in transformer("llama").named_parameters() if is_pruned(n, p)))
    assert pool.run(by_a_file, 2, str(path)) == [([], 14)] * 2


def saved_with_adapters(rank, world, folder):
    engine, *_ = mst_scale.initialize(model=wrapped(), config=config(1, world))
    engine.save_checkpoint(f"{folder}/out")
    engine.module.save_pretrained(f"{folder}/out")


def test_masks_of_a_checkpoint_with_adapters_fit_the_merged_model(tmp_path):
    pool.run(saved_with_adapters, 1, str(tmp_path))
    assert main(["masks", str(tmp_path / "out"), str(tmp_path / "masks.safetensors")]) == 0
    found = dict(open_masks.OpenMasks(tmp_path / "masks.safetensors"))
    pairs = {name: p for name, p in pruned().named_parameters() if is_pruned(name, p)}
    assert found.keys() == pairs.keys() and all(torch.equal(found[name], p != 0) for name, p in pairs.items())


def test_adapters_are_not_exported_without_their_base(tmp_path):
    pool.run(saved_with_adapters, 1, str(tmp_path))
    with pytest.raises(UserError, match=r"merge_adapters, and save the merged model with save_pretrained"):
        export(tmp_path / "out", tmp_path / "exported")


def by_trainer(rank, world, folder):
    """(sparsity, whether the base has moved, whether a resumed run has the same masks and adapters)."""
    from transformers import Trainer

    def made():
        torch.manual_seed(4)
        model = wrapped()
        config = trainer_config(2)
        config["mst"] = {"method": "fixed", "targets": {"include": ["*layers*"]}}
        args = arguments(f"{folder}/out", config, save_strategy="steps", save_steps=6)
        return model, Trainer(model, args, train_dataset=Words())

    with opened():
        model, trainer = made()
        base = base_of(model)
        trainer.train()
        sparsity, masks = trainer.deepspeed.mst.sparsity, digests(trainer.deepspeed)
        tuned = {name: p.detach().clone() for name, p in model.named_parameters()}
        still = all(torch.equal(value, base[name]) for name, value in base_of(model).items())
        moved = any(p.requires_grad and "lora_B" in n and bool(p.any()) for n, p in model.named_parameters())
    with opened():
        model, again = made()
        again.train(resume_from_checkpoint=f"{folder}/out/checkpoint-6")
        same = digests(again.deepspeed) == masks
        same = same and all(torch.equal(p, tuned[name]) for name, p in model.named_parameters())
    return sparsity, still, moved, same


def test_trainer_trains_adapters_and_resumes(tmp_path):
    for sparsity, *as_it_should in pool.run(by_trainer, 2, str(tmp_path)):
        assert sparsity == pytest.approx(1 / 3, abs=0.01) and as_it_should == [True, True, True]


# --- what is sparse ---


def other_methods(rank, world):
    found = deepspeed_config(1, world, training={"steps": 8})
    found["mst"] = {"method": "mst", "targets": {"include": ["*layers*"]}}
    try:
        mst_scale.initialize(model=wrapped(), config=found)
        refused = None
    except UserError as error:
        refused = str(error)
    model = wrapped()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    engine, *_ = mst_scale.initialize(model=model, config=found)
    return refused, engine.mst.masks.names


def test_methods_that_prune_take_a_trained_base_and_never_adapters():
    for refused, names in pool.run(other_methods, 2):
        assert refused is not None and "frozen" in refused and "method fixed" in refused
        assert len(names) == 14 and all(name.endswith("base_layer.weight") for name in names)


@pytest.mark.parametrize(
    "peft",
    [
        LORA,
        LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"], use_dora=True),
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        LoHaConfig(r=4, target_modules=["q_proj", "v_proj"]),
    ],
    ids=["lora", "dora and modules_to_save", "ia3", "loha"],
)  # fmt: skip
def test_adapters_of_any_kind_are_found(peft):
    plain, model = pruned(), wrapped(peft)
    base = base_of(model)
    assert base.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(value, base[name]) for name, value in plain.named_parameters())
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    assert trained and trained <= adapters_of(model)
    chosen = choose_targets(model, TargetsConfig(include=["*layers*"]), frozen=True)
    assert {base_name(name) for name in chosen} == {n for n, p in plain.named_parameters() if is_pruned(n, p)}


def test_adapters_are_known_by_their_names_without_peft():
    class Adapted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4, 4))
            self.lora_A = torch.nn.Parameter(torch.ones(2, 4))
            self.lora_B = torch.nn.Parameter(torch.zeros(4, 2))

    assert list(choose_targets(torch.nn.ModuleList([Adapted()]), TargetsConfig())) == ["0.weight"]


# --- merging ---


def adapted(config=LORA):
    """Adapters that change every weight."""
    model = wrapped(config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("given", [None, "mapping", "file"])
def test_merged_weights_keep_the_zeros_of_the_base(given, tmp_path, caplog):
    plain, model = pruned(), adapted()
    dense = copy.deepcopy(model).merge_and_unload()
    masks = {name: kept(p) for name, p in plain.named_parameters() if is_pruned(name, p)}
    if given == "file":
        open_masks.write(tmp_path / "masks.safetensors", masks.items(), packed=True)
    of = {None: None, "mapping": masks, "file": tmp_path / "masks.safetensors"}[given]
    merged = mst_scale.merge_adapters(model, of)
    assert type(merged) is type(plain)
    for name, weight in merged.named_parameters():
        before, whole = plain.get_parameter(name), dense.get_parameter(name)
        if is_pruned(name, weight):
            assert torch.equal(weight == 0, before == 0) and not torch.equal(weight, before)
            assert torch.equal(weight, whole * kept(weight)) and (whole == 0).sum() == 0
        elif name != "model.embed_tokens.weight":  # the padding's row is 0
            assert torch.equal(weight, whole)
    matrices = [*masks, "model.embed_tokens.weight"] if given is None else masks  # one row of the embedding is 0
    pairs = [(dense.get_parameter(name), merged.get_parameter(name)) for name in matrices]
    lost = sum(float((a - b).double().square().sum()) for a, b in pairs)
    lost /= sum(float(a.double().square().sum()) for a, _ in pairs)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and f"{lost**0.5:.2g} of the matrices' norm" in said[0] and "lost" in said[0]


REPLACING = {
    "head": LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "tokens": LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[0, 2]),
}


@pytest.mark.parametrize(
    ("kind", "name", "zeros"),
    [
        ("head", "lm_head.weight", slice(None)),  # a head that starts at zero
        ("head", "lm_head.weight", slice(3)),
        ("tokens", "model.embed_tokens.weight", slice(3)),  # of which 0 and 2 are trained
    ],
)
def test_what_peft_trains_in_place_of_the_base_is_merged_as_it_was_trained(kind, name, zeros):
    plain = pruned()
    plain.get_parameter(name).data[zeros] = 0
    model = get_peft_model(copy.deepcopy(plain), copy.deepcopy(REPLACING[kind]))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    expected = copy.deepcopy(model).merge_and_unload().get_parameter(name)
    merged = mst_scale.merge_adapters(model)
    assert torch.equal(merged.get_parameter(name), expected)
    changed = (expected != plain.get_parameter(name)).any(-1).nonzero().flatten().tolist()
    assert changed == ([0, 2] if kind == "tokens" else [*range(len(expected))])
    q_proj = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(merged.get_parameter(q_proj) == 0, plain.get_parameter(q_proj) == 0)


def test_adapters_of_a_matrix_of_zeros_are_merged_whole():
    name = "model.layers.0.self_attn.q_proj.weight"
    plain = pruned()
    plain.get_parameter(name).data.zero_()
    model = get_peft_model(plain, copy.deepcopy(REPLACING["head"]))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    expected = copy.deepcopy(model).merge_and_unload().get_parameter(name)
    assert expected.all() and torch.equal(mst_scale.merge_adapters(model).get_parameter(name), expected)


def test_masks_of_embeddings_with_trained_tokens_are_known_by_their_plain_names():
    name = "model.embed_tokens.weight"
    plain = pruned().get_parameter(name)  # the padding's row is 0
    mask = kept(plain)
    model = get_peft_model(pruned(), copy.deepcopy(REPLACING["tokens"]))
    assert torch.equal(mst_scale.merge_adapters(model, {name: mask}).get_parameter(name) == 0, ~mask | (plain == 0))


def test_what_cannot_be_merged_is_named():
    with pytest.raises(UserError, match=r"the mask of 'a' is not a tensor but of type list"):
        mst_scale.merge_adapters(wrapped(), {"a": [True]})
    with pytest.raises(UserError, match="peft"):
        mst_scale.merge_adapters(pruned())
    with pytest.raises(UserError, match="do not change weights"):
        mst_scale.merge_adapters(get_peft_model(pruned(), PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=2)))
    model = adapted()
    model.merge_adapter()
    with pytest.raises(UserError, match="have already been merged"):
        mst_scale.merge_adapters(model)
    with pytest.raises(UserError, match=r"the nearest is 'model.layers.0.mlp.up_proj.weight'"):
        mst_scale.merge_adapters(adapted(), {"model.layers.0.mlp.up_projj.weight": torch.ones(2, 2)})


def cut(rank, world):
    engine, *_ = mst_scale.initialize(model=wrapped(), config=config(3, world))
    try:
        mst_scale.merge_adapters(engine.module)
    except UserError as error:
        return str(error)
    return None


def test_weights_that_zero3_has_cut_are_not_merged():
    for message in pool.run(cut, 2):
        assert message is not None and "ZeRO-3" in message and "save_pretrained" in message
