"""Pruned exports: by each method and pattern, the folder holds the pruned model and says how it was pruned."""

import dataclasses
import json
import shutil
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mst_scale.cli import main
from mst_scale.cli.checkpoints import EXPORT
from mst_scale.data.corpus import identity
from mst_scale.data.sampler import open_sampler
from mst_scale.errors import UserError
from mst_scale.hugging_face.export import Source, export, open_source, validation_loss
from mst_scale.hugging_face.names import from_hugging_face
from mst_scale.hugging_face.sources import tokenizer_of
from mst_scale.models import build
from mst_scale.pruning import METHODS, prune_model
from mst_scale.pruning.method import NM, Amount
from mst_scale.pruning.network import calibration_batches, open_calibration
from tests.support import tiny_run
from tests.support.saved_model import save
from tests.support.texts import make
from tests.support.twins import MASKED, randomised
from tests.system.hugging_face.test_export import SAVED, run_of, theirs, tokens

BLOCK = [f"blocks.0.{name}.weight" for name in ("attention.qkv", "attention.proj", "mlp.up", "mlp.down")]
TWO_OF_FOUR = NM(2, 4)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return run_of(tmp_path_factory, 2, 1)


def ours(folder: Path, source: Source) -> dict[str, torch.Tensor]:
    """The exported weights under our names."""
    return from_hugging_face(load_file(folder / "model.safetensors"), source.experiment.model)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("asked", [{"prune": 0.5}, {"pattern": "2:4"}, {"pattern": "1:8", "prune": 0.875}], ids=str)
@torch.no_grad()
def test_transformers_computes_with_the_pruned_weights(run, tmp_path, method, asked):
    looks = METHODS[method].of_inputs is not None
    done = export(run, tmp_path / "hf", method=method, **asked, **({"calibration_sequences": 9} if looks else {}))
    source = open_source(run)
    state = ours(tmp_path / "hf", source)
    model = build(source.experiment.model).eval()
    model.load_state_dict(state)
    assert (theirs(tmp_path / "hf")(tokens()).logits - model(tokens())[..., :64]).abs().max() < 1e-5
    before = {name: source.weights.read(name) for name in state}
    for name, weight in before.items():
        if name not in BLOCK:
            assert torch.equal(state[name][:64], weight[:64]) or (method == "magnitude" and name == "wte.weight"), name
    sampler = open_sampler(source.experiment.data.dir, "val", source.experiment.model, source.experiment.training.seed)
    assert done.losses["after"] == pytest.approx(validation_loss(model, sampler, source.experiment), rel=1e-6)
    assert done.losses["before"] == export(run, tmp_path / "plain", prune=0.0).losses["before"]
    share = 0.875 if asked.get("prune") == 0.875 else 0.5
    zeros = sum(int((state[name] == 0).sum()) for name in BLOCK)
    if "pattern" in asked:
        keep, of = map(int, asked["pattern"].split(":"))
        assert all((state[name].view(-1, of) != 0).sum(-1).max() <= keep for name in BLOCK)
    if "pattern" in asked or looks:
        assert zeros == share * sum(before[name].numel() for name in BLOCK)
    about = json.loads((tmp_path / "hf" / "config.json").read_text())["mst_scale"]["pruned"]
    looked = {"calibration": source.experiment.data.dir, "sequences": 9} if looks else {}
    left = ["wte.weight"] if looks else []
    expected = {"how": method, "share": share, "pattern": asked.get("pattern"), **looked, "left": left}
    assert about == done.pruning == expected
    card = (tmp_path / "hf" / "README.md").read_text()
    assert f"by {METHODS[method].title}" in card and ("groups of inputs run down" in card) == ("pattern" in asked)
    assert ("calibrated on 9 sequences of" in card) == ("multiplies by it: wte.weight" in card) == looks


def test_the_method_is_magnitude_unless_another_is_named(run, tmp_path):
    export(run, tmp_path / "a", prune=0.7)
    export(run, tmp_path / "b", prune=0.7, method="magnitude")
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert a == b


@pytest.mark.parametrize("method", METHODS)
def test_zeros_of_training_count_and_stay(tmp_path_factory, tmp_path, method):
    """In the middle of sparse training: what is pruned already is among what is pruned."""
    saved = run_of(tmp_path_factory, 2, 3) / "checkpoints" / SAVED
    source = open_source(saved)
    export(saved, tmp_path / "hf", method=method, prune=0.9)
    state = ours(tmp_path / "hf", source)
    for name in BLOCK:
        zeros = source.weights.read(name) == 0
        assert zeros.double().mean() > 0.4 and not state[name][zeros].any(), name
        if method == "sparsegpt":
            expected = max(int(zeros.sum()), int(Fraction(9, 10) * zeros.numel()))
            assert (state[name] == 0).sum() == expected, "one block of columns: the share is of the matrix"


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_a_bert_with_its_corpus(tmp_path, method):
    """Masked sequences, q, k and v in three matrices, a layer in the head; by another corpus than the run's."""
    from transformers import AutoModelForMaskedLM

    model = randomised(MASKED.ours(MASKED.small)).eval()
    saved = save(model, MASKED.small, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["data"] = {"dir": str(tiny_run.corpus(tmp_path / "own"))}
    raw["training"] = {"steps": 4, "eval_sequences": 4}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    other = tiny_run.corpus(tmp_path / "other", vocab=90)
    looks = METHODS[method].of_inputs is not None
    looking = {"calibration": str(other), "calibration_sequences": 8} if looks else {}
    export(saved, tmp_path / "hf", method=method, pattern="2:4", **looking)
    source = open_source(saved, causal=False)
    seen = calibration_batches(open_calibration(str(other), MASKED.small, 8), 8) if looks else []
    amounts = dict.fromkeys(source.targets(), Amount.of(TWO_OF_FOUR))
    assert prune_model(model, METHODS[method], amounts, seen) == (["wte.weight"] if looks else [])
    assert (model.transform.weight.view(-1, 4) != 0).sum(-1).max() == 2
    found = AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").eval()(tokens(100)).logits
    assert (found - model(tokens(100))[..., :101]).abs().max() < 1e-4


def test_wrong_input_is_rejected_before_anything_is_written(run, tmp_path, monkeypatch):
    monkeypatch.setattr("mst_scale.hugging_face.export._Plan.carry_out", lambda *_: pytest.fail("too late"))
    out = tmp_path / "out"

    def rejected(named: str, **options) -> None:
        with pytest.raises(UserError, match=named):
            export(run, out, **options)
        assert not list(tmp_path.glob("out*"))

    rejected(r"--method 'best'.* magnitude, wanda, sparsegpt", method="best", prune=0.5)
    rejected("--prune 0 --method wanda", method="wanda", prune=0)
    rejected(r"--pattern 2:4 .*--prune 0\.6", pattern="2:4", prune=0.6)
    rejected(r"--pattern 2:5: .* 16 ", pattern="2:5")
    nowhere = str(tmp_path / "nowhere")
    rejected(rf"{nowhere} .*`mst data", method="wanda", prune=0.5, calibration=nowhere)
    few = r"--calibration-sequences 99,999 .* 19,968"
    rejected(few, method="sparsegpt", pattern="2:4", calibration_sequences=99_999)


def test_a_calibration_of_another_tokenizer_is_rejected(run, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("the cat sat on the mat\n" * 200)
    make(text, tmp_path / "bytes", "byte", val_fraction=0.5)
    ranks = tmp_path / "some.tiktoken"
    ranks.write_bytes(b"".join(b"%s %d\n" % (_base64(i), i) for i in range(256)))
    make(text, tmp_path / "ranks", str(ranks), val_fraction=0.5)
    config = dataclasses.replace(MASKED.small, arch="gpt", vocab_size=257)
    saved = save(build(config), config, tmp_path / "run")
    raw = json.loads((tmp_path / "run" / "config.json").read_text())
    raw["data"] = {"dir": str(tmp_path / "bytes")}
    (tmp_path / "run" / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=r"--calibration .*some\.tiktoken.* 'byte'"):
        export(saved, tmp_path / "out", method="wanda", prune=0.5, calibration=str(tmp_path / "ranks"))
    shutil.rmtree(tmp_path / "ranks")
    assert export(saved, tmp_path / "out", method="wanda", prune=0.5, calibration_sequences=2).tokenizer == "byte"


def _base64(byte: int) -> bytes:
    import base64

    return base64.b64encode(bytes([byte]))


def test_the_help_lists_every_method():
    assert all(f"\n  {name} " in EXPORT for name in METHODS)


def test_the_command(run, tmp_path, capsys):
    words = ["export", str(run), str(tmp_path / "hf")]
    assert main([*words, "--pattern", "2:4", "--method", "wanda", "--calibration-sequences", "4"]) == 0
    said = capsys.readouterr().out
    assert "not pruned, because no linear layer multiplies by it: wte.weight" in said and "before pruning" in said
    assert main(["export", str(run), str(tmp_path / "no"), "--prune", "0.5", "--method", "wnada"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mst: --method 'wnada'")


def test_sizes_are_printed_and_that_zeros_save_nothing(run, tmp_path, capsys):
    assert main(["export", str(run), str(tmp_path / "hf"), "--prune", "0.5"]) == 0
    said = capsys.readouterr().out
    size = (tmp_path / "hf" / "model.safetensors").stat().st_size
    assert f"{size / 1e6:,.1f} MB in 1 file(s)" in said and "do not make the file smaller" in said
    assert main(["export", str(run), str(tmp_path / "hf2"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == (tmp_path / "hf2" / "model.safetensors").stat().st_size


@pytest.fixture
def elsewhere(run, tmp_path, monkeypatch) -> Path:
    """A copy of the run whose config names its corpus by a relative path, seen from another folder than its own."""
    there = tmp_path / "there"
    shutil.copytree(run, there / "run")
    raw = json.loads((there / "run" / "config.json").read_text())
    shutil.copytree(raw["data"]["dir"], there / "corpora" / "x")
    raw["data"] = {"dir": "corpora/x"}
    (there / "run" / "config.json").write_text(json.dumps(raw))
    (there / "run" / "run.json").write_text(json.dumps({"starts": [{"folder": str(there)}]}))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    return there


def test_a_relative_corpus_is_found_from_where_the_run_was_started(elsewhere, tmp_path):
    done = export(elsewhere / "run", tmp_path / "hf", method="sparsegpt", pattern="2:4", calibration_sequences=2)
    assert done.losses.keys() == {"before", "after"} and done.pruning["calibration"] == str(elsewhere / "corpora" / "x")


def test_a_corpus_of_the_same_name_elsewhere_is_not_the_runs(elsewhere, tmp_path, monkeypatch, caplog):
    """Neither its tokenizer nor its text is taken for that of the run."""
    (tmp_path / "a.txt").write_text("another text. " * 400)
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "another", "text"]))
    make(tmp_path / "a.txt", tmp_path / "own" / "corpora" / "x", str(tmp_path / "vocab.txt"), val_fraction=0.5)
    shutil.rmtree(elsewhere / "corpora" / "x")
    make(tmp_path / "a.txt", elsewhere / "corpora" / "x", val_fraction=0.5)
    starts = [{"folder": str(elsewhere), "corpus": identity(elsewhere / "corpora" / "x")}]
    (elsewhere / "run" / "run.json").write_text(json.dumps({"starts": starts}))
    monkeypatch.chdir(tmp_path / "own")
    source = open_source(elsewhere / "run")
    found = tokenizer_of(source.experiment, source.run)
    assert found is not None and found.name == "byte"
    (elsewhere / "corpora").rename(tmp_path / "moved")
    assert tokenizer_of(source.experiment, source.run) is None and "is not the corpus" in caplog.text


def test_a_calibration_is_enough_where_the_runs_own_corpus_is_gone(elsewhere, tmp_path, caplog):
    whole = export(elsewhere / "run", tmp_path / "hf", method="sparsegpt", pattern="2:4", calibration_sequences=2)
    (elsewhere / "corpora").rename(tmp_path / "moved")
    asked = {"method": "sparsegpt", "pattern": "2:4", "calibration_sequences": 2}
    done = export(elsewhere / "run", tmp_path / "hf2", calibration=str(tmp_path / "moved" / "x"), **asked)
    assert done.losses == whole.losses, "the same text, measured there"
    assert sum("the loss is measured on" in record.getMessage() for record in caplog.records) == 1
    with pytest.raises(UserError, match="corpora/x"):
        export(elsewhere / "run", tmp_path / "hf3", **asked)


def test_a_config_that_names_no_text_is_rejected_by_that(run, tmp_path):
    raw = json.loads((run / "config.json").read_text())
    del raw["data"]
    (tmp_path / "bare.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=r"data\.dir"):
        export(run / "checkpoints" / SAVED, tmp_path / "hf", config=tmp_path / "bare.json", prune=0.5, method="wanda")
    export(run / "checkpoints" / SAVED, tmp_path / "hf", config=tmp_path / "bare.json")  # which needs none


@pytest.mark.parametrize("named", [True, False])
def test_magnitude_needs_no_corpus(run, tmp_path, capsys, caplog, named):
    """The weights are those pruned where the corpus is there; the loss is not measured, and one line says so."""
    whole = tmp_path / "whole"
    export(run / "checkpoints" / SAVED, whole, prune=0.5)
    raw = json.loads((run / "config.json").read_text())
    raw["data"] = {"dir": str(tmp_path / "moved")} if named else {}
    (tmp_path / "bare.json").write_text(json.dumps(raw))
    words = [str(run / "checkpoints" / SAVED), str(tmp_path / "hf"), "--config", str(tmp_path / "bare.json")]
    assert main(["export", *words, "--prune", "0.5"]) == 0
    assert sum("is not measured" in record.getMessage() for record in caplog.records) == 1
    assert "validation loss" not in capsys.readouterr().out
    one, other = (load_file(folder / "model.safetensors") for folder in (whole, tmp_path / "hf"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert "before pruning" not in (tmp_path / "hf" / "README.md").read_text()
