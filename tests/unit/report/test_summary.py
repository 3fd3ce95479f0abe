"""The facts that a report states about a run."""

import json

import pytest

from mst_scale.config import load
from mst_scale.report import summary
from mst_scale.report.groups import group_runs
from mst_scale.report.reader import Reader
from tests.support import reported_runs as runs


def test_a_limit_of_the_sparse_phase_is_stated_with_the_phases_that_follow_from_it(tmp_path):
    folder = runs.write(tmp_path / "run", steps=600, seed=1)
    resolved = json.loads((folder / "config.json").read_text())
    resolved["mst"].setdefault("sparsity", {})["sparse_tokens"] = 0.5
    (folder / "config.json").write_text(json.dumps(resolved))
    reader = Reader(folder)
    reader.update()
    facts = summary.recipe(reader.run)
    assert facts["sparsity"].endswith("for at most 0.5 tokens per parameter")
    run = load(resolved)
    sparse = 0.5 * run.model.weights / (run.deepspeed["train_batch_size"] * run.model.seq_length)
    assert run.schedule.sparse_until == pytest.approx(sparse, abs=1) and sparse < 500
    assert f"restoration to step {run.schedule.sparse_until}, dense to step 600" in facts["phases"]


@pytest.mark.parametrize(("reduction", "claims"), [(1.04, False), (1.06, True)])
def test_a_reduction_that_rounds_to_nothing_is_no_headline(tmp_path, reduction, claims):
    folder = runs.write(tmp_path / "run", steps=600)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row | {"flops_dense": reduction * row["flops"]} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = Reader(folder)
    reader.update()
    assert ("1.1× fewer FLOPs" in summary.headline(group_runs([reader.run]))) == claims


def test_sizes_have_the_units_of_plans(tmp_path):
    folder = runs.write(tmp_path / "run", steps=600)
    sizes = {"peak_memory_bytes": 12_900_000_000, "state_bytes": 201_000_000, "comm_bytes": 4_200}
    rows = [json.loads(line) | sizes for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = Reader(folder)
    reader.update()
    cells = dict(summary.results(group_runs([reader.run])).rows)
    assert [cells[name] for name in ("memory", "states and gradients", "sent per step")] == [
        "12.9 GB",
        "201 MB",
        "4.2 kB",
    ]
