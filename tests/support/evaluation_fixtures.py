"""One small run and the tasks' files, for all tests of `mst eval`."""

from pathlib import Path

import pytest

from mst_scale.data.prepare import prepare
from mst_scale.data.recipe import Recipe
from tests.support import pool
from tests.support.evaluation_calls import CONTEXT, EXAMPLES, PAIRS, PASSAGES, TEXT, write
from tests.support.whole_runs import arguments, attempt


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    """A byte-level run of a few steps."""
    folder = tmp_path_factory.mktemp("eval")
    prepare(Recipe("stdlib", "byte", max_bytes=60_000), folder / "bytes")
    blocks = {"model": {"seq_length": CONTEXT, "vocab_size": 257}, "data": {"dir": str(folder / "bytes")}}
    argv = arguments(folder, "run", **blocks, training={"steps": 6})
    assert pool.run(attempt, 2, argv) == [(0, "")] * 2
    return folder / "run"


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write(folder / "lambada.jsonl", [{"text": text} for text in PASSAGES])
    for name in ("wikitext2", "ptb", "wikitext103"):
        (folder / f"{name}.txt").write_text(TEXT)
    write(folder / "1bw.jsonl", [{"text": text} for text in TEXT.split("\n\n")])
    for name in ("rte", "mrpc"):
        for file, some in ((f"{name}.jsonl", PAIRS), (f"{name}.train.jsonl", EXAMPLES)):
            write(folder / file, [{"sentence1": a, "sentence2": b, "label": c} for a, b, c in some])
    return folder
