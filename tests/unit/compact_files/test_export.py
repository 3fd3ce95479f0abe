"""A run as a compact file, and back."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import mst_scale
from mst_scale import cli
from mst_scale.compact_files import weights
from mst_scale.compact_files.export import export_compact
from mst_scale.compact_files.layout import open_compact
from mst_scale.compact_files.weights import open_weights
from mst_scale.errors import UserError
from mst_scale.evaluation.models import open_model
from mst_scale.hugging_face.export import export
from tests.support.text_run import text_run


def test_a_run_is_read_back_bit_for_bit_and_is_smaller(tmp_path: Path):
    model = text_run(tmp_path / "run", 0.9)
    done = export_compact(tmp_path / "run", tmp_path / "out")
    file = open_compact(tmp_path / "out")
    for name, parameter in model.named_parameters():
        assert torch.equal(file.read(name), parameter), name
    assert done.bytes == (tmp_path / "out" / "model.safetensors").stat().st_size < 0.4 * done.dense_bytes
    assert done.dense_bytes == 4 * sum(p.numel() for p in model.parameters())
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert json.loads(json.dumps(done.to_dict()))["share_of_dense"] == round(done.bytes / done.dense_bytes, 4)


def test_what_is_known_of_the_training_comes_along(tmp_path: Path):
    text_run(tmp_path / "run")
    export_compact(tmp_path / "run", tmp_path / "out")
    before, after = open_weights(tmp_path / "run"), open_weights(tmp_path / "out")
    for field in ("step", "method", "pattern", "tokenizer"):
        assert getattr(after, field) == getattr(before, field), field
    assert after.config.padded_vocab == before.config.padded_vocab
    export_compact(tmp_path / "out", tmp_path / "again")  # a compact file is a source too
    metadata = []
    for folder in ("out", "again"):
        with safe_open(tmp_path / folder / "model.safetensors", "pt") as file:
            metadata.append(file.metadata())
    assert metadata[0] == metadata[1] and len(metadata[0]["sha256"]) == 64


def test_values_can_be_rounded(tmp_path: Path):
    model = text_run(tmp_path / "run")
    export_compact(tmp_path / "run", tmp_path / "out", dtype="bfloat16")
    name = "blocks.0.mlp.up.weight"
    assert torch.equal(open_compact(tmp_path / "out").read(name), dict(model.named_parameters())[name].bfloat16())


def test_a_folder_of_transformers_is_a_source(tmp_path: Path):
    model = text_run(tmp_path / "run")
    export(tmp_path / "run", tmp_path / "hugging")
    export_compact(tmp_path / "hugging", tmp_path / "out")
    file, name = open_compact(tmp_path / "out"), "blocks.1.attention.qkv.weight"
    assert torch.equal(file.read(name), dict(model.named_parameters())[name])
    assert file.about["tokenizer"] == "byte"


@pytest.mark.parametrize(("kind", "advice"), [("gpt2", "mst export"), ("llama", r"use generate\(\) of transformers")])
def test_only_a_gpt2_of_a_trainer_is_to_be_exported_first(tmp_path: Path, monkeypatch, kind: str, advice: str):
    found = tmp_path / "model.json"
    found.write_text(json.dumps({"model_type": kind}))
    monkeypatch.setattr(weights, "find_transformers", lambda path, config: (path, found))
    with pytest.raises(UserError, match=advice):
        open_weights(tmp_path)


def test_an_export_that_was_trained_further_has_the_biases_that_it_has_learned(tmp_path: Path):
    text_run(tmp_path / "run")
    export(tmp_path / "run", tmp_path / "hugging")
    file = tmp_path / "hugging" / "model.safetensors"
    state = load_file(file)
    assert not open_weights(tmp_path / "hugging").config.bias
    state["transformer.h.0.ln_1.bias"][3] = 0.5
    save_file(state, file)
    found = open_weights(tmp_path / "hugging")
    assert found.config.bias and found.read("blocks.0.ln_1.bias")[3] == 0.5


def test_the_tokenizer_of_a_folder_comes_along(tmp_path: Path):
    """Where its config names none, as after training with transformers."""
    text_run(tmp_path / "run")
    export(tmp_path / "run", tmp_path / "hugging")
    config = json.loads((tmp_path / "hugging" / "config.json").read_text())
    del config["mst_scale"]["tokenizer"]
    (tmp_path / "hugging" / "config.json").write_text(json.dumps(config))
    assert export_compact(tmp_path / "hugging", tmp_path / "out").tokenizer == "the model's own"
    texts = {mst_scale.generate(tmp_path / name, "to be", tokens=5, temperature=0).text for name in ("hugging", "out")}
    assert len(texts) == 1


def test_a_folder_of_another_kind_or_without_our_entry(tmp_path: Path):
    text_run(tmp_path / "run")
    export(tmp_path / "run", tmp_path / "hugging")
    file = tmp_path / "hugging" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "mst_scale": None}))
    assert open_weights(tmp_path / "hugging").method is None
    file.write_text(json.dumps({**config, "model_type": "bert"}))
    with pytest.raises(UserError, match="is a BERT: it fills in masked tokens"):
        open_weights(tmp_path / "hugging")
    with pytest.raises(UserError, match="a compact file of a BERT is written from its run or checkpoint"):
        export_compact(tmp_path / "hugging", tmp_path / "out")


def test_a_name_that_differs_is_damage(tmp_path: Path):
    text_run(tmp_path / "run")
    export_compact(tmp_path / "run", tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"blocks.0.ln_1.weight", b"blocks.0.ln_9.weight", 1))
    with pytest.raises(UserError, match="is damaged"):
        open_weights(tmp_path / "out")


def test_bad_arguments_are_errors_of_the_user(tmp_path: Path):
    text_run(tmp_path / "run")
    with pytest.raises(UserError, match="exists"):
        export_compact(tmp_path / "run", tmp_path)
    with pytest.raises(UserError, match="float8"):
        export_compact(tmp_path / "run", tmp_path / "out", dtype="float8")
    with pytest.raises(UserError):
        export_compact(tmp_path / "nothing", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_compact_file_is_not_exported_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text_run(tmp_path / "run")
    export_compact(tmp_path / "run", tmp_path / "out")
    for more in ([], ["--compact"]):
        assert cli.main(["export", str(tmp_path / "out"), str(tmp_path / "again"), *more]) == 2
        error = capsys.readouterr().err
        assert "is a compact file already" in error and error.count("\n") == 1


def test_a_model_without_zeros_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name, sparsity in (("sparse", 0.8), ("dense", 0.0)):
        text_run(tmp_path / name, sparsity)
        assert cli.main(["export", str(tmp_path / name), str(tmp_path / f"{name}-out"), "--compact"]) == 0
        printed = capsys.readouterr().out
        assert ("this model has no zeros (method dense at step 1): " in printed) == (name == "dense"), printed


def test_a_compact_file_takes_no_other_config(tmp_path: Path):
    text_run(tmp_path / "run")
    export_compact(tmp_path / "run", tmp_path / "out")
    with pytest.raises(UserError, match="leave out --config"):
        open_weights(tmp_path / "out", tmp_path / "run" / "config.json")


def test_a_compact_file_has_the_logits_of_the_run(tmp_path: Path):
    text_run(tmp_path / "run")
    export_compact(tmp_path / "run", tmp_path / "out")
    device, tokens = torch.device("cpu"), torch.randint(257, (2, 30))
    model, _ = open_model(str(tmp_path / "run"), None, device)
    for path in (tmp_path / "out", tmp_path / "out" / "model.safetensors"):
        found, text = open_model(str(path), None, device)
        with torch.no_grad():
            assert torch.equal(found.logits(tokens), model.logits(tokens))
        assert (text.name, found.context, found.step, found.folder) == ("byte", 48, 1, tmp_path / "out")
        assert found.parameters == model.parameters


def test_a_file_of_masks_beside_a_model_is_not_read_as_weights(tmp_path: Path):
    text_run(tmp_path / "run")
    export(tmp_path / "run", tmp_path / "hugging")
    before = open_weights(tmp_path / "hugging").read("blocks.0.mlp.up.weight")
    assert cli.main(["masks", str(tmp_path / "hugging"), str(tmp_path / "hugging" / "pruned.safetensors")]) == 0
    assert torch.equal(open_weights(tmp_path / "hugging").read("blocks.0.mlp.up.weight"), before)
