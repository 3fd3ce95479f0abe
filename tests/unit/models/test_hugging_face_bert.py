import dataclasses

import pytest
import torch

from mst_scale.config import ModelConfig
from mst_scale.errors import UserError
from mst_scale.hugging_face.names import entries, from_hugging_face, hugging_face_config
from mst_scale.models import BERT
from tests.support.twins import MASKED, randomised, x

SMALL, theirs = MASKED.small, MASKED.theirs


@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_loss_equal_hugging_faces(tied: bool):
    config = dataclasses.replace(SMALL, tied_head=tied)
    reference = randomised(theirs(config))
    state = reference.state_dict()
    model = BERT(config).eval()
    model.load_state_dict(from_hugging_face(state, config))
    types = torch.arange(32).ge(20).long().expand(2, 32)
    labels = torch.where(torch.arange(32) % 5 == 0, x().flip(1), -1)
    with torch.no_grad():
        want = reference(x(), token_type_ids=types, labels=labels.masked_fill(labels < 0, -100))
        got = model(x(), types=types)[..., :101]
        first_text_only, without = reference(x()).logits, model(x())[..., :101]
    assert want.logits.abs().max() > 1
    torch.testing.assert_close(got, want.logits, rtol=0, atol=1e-5)  # the requirement; rounding is ~1e-6 here
    torch.testing.assert_close(without, first_text_only, rtol=0, atol=1e-5)
    narrow = dataclasses.replace(config, vocab_multiple=1)  # no padding rows: the same softmax
    model = BERT(narrow).eval()
    model.load_state_dict(from_hugging_face(state, narrow))
    torch.testing.assert_close(model(x(), labels, types), want.loss, rtol=1e-6, atol=1e-6)


def test_every_parameter_has_an_entry():
    for tied in (True, False):
        config = dataclasses.replace(SMALL, tied_head=tied)
        ours = {name for name, _ in BERT(config).named_parameters()}
        assert {e.ours for e in entries(config)} == ours
        second = (
            ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias"] if tied else ["cls.predictions.bias"]
        )
        assert {e.theirs for e in entries(config)} == set(theirs(config).state_dict()).difference(second)


def test_the_published_models_config():
    """What transformers takes for BERT-base by default is what we say of ours."""
    from transformers import BertConfig

    ours = hugging_face_config(ModelConfig(arch="bert", seq_length=512, vocab_size=30522, bias=True, dropout=0.1))
    published = BertConfig().to_dict() | {"architectures": ["BertForMaskedLM"]}
    assert {name: published[name] for name in ours} == ours


def test_names_of_the_published_checkpoint_are_understood():
    """TensorFlow's names of norms, the pooler, the next-sentence head, a buffer of positions."""
    state = randomised(theirs(SMALL)).state_dict()
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in state.items()
    }
    old |= {"bert.pooler.dense.weight": torch.ones(64, 64), "cls.seq_relationship.bias": torch.ones(2)}
    old |= {"bert.embeddings.position_ids": torch.arange(32)[None]}
    a, b = from_hugging_face(old, SMALL), from_hugging_face(state, SMALL)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layer": 4}, r"bert\.encoder\.layer\.3\.\S+ is missing"),
        ({"n_layer": 2}, r"bert\.encoder\.layer\.2\.\S+ does not exist in a BERT with 2 layers"),
        ({"bias": False}, r"LayerNorm\.bias is not zero: set model\.bias = true"),
        ({"vocab_size": 99}, r"the vocabulary has 101 rows: set model\.vocab_size = 101"),
    ],
)
def test_a_mismatch_is_named(changes: dict, message: str):
    state = randomised(theirs(SMALL)).state_dict()
    with pytest.raises(UserError, match=message):
        from_hugging_face(state, dataclasses.replace(SMALL, **changes))
