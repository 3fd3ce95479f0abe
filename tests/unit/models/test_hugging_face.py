import dataclasses

import pytest
import torch

from mst_scale.config import ModelConfig
from mst_scale.errors import UserError
from mst_scale.hugging_face.names import entries, from_hugging_face, hugging_face_config
from mst_scale.models import GPT
from tests.support.twins import GPT2, randomised, x

SMALL, theirs = GPT2.small, GPT2.theirs


@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_loss_equal_hugging_faces(tied: bool):
    config = dataclasses.replace(SMALL, tied_head=tied)
    reference = randomised(theirs(config))
    model = GPT(config).eval()
    model.load_state_dict(from_hugging_face(reference.state_dict(), config))
    with torch.no_grad():
        want, got = reference(x()).logits, model(x())[..., :101]
    assert want.abs().max() > 1
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)  # the requirement; float32 rounding is ~1e-6 here


def test_every_parameter_has_an_entry():
    for tied in (True, False):
        config = dataclasses.replace(SMALL, tied_head=tied)
        ours = [name for name, _ in GPT(config).named_parameters()]
        assert sorted(e.ours for e in entries(config)) == sorted(ours)
        names = set(theirs(config).state_dict()) - ({"lm_head.weight"} if tied else set())
        assert {e.theirs for e in entries(config)} == names


def test_the_published_models_config():
    """What transformers takes for GPT-2 by default is what we say of ours."""
    from transformers import GPT2Config

    ours = hugging_face_config(ModelConfig(bias=True, dropout=0.1), end_of_text=50256)
    published = GPT2Config().to_dict() | {"n_inner": 4 * 768, "architectures": ["GPT2LMHeadModel"]}
    assert {name: published[name] for name in ours} == ours


def test_names_of_the_hub_are_understood():
    """No prefix, no head, and the causal mask stored as a buffer."""
    state = randomised(theirs(SMALL)).state_dict()
    hub = {name.removeprefix("transformer."): tensor for name, tensor in state.items() if name != "lm_head.weight"}
    hub |= {"h.0.attn.bias": torch.ones(1, 1, 32, 32), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    a, b = from_hugging_face(hub, SMALL), from_hugging_face(state, SMALL)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layer": 4}, r"transformer\.h\.3\.ln_1\.weight is missing"),
        ({"n_layer": 2}, r"transformer\.h\.2\.\S+ does not exist in a GPT-2 with 2 layers"),
        ({"bias": False}, r"ln_1\.bias is not zero: set model\.bias = true"),
        ({"vocab_size": 99}, r"the vocabulary has 101 rows: set model\.vocab_size = 101"),
    ],
)
def test_a_mismatch_is_named(changes: dict, message: str):
    state = randomised(theirs(SMALL)).state_dict()
    with pytest.raises(UserError, match=message):
        from_hugging_face(state, dataclasses.replace(SMALL, **changes))
