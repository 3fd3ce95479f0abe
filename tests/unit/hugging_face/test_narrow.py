"""Runs with whole channels become smaller models of transformers with the same logits."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import mst_scale
from mst_scale import cli
from mst_scale.config import ModelConfig
from mst_scale.hugging_face.export import export
from mst_scale.hugging_face.narrow import find_neurons
from mst_scale.models import GPT, build
from tests.support.saved_model import save
from tests.support.text_run import seal

CHANNEL = {
    "method": "mst",
    "sparsity": {"distribution": "uniform"},
    "topology": {
        "granularity": "channel", "policy": "static", "random_ratio": 1.0, "grown_moments": "active_mean",
    },
    "targets": {"lm_head": False},
}  # fmt: skip
SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "d_ff": 64, "seq_length": 24, "vocab_size": 257, "init_std": 0.2}
KEPT = (16, 24)


def channel_run(folder: Path, mst: dict | None = None, **shape: object) -> torch.nn.Module:
    """A run of which each layer's MLP has this many active neurons, at random places."""
    torch.manual_seed(0)
    config = ModelConfig(**{**SHAPE, **shape})
    model = build(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
        for block, kept in zip(model.blocks, KEPT, strict=True):
            inactive = torch.randperm(64)[kept:]
            block.mlp.up.weight[inactive] = 0
            block.mlp.down.weight[:, inactive] = 0
    seal(save(model, config, folder))
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"data": {"tokenizer": "byte"}, "mst": CHANNEL if mst is None else mst}
    (folder / "config.json").write_text(json.dumps(raw))
    return model


@pytest.mark.parametrize("shape", [{}, {"bias": True}, {"arch": "bert", "bias": True}], ids=["gpt", "bias", "bert"])
def test_logits_are_those_of_the_run_with_fewer_neurons(tmp_path: Path, shape: dict):
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    model = channel_run(tmp_path / "run", **shape)
    done = export(tmp_path / "run", tmp_path / "out")
    kind = AutoModelForMaskedLM if "arch" in shape else AutoModelForCausalLM
    theirs = kind.from_pretrained(tmp_path / "out").eval()
    tokens = torch.randint(257, (2, 24))
    with torch.no_grad():
        expected, found = model(tokens)[..., :257], theirs(tokens).logits
    # float32, sums over at most 64 values in another order
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert done.narrow == {"n_inner": 24, "before": 64, "kept": [16, 24], "padding": 2 * 32 * 8}
    assert getattr(theirs.config, "n_inner", None) == 24 or theirs.config.intermediate_size == 24


def test_the_file_is_smaller_and_can_be_read_by_generate(tmp_path: Path):
    channel_run(tmp_path / "run")
    narrow = export(tmp_path / "run", tmp_path / "narrow")
    channel_run(tmp_path / "single", mst={"method": "dense"})
    whole = export(tmp_path / "single", tmp_path / "whole")
    assert not whole.narrow and whole.bytes - narrow.bytes >= 4 * 2 * 2 * 32 * 40
    assert load_file(tmp_path / "narrow" / "model.safetensors")["transformer.h.0.mlp.c_fc.weight"].shape == (32, 24)
    texts = [
        mst_scale.generate(tmp_path / name, "to be", tokens=10, temperature=0).text for name in ("narrow", "whole")
    ]
    assert texts[0] == texts[1]


def test_the_biases_of_the_format_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = channel_run(tmp_path / "run", mst={"method": "dense"})
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    padding = 320 - 257  # rows of the vocabulary, which are not exported
    own = sum(p.numel() for p in model.parameters()) - 32 * padding
    biases = 2 * (3 * 32 + 32 + 64 + 32) + 5 * 32  # of the linear layers and of the norms
    said = f"{own:,} parameters ({own + biases:,} with the biases of transformers' format, which are 0)"
    assert said in capsys.readouterr().out


def test_the_cost_of_padding_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    channel_run(tmp_path / "run")
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "24 of 64 neurons" in out and "512 zeros" in out


def test_neurons_whose_bias_is_not_zero_are_kept():
    model = GPT(ModelConfig(**{**SHAPE, "bias": True}))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    weights["blocks.0.mlp.up.weight"][:3] = 0
    weights["blocks.0.mlp.up.bias"][1] = 0.5
    weights["blocks.0.mlp.down.weight"][:, 5] = 0
    kept = find_neurons(model.config, weights.__getitem__).kept
    assert [n for n in range(64) if n not in kept[0].tolist()] == [0, 2, 5] and len(kept[1]) == 64
