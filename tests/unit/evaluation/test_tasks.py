"""Local files of tasks are read, and errors in them are named in one line."""

import json
from pathlib import Path

import pytest

from mst_scale.errors import UserError
from mst_scale.evaluation.harness import _split as last_word_of
from mst_scale.evaluation.tasks import TASKS, choose, documents


def lines(path: Path, *rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_names():
    assert [task.name for task in choose("rte, lambada,rte")] == ["rte", "lambada"]
    assert len(choose("all")) == 7
    with pytest.raises(UserError, match=r"'wikitext'.*'wikitext2'"):
        choose("lambada,wikitext")
    with pytest.raises(UserError, match="lambada"):
        choose(" , ")


def test_formats(tmp_path):
    (tmp_path / "lambada.txt").write_bytes("one\u2028two\x85 \f three\r\n\nfour five\n".encode())
    lines(tmp_path / "ptb.jsonl", {"text": "first", "more": 1}, {"text": "second"})
    (tmp_path / "wikitext2.txt").write_bytes(b"as it\r\n\n stands ")
    lines(tmp_path / "rte.jsonl", {"sentence1": "a", "sentence2": "b", "label": 1})
    lines(tmp_path / "rte.train.jsonl", {"sentence1": "c", "sentence2": "d", "label": 0})
    assert [d["text"] for d in documents(TASKS["lambada"], tmp_path, 0).test] == [
        "one\u2028two\x85 \f three",
        "four five",
    ]
    assert documents(TASKS["ptb"], tmp_path, 0).test == [{"text": "first\n\nsecond"}]
    assert documents(TASKS["wikitext2"], tmp_path, 0).test == [{"text": "as it\r\n\n stands "}]
    rte = documents(TASKS["rte"], tmp_path, 1)
    assert (len(rte.test), len(rte.train)) == (1, 1) and documents(TASKS["rte"], tmp_path, 0).train == []
    assert rte.digest != documents(TASKS["rte"], tmp_path, 0).digest


@pytest.mark.parametrize(
    ("text", "before"),
    [("she said  hello", "she said "), ("she said hello to\nMary ", "she said hello to"), ("a\tb", "a")],
)
def test_the_last_word_is_what_follows_the_last_white_space(text, before):
    found, word = last_word_of({"text": text})
    assert found == before and word == text.split()[-1]


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("rte.jsonl", '{"sentence1": "a", "sentence2": "b", "label": 1}\n{"sent', r"rte\.jsonl:2"),
        ("rte.jsonl", '{"sentence1": "a", "label": 1}\n', r"rte\.jsonl:1: 'sentence2'.* None"),
        ("rte.jsonl", '{"sentence1": "a", "sentence2": "b", "label": "yes"}', "'label'.*'yes'"),
        ("rte.jsonl", '{"sentence1": "a", "sentence2": "b", "label": 2}', "document 1.* 2"),
        ("rte.jsonl", "[1]\n", r"rte\.jsonl:1: 'sentence1'"),
        ("rte.jsonl", "", r"rte\.jsonl"),
        ("lambada.txt", "alone\n", "'alone'"),
        ("wikitext2.txt", b"\xff\xfe", r"wikitext2\.txt.* byte 0"),
        ("wikitext2.txt", "  \n", r"wikitext2\.txt"),
    ],
)
def test_broken_files_are_named(tmp_path, file, text, named):
    path = tmp_path / file
    path.write_bytes(text) if isinstance(text, bytes) else path.write_text(text)
    with pytest.raises(UserError, match=named):
        documents(TASKS[file.split(".")[0]], tmp_path, 0)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(UserError, match="--data-dir"):
        documents(TASKS["rte"], tmp_path / "no", 0)
    with pytest.raises(UserError, match=r"ptb\.jsonl or ptb\.txt"):
        documents(TASKS["ptb"], tmp_path, 0)
    lines(tmp_path / "rte.jsonl", {"sentence1": "a", "sentence2": "b", "label": 1})
    with pytest.raises(UserError, match=r"rte\.train\.jsonl"):
        documents(TASKS["rte"], tmp_path, 1)
    lines(tmp_path / "rte.train.jsonl", {"sentence1": "a", "sentence2": "b", "label": 1})
    with pytest.raises(UserError, match="--shots"):
        documents(TASKS["rte"], tmp_path, 2)


def test_the_hub_by_name(monkeypatch):
    """What is asked of `datasets`, and what becomes of its answer; without a network one line says what to do."""
    import datasets

    asked = []

    def load(path, name=None, revision=None, split=None):
        asked.append((path, name, revision, split))
        glue = {"sentence1": ["a"], "sentence2": ["b"], "label": [0], "idx": [7]}
        column = "sentence" if path == "ptb-text-only/ptb_text_only" else "text"
        return datasets.Dataset.from_dict(glue if path == "nyu-mll/glue" else {column: ["one two", "three"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert documents(TASKS["lambada"], None, 5).test == [{"text": "one two"}, {"text": "three"}]
    for name in ("wikitext2", "ptb", "wikitext103", "1bw"):
        assert documents(TASKS[name], None, 5).test == [{"text": "one two\n\nthree"}]
    for name in ("rte", "mrpc"):
        found = documents(TASKS[name], None, 1)
        assert found.test == found.train == [{"sentence1": "a", "sentence2": "b", "label": 0}]
    assert asked == [
        ("EleutherAI/lambada_openai", "default", None, "test"),
        ("Salesforce/wikitext", "wikitext-2-raw-v1", None, "test"),
        ("ptb-text-only/ptb_text_only", None, "refs/convert/parquet", "test"),
        ("Salesforce/wikitext", "wikitext-103-raw-v1", None, "test"),
        ("billion-word-benchmark/lm1b", None, "refs/convert/parquet", "test"),
        ("nyu-mll/glue", "rte", None, "validation"),
        ("nyu-mll/glue", "rte", None, "train"),
        ("nyu-mll/glue", "mrpc", None, "validation"),
        ("nyu-mll/glue", "mrpc", None, "train"),
    ]

    def fail(**_):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(OSError, match=r"ConnectionError.*1bw\.jsonl or 1bw\.txt"):
        documents(TASKS["1bw"], None, 0)
