"""The table of parameters against real models."""

import pytest
import torch

from mst_scale.config import load
from mst_scale.engine.targets import choose_targets
from mst_scale.models.bert import BERT as BERT_MODEL
from mst_scale.models.gpt import GPT
from mst_scale.plan.parameters import parameters, sparse_parameters

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
