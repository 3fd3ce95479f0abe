"""`mst data` says what it did, in words and as JSON, and ends with the right exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mst_scale.cli import main
from mst_scale.data import prepare
from mst_scale.errors import UserError
from tests.support.texts import jsonl, words


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return str(jsonl(tmp_path / "books.jsonl", [words(30, seed=n) for n in range(40)]))


def test_help_has_examples(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as done:
        main(["data", "--help"])
    assert done.value.code == 0
    shown = capsys.readouterr().out
    assert "mst data openwebtext" in shown and "--verify" in shown


def test_formatting(source: str, capsys: pytest.CaptureFixture[str]):
    assert main(["data", source, "--tokenizer", "byte", "--workers", "1"]) == 0
    out, err = capsys.readouterr()
    first, train, val = out.strip().splitlines()
    assert first == "corpora/books-byte: tokenizer byte, 257 ids, uint16"
    assert train.split()[0] == "train" and val.split()[0] == "val"
    assert err.startswith(f"preparing {source} with tokenizer byte in corpora/books-byte")
    assert Path("corpora/books-byte/train.bin").stat().st_size == 2 * int(train.split()[1].replace(",", ""))


@pytest.mark.parametrize(
    ("reported", "says"),
    [
        (["nowhere.txt"], "source 'nowhere.txt': no such file"),  # with the default tokenizer, also without a network
        (["stdlib", "--tokenizer", "nope"], "unknown tokenizer 'nope'"),
        (["README.md", "--tokenizer", "byte"], "not a kind of file that can be read"),
    ],
)
def test_a_wrong_name_is_one_line(reported: list[str], says: str, source: str, capsys: pytest.CaptureFixture[str]):
    Path("README.md").write_text("text\n")
    assert main(["data", *reported, "--out", "c"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and says in err
    assert not Path("c").exists()


def test_json_for_machines(source: str, capsys: pytest.CaptureFixture[str]):
    assert main(["data", source, "--tokenizer", "byte", "--out", "c", "--val-fraction", "0.2", "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out) == json.loads(Path("c/meta.json").read_text())
    assert out.count("\n") == 1


def test_the_default_is_python_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert main(["data", "--max-bytes", "0.3M"]) == 0
    meta = json.loads(Path("corpora/stdlib-byte/meta.json").read_text())
    assert meta["recipe"]["max_bytes"] == 300_000
    assert 0.8 * 300_000 < sum(split["tokens"] for split in meta["splits"].values()) < 300_000 + 1000


def test_verify_distinguishes_complete_from_damaged(source: str, capsys: pytest.CaptureFixture[str]):
    main(["data", source, "--tokenizer", "byte", "--out", "c"])
    capsys.readouterr()
    assert main(["data", "--verify", "c"]) == 0
    assert "checksums match" in capsys.readouterr().out
    ids = bytearray(Path("c/val.bin").read_bytes())
    ids[0] ^= 1
    Path("c/val.bin").write_bytes(ids)
    assert main(["data", "--verify", "c"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("mst: c/val.bin is damaged") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nothing.txt", "--tokenizer", "byte"], "no such file"),
        (["books.jsonl", "--tokenizer", "gpt22"], "did you mean 'gpt2'"),
        (["books.jsonl", "--tokenizer", "byte", "--text-key", "body"], "no text under 'body'"),
        (["books.jsonl", "--tokenizer", "byte", "--val-fraction", "2"], "val_fraction must lie in"),
        (["books.jsonl", "--tokenizer", "byte", "--workers", "0"], "workers must be at least 1"),
        (["--verify", "nowhere"], "does not exist"),
        (["--verify", "."], "there is no train.bin"),
        (["--verify", "foreign"], "has format None"),
        (["loop", "--tokenizer", "byte"], "no such file"),
        (["./loop", "--tokenizer", "byte"], "no such file"),
        (["stdlib", "--out", "books.jsonl"], "'books.jsonl' is not a folder; choose another"),
        (["stdlib", "--out", "loop"], "choose another folder"),
        (["stdlib", "--out", "x" * 300], "File name too long; choose another folder"),
        (["books.jsonl", "--verify", "nowhere"], "--verify takes a corpus folder and nothing else"),
        (["--verify", "nowhere", "--tokenizer", "gpt2"], "--verify takes a corpus folder and nothing else"),
        (["package:os"], "it is a single module; name a package"),
        (["package:__main__"], "no package of that name is installed here; name a package"),
    ],
)
def test_wrong_use_is_one_line_and_code_2(
    source: str, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
):
    Path("loop").symlink_to("loop")
    Path("foreign").mkdir()
    Path("foreign/meta.json").write_text("{}")
    assert main(["data", *arguments]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("mst: ") and complaint in last
    assert not Path("corpora").exists() or not list(Path("corpora").rglob("*.bin"))


@pytest.mark.parametrize(("text", "n_bytes"), [("500", 500), ("20M", 20_000_000), ("1.5g", 1_500_000_000)])
def test_sizes_are_read(text: str, n_bytes: int):
    from mst_scale.cli.data import parse_bytes

    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize("size", ["3X", "0", "-5", "nan", "1e400", "0.1", "1e30"])
@pytest.mark.parametrize("words", [["data", "stdlib", "--max-bytes="], ["export", "run", "out", "--shard-size="]])
def test_bad_sizes_are_wrong_use(words: list[str], size: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as done:
        main([*words[:-1], words[-1] + size])
    assert done.value.code == 2
    assert f"'{size}' is not a number of bytes like 500K, 20M or 3G" in capsys.readouterr().err


def test_a_source_that_does_not_exist_is_reported_before_the_tokenizer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def no_source(recipe: object) -> None:
        raise UserError("'nope' does not exist here")

    monkeypatch.setattr(prepare, "open_source", no_source)
    monkeypatch.setattr(prepare, "load_tokenizer", lambda name: pytest.fail("its vocabulary would be downloaded"))
    assert main(["data", "nope"]) == 2
    assert "'nope' does not exist here" in capsys.readouterr().err
