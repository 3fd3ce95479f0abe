"""The list of parameters against real models, and what ranks that share a model hold, by hand."""

from dataclasses import replace

import pytest
import torch

from mst_scale.config import load
from mst_scale.engine.targets import choose_targets
from mst_scale.models.bert import BERT as BERT_MODEL
from mst_scale.models.gpt import GPT
from mst_scale.plan.setting import held, parameters, setting_of, sparse_parameters
from tests.support.plan_configs import MODEL, setting, total

SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 8, "seq_length": 4, "vocab_size": 10}
BERT = {"arch": "bert"}
SHAPES = [
    {},
    BERT,
    {**BERT, "bias": True, "tied_head": False},
    {**BERT, "bias": True},
    {"bias": True},
    {"tied_head": False},
    {"d_ff": 20, "bias": True, "tied_head": False},
]


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize(
    "targets", [{}, {"lm_head": False}, {"include": ["blocks.*.mlp.*"], "exclude": ["blocks.1.*"], "lm_head": False}]
)
def test_names_shapes_order_and_targets_are_the_models(model, targets):
    experiment = load({"model": {**SMALL, **model}, "mst": {"targets": targets}})
    with torch.device("meta"):
        real = {"gpt": GPT, "bert": BERT_MODEL}[experiment.model.arch](experiment.model)
    assert [(p.name, p.shape) for p in parameters(experiment.model)] == [
        (name, tuple(p.shape)) for name, p in real.named_parameters()
    ]
    chosen = [p.name for p in sparse_parameters(experiment.model, experiment.mst.targets)]
    assert chosen == list(choose_targets(real, experiment.mst.targets))


def test_a_tensor_group_holds_the_model_once_and_its_vectors_and_ends_each():
    whole, d = total(parameters(MODEL)), 64
    s = replace(setting(), ranks=4, tensor=4)
    matrices, biases = 5 * 12 * d * d, 5 * (3 * d + 4 * d)  # cut: qkv's and up's biases too
    left = whole - matrices - biases
    assert total(held(MODEL, s)) == left + (matrices + biases) // 4
    shapes = {p.name: p.shape for p in held(MODEL, s)}
    assert shapes["blocks.0.attention.qkv.weight"] == (48, 64) and shapes["blocks.0.attention.qkv.bias"] == (48,)
    assert shapes["blocks.4.mlp.down.weight"] == (64, 64) and shapes["blocks.4.mlp.down.bias"] == (64,)
    assert shapes["wte.weight"] == (MODEL.padded_vocab, 64)


def test_stages_hold_every_layer_once_and_a_tied_head_twice():
    s = replace(setting(stage=1), ranks=2, pipeline=2)
    first, last = ({p.name for p in held(MODEL, s, stage)} for stage in (0, 1))
    assert first & last == {"wte.weight"} and first | last == {p.name for p in parameters(MODEL)}
    assert "blocks.2.ln_1.weight" in first and "blocks.3.ln_1.weight" in last, "5 layers: 3 and 2"
    assert "wpe.weight" in first and "ln_f.weight" in last
    untied = replace(MODEL, tied_head=False)
    ends = [held(untied, s, stage) for stage in (0, 1)]
    assert total(ends[0]) + total(ends[1]) == total(parameters(untied))


def test_keys_of_stage_3_are_read_with_and_without_their_prefix():
    short = {"prefetch_bucket_size": 7, "max_live_parameters": 8, "max_reuse_distance": 9,
             "param_persistence_threshold": 10}  # fmt: skip
    batch = {"train_micro_batch_size_per_gpu": 1, "mst": {"method": "dense"}}

    def read(zero):
        return setting_of(load({**batch, "zero_optimization": {"stage": 3, **zero}}), 2)

    wanted = read({f"stage3_{key}": value for key, value in short.items()})
    assert read(short) == wanted != read({})
