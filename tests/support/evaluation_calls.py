"""Calls `mst eval` for the tests, and holds the documents that they use."""

from __future__ import annotations

import json
from pathlib import Path

from mst_scale.cli import main

CONTEXT = 64
PASSAGES = ["the cat sat on the mat", "a b a b a b", "x y"]
TEXT = "def f(x):\n    return x\n\n" * 9
PAIRS = [("a cat", "a dog", 1), ("it rains", "it is wet", 0), ("one", "one", 0), ("two", "three", 1)]
EXAMPLES = [("p", "q", 0), ("r", "s", 1)]


def write(path: Path, docs: list[dict]) -> None:
    path.write_text("".join(json.dumps(doc) + "\n" for doc in docs))


def evaluated(*words: str, capsys) -> dict:
    assert main(["eval", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def rejected(capsys, *words: str) -> str:
    assert main(["eval", *words]) in (1, 2)
    said = [line for line in capsys.readouterr().err.splitlines() if "cannot be reached" not in line]
    assert len(said) == 1, said
    return said[0]
