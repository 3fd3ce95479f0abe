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
