"""Continuing a prompt: the text, its ends, and what cannot be continued."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mst_scale
from mst_scale import cli
from mst_scale.compact_files.export import export_compact
from mst_scale.data.tokenizer import load_tokenizer
from mst_scale.errors import DivergedError, UserError
from mst_scale.generation.sampling import Sampling
from mst_scale.generation.tokens import Decoded
from mst_scale.hugging_face.export import export
from tests.support.text_run import seal, text_run
from tests.support.tiny_run import environment

PROMPT = "to be or"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "run"
    text_run(folder)
    return folder


def uncached(folder: Path, prompt: str, count: int) -> list[int]:
    """The most likely tokens, by the whole model on the whole text each time."""
    model = text_run(folder)
    ids = list(prompt.encode())
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]))[0, -1, :257].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("prompt", ["a", PROMPT, "x" * 47])
def test_greedy_text_is_that_of_the_computation_without_a_cache(run: Path, tmp_path: Path, prompt: str):
    count = min(30, 48 - len(prompt) + 1)
    expected = uncached(tmp_path / "same", prompt, count)
    done = mst_scale.generate(run, prompt, tokens=count, temperature=0)
    if 256 in expected:
        expected = expected[: expected.index(256)]
    assert done.text == load_tokenizer("byte").decode(expected) and done.tokens == len(expected)


def test_a_prompt_may_have_several_lines_and_the_default_dtype_and_device_do_not_matter(run: Path, capsys):
    words = ["generate", str(run), "--prompt", "to be\n\tor", "--tokens", "5", "--temperature", "0", "--json"]
    assert cli.main(words) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    try:
        assert mst_scale.generate(run, "to be\n\tor", tokens=5, temperature=0).text == text
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def test_every_form_of_a_model_gives_the_same_text(run: Path, tmp_path: Path):
    export(run, tmp_path / "hugging")
    export_compact(run, tmp_path / "compact")
    forms = [
        run, run / "checkpoints" / "step00000001", tmp_path / "hugging", tmp_path / "compact",
        tmp_path / "compact" / "model.safetensors",
    ]  # fmt: skip
    texts = {mst_scale.generate(form, PROMPT, tokens=20, temperature=0).text for form in forms}
    assert len(texts) == 1 and texts.pop()


def test_a_seed_decides_the_text(run: Path):
    texts = [mst_scale.generate(run, PROMPT, tokens=20, seed=seed, temperature=1).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_weights_take_their_compact_size(run: Path):
    done, dense = mst_scale.generate(run, PROMPT, tokens=2), text_run
    model = dense(run.parent / "other")
    assert done.weight_bytes < 0.6 * sum(4 * p.numel() for p in model.parameters())
    assert done.resident_bytes > done.weight_bytes and done.tokens_per_s > 0


def test_pieces_of_a_stream_are_the_text(run: Path):
    pieces: list[str] = []
    done = mst_scale.generate(run, PROMPT, tokens=30, seed=5, temperature=1, stream=pieces.append)
    assert "".join(pieces) == done.text


def test_a_character_of_several_bytes_is_given_out_whole():
    decoded = Decoded(load_tokenizer("byte"), [])
    assert [decoded.add(byte) for byte in "é…a".encode()] == ["", "é", "", "", "…", "a"] and decoded.rest() == ""
    decoded.add(0xE2)
    assert decoded.rest() == "\ufffd"


def drawing(monkeypatch, *tokens: int) -> None:
    """Let the model choose these tokens, one after the other."""
    left = iter(tokens)
    monkeypatch.setattr(Sampling, "choose", lambda *_: torch.tensor([next(left)]))


def test_the_text_ends_when_the_context_is_full(run: Path, monkeypatch):
    drawing(monkeypatch, 97, 98)
    done = mst_scale.generate(run, "x" * 48, tokens=30)
    assert (done.text, done.tokens, done.finish) == ("a", 1, "context")


def test_the_text_ends_at_an_end_of_text(run: Path, monkeypatch):
    drawing(monkeypatch, 97, 98, 256, 99)
    pieces: list[str] = []
    done = mst_scale.generate(run, PROMPT, tokens=4, stream=pieces.append)
    assert (done.text, done.tokens, done.finish) == ("ab", 2, "end of text") and "".join(pieces) == "ab"


def test_the_text_has_as_many_tokens_as_requested(run: Path, monkeypatch):
    drawing(monkeypatch, 97, 98, 99)
    done = mst_scale.generate(run, PROMPT, tokens=2)
    assert (done.text, done.tokens, done.finish) == ("ab", 2, "length")


# Sampling -----------------------------------------------------------------------------------------------------------


def test_top_p_leaves_out_unlikely_tokens():
    probability = torch.tensor([[0.1, 0.5, 0.15, 0.25]])
    generator = torch.Generator().manual_seed(0)
    drawn = {int(Sampling(1, 0.7).choose(probability.log(), generator)) for _ in range(200)}
    assert drawn == {1, 3}
    assert {int(Sampling(1, 1.0).choose(probability.log(), generator)) for _ in range(300)} == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_no_numbers_end_a_text(temperature):
    for value in ("nan", "inf"):
        with pytest.raises(DivergedError, match="NaN or infinite"):
            Sampling(temperature).choose(torch.tensor([[0.0, float(value)]]), torch.Generator())
    assert Sampling(temperature).choose(torch.tensor([[0.0, -math.inf]]), torch.Generator()).tolist() == [0]


def test_frequencies_are_those_of_the_softmax():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    counts = torch.zeros(3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3000):
        counts[Sampling(0.5).choose(logits, generator)] += 1
    # the standard deviation of a frequency is at most 0.5 / sqrt(3000) = 0.009
    assert torch.allclose(counts / 3000, torch.softmax(logits[0] / 0.5, 0), atol=0.04)


def test_the_most_likely_token_is_the_first_of_several():
    assert int(Sampling(0).choose(torch.tensor([[1.0, 3.0, 3.0]]), torch.Generator())) == 1
    assert int(Sampling(1e-30).choose(torch.tensor([[1.0, 3.0, 2.0]]), torch.Generator().manual_seed(0))) == 1


# Bad input ----------------------------------------------------------------------------------------------------------

BAD = {
    "longer than the context": ["--prompt", "x" * 49],
    "empty prompt": ["--prompt", ""],
    "not utf-8": ["--prompt", "\udcff"],
    "temperature": ["--prompt", "a", "--temperature", "-1"],
    "temperature nan": ["--prompt", "a", "--temperature", "nan"],
    "top-p": ["--prompt", "a", "--top-p", "2"],
    "top-p 0": ["--prompt", "a", "--top-p", "0"],
    "seed": ["--prompt", "a", "--seed", "-1"],
    "tokens": ["--prompt", "a", "--tokens", "0"],
    "dtype": ["--prompt", "a", "--dtype", "int8"],
    "stream and json": ["--prompt", "a", "--stream", "--json"],
    "another tokenizer": ["--prompt", "a", "--tokenizer", "byt"],
}


@pytest.mark.parametrize("words", BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line(run: Path, words: list[str], capsys: pytest.CaptureFixture[str]):
    try:
        code = cli.main(["generate", str(run), *words])
    except SystemExit as error:  # of the parser
        code = error.code
    out, err = capsys.readouterr()
    named = words[-2].removeprefix("--")
    assert code == 2 and out == "" and err.startswith("mst") and len(err.splitlines()) == 1 and named in err


@pytest.mark.parametrize("tokens", [0, 2.5, "3"])
def test_the_number_of_tokens_is_a_whole_number(run: Path, tokens: object):
    with pytest.raises(UserError, match="whole number of at least 1"):
        mst_scale.generate(run, "a", tokens=tokens)


def test_models_that_generate_no_text_are_one_line(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]):
    export_compact(run, tmp_path / "damaged")
    file = tmp_path / "damaged" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-40])
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (tmp_path / "text").write_text("hello")
    for path in (file, file.parent, tmp_path / "bert", tmp_path / "text", tmp_path / "none", tmp_path):
        assert cli.main(["generate", str(path), "--prompt", "a"]) == 2, path
        err = capsys.readouterr().err
        assert len(err.splitlines()) == 1, err


DAMAGED = [b"", b"{", b"\xff\xfe", b"[]", b"{}", None]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_config_of_an_exported_folder_is_named(tmp_path: Path, run: Path, content: bytes | None, capsys):
    export(run, tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    documents = ["--tasks", "lambada", "--data-dir", str(tmp_path)]
    (tmp_path / "lambada.txt").write_text("the cat sat on the mat\n")
    for words in (["generate", str(file.parent), "--prompt", "a"], ["eval", str(file.parent), *documents]):
        capsys.readouterr()
        assert cli.main(words) == 1
        err = capsys.readouterr().err
        assert len(err.splitlines()) == 1 and str(file) in err and "mst export" in err


def test_a_bert_predicts_no_next_token(tmp_path: Path):
    from mst_scale.config import ModelConfig
    from mst_scale.models import build
    from tests.support.saved_model import save

    config = ModelConfig(arch="bert", n_layer=1, n_head=2, n_embd=16, seq_length=16, vocab_size=64)
    seal(save(build(config), config, tmp_path / "run"))
    with pytest.raises(UserError, match="BERT"):
        mst_scale.generate(tmp_path / "run", "a", tokenizer="byte")
    export_compact(tmp_path / "run", tmp_path / "out")
    with pytest.raises(UserError, match="BERT"):
        mst_scale.generate(tmp_path / "out", "a", tokenizer="byte")


def test_a_word_that_is_in_no_vocabulary_is_named(tmp_path: Path, run: Path):
    pytest.importorskip("tokenizers")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "be", "to", "##o"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    (tmp_path / "run").mkdir()
    text_run(tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["data"] = {"tokenizer": str(tmp_path / "vocab.txt")}
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    assert mst_scale.generate(tmp_path / "run", "to be", tokens=1).prompt_tokens == 2
    with pytest.raises(UserError, match="does not know"):
        mst_scale.generate(tmp_path / "run", "to xyzzy", tokens=1)


def test_the_command_prints_one_json_object(run: Path):
    words = ["generate", str(run), "--prompt", PROMPT, "--tokens", "5", "--temperature", "0", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "mst_scale", *words], env=environment(), capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["text"] == mst_scale.generate(run, PROMPT, tokens=5, temperature=0).text
    assert {"tokens_per_s", "weight_bytes", "resident_bytes"} <= found.keys() and found["tokens_per_s"] > 0


def test_the_command_prints_the_prompt_and_the_text(run: Path, capsys: pytest.CaptureFixture[str]):
    text = mst_scale.generate(run, PROMPT, tokens=9, temperature=0).text
    for more in ([], ["--stream"]):
        assert cli.main(["generate", str(run), "--prompt", PROMPT, "--tokens", "9", "--temperature", "0", *more]) == 0
        assert capsys.readouterr().out == PROMPT + text + "\n"


def test_word_pieces_are_joined_to_the_prompt(tmp_path: Path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "sat"]
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(words) + "\n")
    decoded = Decoded(load_tokenizer(str(vocabulary)), [words.index("the"), words.index("cat")])
    assert [decoded.add(words.index(word)) for word in ("##s", "sat")] == ["s", " sat"] and decoded.text == "s sat"
