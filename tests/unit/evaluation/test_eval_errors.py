"""What `mst eval` rejects, in one line: wrong use, models that predict no next token, tokenizers that do not fit."""

import json
import shutil

import pytest
import torch

from mst_scale.checkpoints import finding
from mst_scale.cli import main
from mst_scale.errors import UserError
from mst_scale.evaluation import evaluate, models
from mst_scale.hugging_face.export import export
from mst_scale.hugging_face.sources import open_source
from tests.support.evaluation_calls import TEXT, evaluated, rejected
from tests.support.texts import make, rank_file


def _no_space(**_):
    raise OSError(28, "No space left on device")


def test_wrong_use_is_one_line(run, data, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    there = ["--data-dir", str(data)]
    assert "'lambada'" in rejected(capsys, str(run), "--tasks", "lamda")
    assert "config.json" in rejected(capsys, str(data), "--tasks", "lambada", *there)
    with monkeypatch.context() as patch:  # nor is the network asked for what is spelt like a path
        patch.delenv("HF_HUB_OFFLINE")
        patch.setattr(
            "mst_scale.hugging_face.start_from.offline_unless_reachable", lambda: pytest.fail("asks the network")
        )
        assert str(tmp_path / "none") in rejected(capsys, str(tmp_path / "none"), "--tasks", "lambada", *there)
        assert str(tmp_path / "none") in rejected(capsys, str(tmp_path / "none"), "--tasks", "lambada")
    assert "is a file" in rejected(capsys, str(data / "wikitext2.txt"), "--tasks", "lambada", *there)
    wrong = rejected(capsys, str(run), "--tasks", "lambada", *there, "--tokenizer", "gpt2")
    assert "'byte'" in wrong and "'gpt2'" in wrong
    assert "--stride 65" in rejected(capsys, str(run), "--tasks", "lambada", *there, "--stride", "65")
    assert "--context 65" in rejected(capsys, str(run), "--tasks", "lambada", *there, "--context", "65")
    assert "--shots -1" in rejected(capsys, str(run), "--tasks", "rte", *there, "--shots", "-1")
    assert f"--out '{tmp_path}' is a folder" in rejected(capsys, str(run), "--tasks", "lambada", "--out", str(tmp_path))
    new = tmp_path / "new" / "e.json"
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.TemporaryFile", _no_space)
        line = rejected(capsys, str(run), "--tasks", "lambada", *there, "--out", str(new))
        assert str(new.parent) in line and "--out" in line, "before anything is evaluated"
    under_file = str(data / "wikitext2.txt" / "eval.json")
    assert "--out" in rejected(capsys, str(run), "--tasks", "lambada", "--out", under_file)
    broken = tmp_path / "broken"
    (broken).mkdir()
    (broken / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1}')
    line = rejected(capsys, str(broken), "--tasks", "lambada", *there)
    assert line.startswith(f"mst: {broken}")
    (broken / "rte.jsonl").write_text('{"sentence1": "a", "sentence2": "b", "label": 1}\nbroken\n')
    line = rejected(capsys, str(run), "--tasks", "rte", "--data-dir", str(broken), "--shots", "0")
    assert "rte.jsonl:2" in line

    (broken / "ptb.txt").write_text("x")
    line = rejected(capsys, str(run), "--tasks", "ptb", "--data-dir", str(broken))
    assert "ptb.txt" in line

    def fail(*_, **__):
        raise OSError("no network\nlong story")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fail)
    assert "'nobody/nothing'" in rejected(capsys, "nobody/nothing", "--tasks", "lambada", *there)


def test_memory_that_runs_out_is_one_line(run, data, capsys, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("CUDA out of memory. Tried to allocate 20 GiB")

    monkeypatch.setattr("mst_scale.evaluation.evaluate.evaluate", fail)
    words = ["--tasks", "lambada", "--data-dir", str(data), "--out", str(tmp_path / "e.json")]
    assert main(["eval", str(run), *words]) == 1
    line = capsys.readouterr().err.strip()
    assert "--batch-size" in line and "--context" in line and "\n" not in line


def test_a_tokenizer_file_that_was_moved(run, data, capsys, tmp_path):
    """A rank file without merges gives the ids of `byte`; what is in the file counts, not where it lies."""
    there, other = rank_file(tmp_path / "there.tiktoken", []), rank_file(tmp_path / "other.tiktoken", [b"th"])
    (tmp_path / "a.txt").write_text(TEXT * 9)
    make(tmp_path / "a.txt", tmp_path / "corpus", str(there), val_fraction=0.5)
    ours, hf, bare = tmp_path / "run", tmp_path / "hf", tmp_path / "bare"
    shutil.copytree(run, ours, ignore=shutil.ignore_patterns("eval.json", "run.json"))
    config = json.loads((ours / "config.json").read_text())
    config["data"]["dir"] = str(tmp_path / "corpus")
    (ours / "config.json").write_text(json.dumps(config))
    assert export(ours, hf).tokenizer == str(there)
    here = str(there.rename(tmp_path / "here.tiktoken"))
    assert export(ours, bare).tokenizer is None and not (bare / "tokenizer.json").exists()
    assert export(ours, tmp_path / "named", tokenizer=here).tokenizer == here
    with pytest.raises(UserError, match=r"there\.tiktoken.*other\.tiktoken"):
        export(ours, tmp_path / "out", tokenizer=str(other))
    words = ["--tasks", "lambada", "--data-dir", str(data), "--out", str(tmp_path / "e.json")]
    expected = evaluated(str(run), *words, capsys=capsys)["tasks"]["lambada"]["metrics"]
    line = rejected(capsys, str(ours), *words)
    assert str(there) in line and "--tokenizer" in line
    for model, given, used in ((ours, here, here), (hf, None, f"of {hf}"), (hf, here, here), (bare, here, here)):
        (tmp_path / "e.json").unlink()
        found = evaluated(str(model), *words, *(["--tokenizer", given] if given else []), capsys=capsys)
        assert found["tasks"]["lambada"]["metrics"] == pytest.approx(expected, rel=1e-4)
        assert found["tokenizer"] == used
    for model in (ours, hf, bare):
        line = rejected(capsys, str(model), *words, "--tokenizer", str(other))
        assert f"'{there}'" in line and f"'{other}'" in line


def test_without_the_hub_a_compact_export_uses_the_tokenizer_beside_it(run, data, capsys, tmp_path, monkeypatch):
    main(["export", str(run), str(tmp_path / "compact"), "--compact"])
    capsys.readouterr()
    words = [str(tmp_path / "compact"), "--tasks", "lambada", "--data-dir", str(data)]
    expected = evaluated(*words, capsys=capsys)["tasks"]["lambada"]["metrics"]

    def unreachable(*_):
        raise OSError("the hub cannot be reached")

    monkeypatch.setattr(models, "load_tokenizer", unreachable)
    found = evaluated(*words, capsys=capsys)
    assert found["tasks"]["lambada"]["metrics"] == expected and found["tokenizer"].startswith("of ")


def test_a_model_that_looks_ahead_is_rejected(data, capsys, tmp_path):
    """transformers loads a BERT as a language model too."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    BertForMaskedLM(BertConfig(**shape, vocab_size=257, max_position_embeddings=64)).save_pretrained(tmp_path)
    capsys.readouterr()  # transformers' progress bar
    line = rejected(capsys, str(tmp_path), "--tasks", "lambada", "--data-dir", str(data), "--tokenizer", "byte")
    assert "BERT" in line


def test_a_tokenizer_that_does_not_fit(run, data, capsys, tmp_path):
    export(run, tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    del config["mst_scale"]
    small = {**config, "vocab_size": 100}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    words = ["--tasks", "lambada", "--data-dir", str(data), "--json"]
    assert evaluated(str(tmp_path / "hf"), *words[:-1], capsys=capsys)["tokenizer"].startswith("of ")
    from safetensors.torch import load_file, save_file

    state = load_file(tmp_path / "hf" / "model.safetensors")
    state["transformer.wte.weight"] = state["transformer.wte.weight"][:100].contiguous()
    save_file(state, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "hf" / "config.json").write_text(json.dumps(small))
    line = rejected(capsys, str(tmp_path / "hf"), *words)
    assert "257" in line and "100" in line
    (tmp_path / "hf" / "tokenizer.json").unlink()
    (tmp_path / "hf" / "tokenizer_config.json").unlink()
    assert "--tokenizer" in rejected(capsys, str(tmp_path / "hf"), *words)


def test_options_and_files_that_would_be_lost_are_rejected(run, data, capsys, tmp_path, monkeypatch):
    there = ["--tasks", "lambada", "--data-dir", str(data)]
    export(run, tmp_path / "hf")
    assert "leave out --config" in rejected(capsys, str(tmp_path / "hf"), *there, "--config", "/nowhere.json")
    (tmp_path / "mine.json").write_text('{"important": 1}')
    assert "something else" in rejected(capsys, str(run), *there, "--out", str(tmp_path / "mine.json"))
    assert (tmp_path / "mine.json").read_text() == '{"important": 1}'
    monkeypatch.chdir(run.parent.parent)
    assert "there is no" in rejected(capsys, f"{run.parent.name}/typo", *there), "not on the hub"


def test_a_checkpoint_may_be_named_from_inside_its_run(run, data, capsys, tmp_path, monkeypatch):
    words = ["--tasks", "lambada", "--data-dir", str(data), "--out", str(tmp_path / "e.json")]
    expected = evaluated(str(run), *words, capsys=capsys)["tasks"]
    saved = finding.locate(run)
    (tmp_path / "best").symlink_to(saved)
    monkeypatch.chdir(saved.parent)
    for name in (saved.name, str(tmp_path / "best")):
        assert evaluated(name, *words, capsys=capsys)["tasks"] == expected
    shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints"))
    (tmp_path / "copy" / "checkpoints").symlink_to(saved.parent)  # on another disk
    assert open_source(tmp_path / "copy").run == tmp_path / "copy"


def test_a_diverged_model_has_no_score(run, data, capsys, tmp_path):
    from safetensors.torch import load_file, save_file

    export(run, tmp_path / "hf")
    state = load_file(tmp_path / "hf" / "model.safetensors")
    state["transformer.ln_f.weight"].fill_(float("nan"))
    save_file(state, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    assert main(["eval", str(tmp_path / "hf"), "--tasks", "rte", "--data-dir", str(data), "--shots", "0"]) == 3
    assert "NaN" in capsys.readouterr().err.splitlines()[-1]


def test_what_another_process_adds_meanwhile_stays(run, data, capsys, tmp_path, monkeypatch):
    out = tmp_path / "e.json"
    words = [str(run), "--data-dir", str(data), "--out", str(out), "--shots", "0"]
    inner = evaluate.harness.evaluate_task

    def meanwhile(task, *more, **named):
        found = inner(task, *more, **named)
        if task.name == "lambada":
            evaluated(*words, "--tasks", "rte", capsys=capsys)
        return found

    monkeypatch.setattr(evaluate.harness, "evaluate_task", meanwhile)
    evaluated(*words, "--tasks", "lambada", capsys=capsys)
    assert json.loads(out.read_text())["tasks"].keys() == {"lambada", "rte"}
