"""The names of runs in charts and tables."""

import json

from mst_scale.report.groups import group_runs
from mst_scale.report.reader import Reader
from tests.support import reported_runs as runs


def test_runs_that_differ_only_in_their_corpus_have_different_names(tmp_path):
    """Their folders begin with the same 34 characters, which is all that fits into a legend."""
    found = []
    for corpus in ("a", "b"):
        folder = runs.write(tmp_path / f"gpt2-small-mst-interval-100-on-corpus-{corpus}", steps=20)
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "data": {"dir": corpus}}))
        reader = Reader(folder)
        reader.update()
        found.append(reader.run)
    assert [group.name for group in group_runs(found)] == [run.name for run in found]


def test_names_prefer_keys_that_explain_a_result(tmp_path):
    """Intervals of logging and evaluation come first in a config, but do not explain why losses differ."""
    found = []
    for number, variation in enumerate(("sv", "sparse"), start=1):
        folder = runs.write(tmp_path / str(number), steps=20)
        path = folder / "config.json"
        raw = json.loads(path.read_text())
        raw["training"] |= {"log_every": number, "eval_every": 10 * number, "eval_tasks": None}
        raw["mst"]["sparsity"] = {**raw["mst"].get("sparsity", {}), "variation": variation}
        path.write_text(json.dumps(raw))
        reader = Reader(folder)
        reader.update()
        found.append(reader.run)
    names = [group.name for group in group_runs(found)]
    assert names == ["mst, variation sv, log_every 1", "mst, variation sparse, log_every 2"]
