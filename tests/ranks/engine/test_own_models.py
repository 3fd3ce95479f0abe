"""Any nn.Module trains sparsely: parameters are chosen by globs on their names."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import mst_scale
from mst_scale.config import ModelConfig, TargetsConfig
from mst_scale.engine.targets import choose_targets
from mst_scale.errors import UserError
from mst_scale.models import GPT
from tests.support import pool
from tests.support.toys import deepspeed_config, toy, toy_batch


def hugging_face(**changes):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=32,
        n_positions=16,
        vocab_size=64,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        **changes,
    )
    return GPT2LMHeadModel(config)  # fmt: skip


def train_hugging_face(rank, world):
    config = deepspeed_config(2, world)
    config["training"] = {"steps": 12}
    config["mst"] = {
        "method": "mst",
        "sparsity": {"max": 0.9},
        "topology": {"interval": 2},
        "targets": {"include": ["transformer.h.*"], "lm_head": False},
    }
    engine, *_ = mst_scale.initialize(model=hugging_face(), config=config)
    losses, sparsities = [], []
    tokens = torch.arange(8 * 16).view(8, 16) % 7
    for _ in range(12):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        sparsities.append(engine.mst.sparsity)
    return engine.mst.masks.names, losses, sparsities


def token_limits(rank, world):
    """Where the sparse phase ends, in loops whose model the config does not describe."""

    def ends(own, **more):
        config = deepspeed_config(2, world) | {"training": {"steps": 400}, **more}
        config["mst"] = {"method": "mst", "sparsity": {"max": 0.5, "sparse_tokens": 0.5}, "topology": {"interval": 2}}
        engine, *_ = mst_scale.initialize(model=own, config=config)
        sparsity = engine.mst.experiment.mst.sparsity
        assert sparsity.sparse_tokens is None, "durations have taken its place"
        return engine.mst.schedule.sparse_until, engine.train_batch_size()

    size = sum(p.numel() for p in hugging_face().parameters())
    shape = ModelConfig(n_layer=1, n_head=2, n_embd=16, seq_length=16, vocab_size=64)
    stated = ends(hugging_face(), model={"seq_length": 8})
    untied = hugging_face(tie_word_embeddings=False)
    assert sum(p.numel() for p in untied.parameters()) > size
    assert ends(untied, model={"seq_length": 8}) == stated, "an untied head does not count"
    return size, stated, (ends(GPT(shape)), shape.weights), ends(hugging_face())


def test_a_sparse_phase_in_tokens_counts_the_parameters_and_sequences_of_the_users_model():
    for size, (stated, batch), ((ours, _), weights), (unknown, _) in pool.run(token_limits, 2):
        assert stated == pytest.approx(0.5 * size / (batch * 8), abs=0.6), "the config's model.seq_length"
        assert ours == pytest.approx(0.5 * weights / (batch * 16), abs=0.6), "GPT of mst_scale knows both"
        assert unknown == round(400 * 12 / 14), "no limit: the positions of the model are a largest length"


def test_a_hugging_face_gpt2_trains_sparsely():
    for names, losses, sparsities in pool.run(train_hugging_face, 2):
        assert names == [
            f"transformer.h.{layer}.{part}.weight"
            for layer in range(2)
            for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
        ]
        assert max(sparsities) == pytest.approx(0.9, abs=1e-3) and sparsities[-1] == 0.0
        assert losses[-1] < losses[0]


def train_toy(rank, world):
    config = deepspeed_config(3, world)
    config["training"] = {"steps": 10}
    config["mst"] = {"method": "static", "sparsity": {"max": 0.5}, "targets": {"include": ["up.*", "down.*"]}}
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    for step in range(3):
        loss = engine(*toy_batch(step, rank))
        engine.backward(loss)
        engine.step()
    return engine.mst.densities()


def test_a_toy_module_trains_sparsely_by_globs():
    for densities in pool.run(train_toy, 2):
        assert set(densities) == {"up.weight", "down.weight"}
        assert sum(densities.values()) / 2 == pytest.approx(0.5, abs=0.01)


def chosen(model: nn.Module, **targets) -> list[str]:
    return list(choose_targets(model, TargetsConfig(**targets)))


def called_as_deepspeed_is(rank, world, folder):
    """Every way of `deepspeed.initialize` to name a config; what is sparse, and the kind of loader."""
    config = deepspeed_config(1, world)
    config["mst"] = {"method": "static", "sparsity": {"max": 0.5}, "targets": {"include": ["up.*", "down.*"]}}
    path = Path(folder, f"config-{rank}.json")
    path.write_text(json.dumps(config))
    args, data = Namespace(deepspeed_config=str(path), local_rank=rank), TensorDataset(torch.zeros(64, 1))
    plain = Namespace(local_rank=rank)
    model = toy()
    calls = [
        lambda: mst_scale.initialize(args=args, model=model, model_parameters=model.parameters()),
        lambda: mst_scale.initialize(plain, model, None, model.parameters(), data, config=path),
        lambda: mst_scale.initialize(model=model, training_data=data, config_params=config),
        lambda: mst_scale.initialize(
            None, model, None, model.parameters(), data, None, 29500, None, None, None, config
        ),
    ]
    found = []
    for call in calls:
        engine, _, loader, scheduler = call()
        assert scheduler is None
        found.append((engine.mst.sparsity, loader is not None))
    assert args.deepspeed_config == str(path), "the caller's own"
    for wrong in (lambda: mst_scale.initialize(args, model, config=config), lambda: mst_scale.initialize(model=model)):
        with pytest.raises(UserError, match="needs one config"):
            wrong()
    with pytest.raises(TypeError, match="training_data"):
        mst_scale.initialize(None, model, None, model.parameters(), data, training_data=data, config=config)
    return found


def test_it_takes_deepspeeds_arguments_in_their_order(tmp_path):
    (found,) = pool.run(called_as_deepspeed_is, 1, str(tmp_path))
    # to within one weight per matrix
    assert found == [(pytest.approx(0.5, abs=2 / 481), loader) for loader in (False, True, True, True)]


def test_without_an_optimizer_there_is_one_line():
    config = {key: value for key, value in deepspeed_config(0, 1).items() if key != "optimizer"}
    with pytest.raises(UserError, match=r'add "optimizer" to the config'):
        mst_scale.initialize(model=hugging_face(), config=config)


def test_norms_biases_and_embeddings_are_never_targets():
    assert chosen(toy()) == ["up.weight", "down.weight", "out.weight"]


def test_nor_are_those_that_no_layer_has():
    """Biases of more than one dimension, and bare parameters, are told by their names."""
    model = nn.ModuleDict({"experts": nn.Module(), "embeddings": nn.Module(), "mlp": nn.Linear(8, 4)})
    for name in ("gate_up", "gate_up_bias", "bias", "relative_position_bias_table", "norm_scale"):
        model["experts"].register_parameter(name, nn.Parameter(torch.ones(4, 8)))
    model["embeddings"].register_parameter("position_embeddings", nn.Parameter(torch.ones(1, 9, 8)))
    assert chosen(model) == ["experts.gate_up", "mlp.weight"]


def test_a_tied_head_is_one_target_when_asked_for():
    model = hugging_face()
    assert model.lm_head.weight is model.transformer.wte.weight
    with_head = chosen(model)
    assert with_head.count("transformer.wte.weight") == 1 and "lm_head.weight" not in with_head
    assert "transformer.wpe.weight" not in with_head
    assert "transformer.wte.weight" not in chosen(model, lm_head=False)


def test_our_gpt_has_its_tied_head_among_the_targets():
    from mst_scale.config import ModelConfig
    from mst_scale.models.gpt import GPT

    config = ModelConfig(n_layer=1, n_head=2, n_embd=8, seq_length=8, vocab_size=10, vocab_multiple=1)
    names = chosen(GPT(config))
    assert names[0] == "wte.weight" and "wpe.weight" not in names and len(names) == 5


def test_exclude_wins_and_what_matches_nothing_is_an_error():
    assert chosen(toy(), exclude=["out.*"]) == ["up.weight", "down.weight"]
    with pytest.raises(
        ValueError, match=r"'uP\.\*' matches no parameter that can be sparse; the nearest is 'up.weight'"
    ):
        chosen(toy(), include=["uP.*"])
    with pytest.raises(UserError, match="every parameter that could be sparse is excluded"):
        chosen(toy(), exclude=["*"])


def test_embeddings_norms_and_vectors_of_any_shape_never_become_targets():
    model = nn.Module()
    model.table, model.bag = nn.Embedding(5, 4), nn.EmbeddingBag(5, 4)
    model.norm = nn.GroupNorm(2, 4)
    model.score, model.gate = nn.Linear(4, 1), nn.Parameter(torch.ones(4, 1, 1))  # the score's weight is (1, 4)
    model.up, model.conv, model.depthwise = nn.Linear(4, 6), nn.Conv1d(4, 6, 3), nn.Conv1d(4, 4, 3, groups=4)
    model.point = nn.Conv2d(1, 4, 1)  # (4, 1, 1, 1)
    chosen = choose_targets(model, TargetsConfig())
    assert list(chosen) == ["up.weight", "conv.weight", "depthwise.weight"]
