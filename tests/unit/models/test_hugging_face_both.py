"""GPT and BERT keep their results on the way to Hugging Face, through `mst export`, and back."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mst_scale.config import ModelConfig
from mst_scale.errors import UserError
from mst_scale.hugging_face.export import export
from tests.support.saved_model import save
from tests.support.twins import GPT2, MASKED, Twins, randomised, x

both = pytest.mark.parametrize("twins", [pytest.param(GPT2, id="gpt2"), pytest.param(MASKED, id="bert")])


def exported(model: torch.nn.Module, config: ModelConfig, folder: Path) -> Path:
    export(save(model, config, folder), folder / "theirs")
    return folder / "theirs"


@both
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_export_computes_the_same(twins: Twins, tied: bool, bias: bool, tmp_path: Path):
    config = dataclasses.replace(twins.small, tied_head=tied, bias=bias)
    model = randomised(twins.ours(config)).eval()
    reference = type(twins.theirs(config)).from_pretrained(exported(model, config, tmp_path)).eval()
    with torch.no_grad():
        torch.testing.assert_close(reference(x()).logits, model(x())[..., :101], rtol=0, atol=1e-5)


@both
def test_export_and_import_are_inverse_on_the_real_rows(twins: Twins, tmp_path: Path):
    config = dataclasses.replace(twins.small, bias=False)
    model = randomised(twins.ours(config))
    state = model.state_dict()
    back = twins.names.from_hugging_face(load_file(exported(model, config, tmp_path) / "model.safetensors"), config)
    assert sorted(back) == sorted(state)
    for name, tensor in state.items():
        rows = config.vocab_size if name == "wte.weight" else None
        assert torch.equal(back[name][:rows], tensor[:rows]), name


@both
def test_padding_rows_get_at_most_the_average_probability(twins: Twins):
    model = twins.ours(twins.small).eval()
    state = randomised(twins.theirs(twins.small)).state_dict()
    model.load_state_dict(twins.names.from_hugging_face(state, twins.small))
    probability = model(x()).double().softmax(-1)
    real, padding = probability[..., :101], probability[..., 101:]
    assert padding.shape[-1] == 27
    # Jensen: exp(mean logit) ≤ mean of exp(logit); float32 logits round by 1e-6
    assert (padding.amax(-1) <= real.mean(-1) * (1 + 1e-5)).all()


@both
def test_an_untied_head_is_not_dropped(twins: Twins):
    state = randomised(twins.theirs(dataclasses.replace(twins.small, tied_head=False))).state_dict()
    with pytest.raises(UserError, match=r"set model\.tied_head = false"):
        twins.names.from_hugging_face(state, twins.small)
