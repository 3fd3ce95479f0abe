"""A run's folder is read as far as it can be: torn, growing, set back, large, or half of it missing."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mst_scale.cli import main
from mst_scale.errors import UserError
from mst_scale.report import Report
from mst_scale.report.groups import group_runs
from mst_scale.report.reader import Reader
from mst_scale.report.series import Thinned, smoothed, spread
from mst_scale.report.style import as_key
from mst_scale.report.summary import rows as table_rows
from tests.support import reported_runs as runs
from tests.support import tiny_run


def read(folder: Path):
    reader = Reader(folder)
    reader.update()
    return reader.run


def test_rows_become_series_spans_layers_and_spikes(tmp_path):
    run = read(runs.write(tmp_path / "run"))
    assert (run.method, run.seed, run.steps, run.step, run.finished) == ("mst", 1, 600, 600, True)
    assert run.series.rows == 60 and run.notes == []
    assert run.series.last("seconds")[-1] == run.seconds == pytest.approx(36)
    assert [span.phase for span in run.spans] == ["warmup", "ultra", "restore", "dense"]
    ends = [piece.stop for piece in run.schedule.phases]
    assert [span.last for span in run.spans] == ends, "phases end where the schedule says, not at the next row"
    assert [span.stride for span in run.spans] == [8, 8, 8, 1]
    assert list(run.spikes) == [(400, pytest.approx(20, rel=0.5))] and run.spike_count == 1
    assert run.layers.names == runs.layer_names(run.config)
    assert run.layers.matrix("churn").shape == (13, len(run.layers.steps))
    assert run.sparsest == pytest.approx(0.96) and run.densest["wte.weight"] == pytest.approx(0.04)
    assert [snapshot.phase for snapshot in run.snapshots] == ["warmup", "warmup", "ultra", "restore", "dense"]


def test_phases_are_known_without_a_config_too(tmp_path):
    folder = runs.write(tmp_path / "run")
    (folder / "config.json").unlink()
    run = read(folder)
    assert [span.phase for span in run.spans] == ["warmup", "ultra", "restore", "dense"]
    assert any("no config.json" in note for note in run.notes)


def test_a_torn_last_line_waits_for_its_end(tmp_path):
    folder = runs.write(tmp_path / "run", until=100)
    path = folder / "metrics.jsonl"
    line = json.dumps({**json.loads(path.read_text().splitlines()[-1]), "step": 110})
    with path.open("a") as file:
        file.write(line[:30])
    reader = Reader(folder)
    reader.update()
    assert reader.run.step == 100 and not any("could not be read" in note for note in reader.run.notes)
    assert not reader.update(), "nothing new"
    with path.open("a") as file:
        file.write(line[30:] + "\n")
    assert reader.update() and reader.run.step == 110 and reader.run.series.rows == 11


def test_a_run_that_was_set_back_is_read_anew(tmp_path):
    folder = runs.write(tmp_path / "run", until=300)
    reader = Reader(folder)
    reader.update()
    path = folder / "metrics.jsonl"
    kept = path.read_text().splitlines(keepends=True)[:10]
    draft = folder / "draft"
    draft.write_text("".join(kept))
    os.replace(draft, path)
    reader.update()
    assert reader.run.step == 100 and reader.run.series.rows == 10


def test_a_file_that_was_set_back_and_has_grown_again_is_read_anew(tmp_path):
    folder = runs.write(tmp_path / "run", until=300)
    reader, path = Reader(folder), folder / "metrics.jsonl"
    reader.update()
    lines = path.read_text().splitlines(keepends=True)
    again = [json.dumps({**json.loads(line), "loss": 7.5, "again": "x" * 50}) + "\n" for line in lines[10:]]
    path.write_text("".join([*lines[:10], *again]))
    reader.update()
    assert reader.run.step == 300 and reader.run.series.rows == 30 and reader.run.last["loss"] == 7.5
    assert not any("could not be read" in note for note in reader.run.notes)


def test_a_run_whose_loss_was_not_finite_in_the_end_is_not_finished(tmp_path):
    folder = runs.write(tmp_path / "run")
    path = folder / "metrics.jsonl"
    *before, last = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*before, json.dumps({**json.loads(last), "val_loss": None}) + "\n"]))
    config = json.loads((folder / "config.json").read_text())
    (folder / "run.json").write_text(json.dumps({"config": config, "starts": [{"how": "diverged"}]}))
    run = read(folder)
    assert not run.finished and run.ended and run.last_val_loss is None


def test_damaged_lines_odd_values_and_damaged_files_are_notes(tmp_path):
    folder = runs.write(tmp_path / "run", until=200)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 210, "lo\n[1, 2]\nnull\n{"step": "many"}\n')
        file.write('{"step": 220, "loss": null, "grad_norm": null, "phase": "ultra"}\n')
        file.write('{"step": 220, "loss": 1.0}\n')  # written twice
    (folder / "eval.json").write_text("{")
    (folder / "run.json").write_text("[]")
    min((folder / "snapshots").glob("*.npz")).write_bytes(b"PK nothing")
    run = read(folder)
    assert run.step == 220 and math.isnan(run.series.mean("loss")[-1])
    assert run.seconds == pytest.approx(12), "a row that does not know its time or step_ms adds nothing"
    notes = "\n".join(run.notes)
    assert "4 lines of metrics.jsonl" in notes
    assert "eval.json cannot be read" in notes and "step00000000.npz cannot be read" in notes
    assert "not finished: step 220 of 600" in notes


ODD = (
    '{"step": 5, "layers": {"a": 1}}',
    '{"step": 6, "layers": [1], "attention_stride": "wide", "grad_norm": "large", "val_loss": "low"}',
    '{"step": 7, "layers": {"a": {"density": "thin", "pruned": "many", "grown": null}}, "loss": {}, "seconds": null}',
    '{"step": 8, "step_ms": "slow", "flops": "some", "flops_dense": [], "tokens": {}, "phase": 3, "loss": 1%s}'
    % ("0" * 400),
    '{"step": NaN, "loss": 1.0}',
)
NO_ROWS = ("[" * 100_000, f'{{"step": 1{"0" * 23}, "loss": 1.0}}', '{"step": -3}', '{"step": true}')


def test_lines_without_a_possible_step_are_damaged_and_hide_no_later_row(tmp_path):
    folder = runs.write(tmp_path / "run", until=100)
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(f"{line}\n" for line in (*NO_ROWS, json.dumps({**last, "step": 110})))
    made = Report([folder], tmp_path / "report")
    made.read()
    assert made.write(pictures=False)["runs"][0]["step"] == 110
    assert f"{len(NO_ROWS)} lines of metrics.jsonl" in "\n".join(read(folder).notes)


@pytest.mark.parametrize("first", range(len(ODD)))
@pytest.mark.parametrize(
    "config",
    ['{"mst": null, "training": null, "model": null}', '{"mst": {"sparsity": null}, "training": {"steps": "many"}}'],
)
def test_odd_rows_and_configs_never_stop_a_report(tmp_path, first, config):
    (tmp_path / "metrics.jsonl").write_text("".join(f"{row}\n" for row in ODD[first:]))
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "run.json").write_text('{"starts": [1, 2], "events": {"a": 1}}')
    run = read(tmp_path)
    assert run.method == "?" and run.steps == 0 and run.seed is None
    assert run.step == (8 if first < 4 else 0) and run.last_val_loss is None
    assert any("1 line of metrics.jsonl" in note for note in run.notes)
    if first == 0:
        made = Report([tmp_path], tmp_path / "report")
        made.read()
        assert made.write(pictures=False)["runs"][0]["step"] == 8


def test_rows_without_wall_clock_give_the_time_of_their_steps(tmp_path):
    folder = runs.write(tmp_path / "run")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        del row["seconds"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read(folder)
    assert run.seconds == pytest.approx(600 * 0.0512) and "time is that of the steps alone" in run.notes[0]


def test_an_empty_run_and_no_run(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    with pytest.raises(UserError, match="is not a run: it has neither"):
        Reader(folder)
    with pytest.raises(UserError, match="there is no folder"):
        Reader(tmp_path / "nowhere")
    (folder / "metrics.jsonl").touch()
    assert "no row in metrics.jsonl yet" in read(folder).notes


BIG = """
import json, sys, time, resource
from pathlib import Path
from mst_scale.report.reader import Reader
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.process_time()
reader = Reader(Path(sys.argv[1])); reader.update(); run = reader.run
run.series.mean("loss"); run.layers.matrix("churn")
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({"seconds": time.process_time() - start, "grown_kb": grown, "rows": run.series.rows,
    "points": len(run.series.last("step")), "layers": run.layers.matrix("churn").shape, "spikes": run.spike_count}))
"""


@pytest.mark.slow
def test_140_000_rows_with_50_layers_take_seconds_and_bounded_memory(tmp_path):
    """A row every step, 50 layers every 100 steps; the file is 85 MB, of which a few stay in memory."""
    folder = tmp_path / "big"
    folder.mkdir()
    row = next(iter(runs.rows(runs.config(), 10)))
    row.pop("layers", None)
    rng = np.random.default_rng(1)
    layers = {f"blocks.{i}.mlp.up.weight": runs.layer(0.04, rng) for i in range(50)}
    text, topology = json.dumps(row)[1:], ', "layers": ' + json.dumps(layers) + "}\n"
    head, _, tail = text.partition('"step": 10')
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 140_001):
            line = f'{{{head}"step": {step}{tail}'
            file.write(line[:-1] + topology if step % 100 == 0 else line + "\n")
    size = (folder / "metrics.jsonl").stat().st_size
    assert size > 60e6
    child = subprocess.run(
        [sys.executable, "-c", BIG, str(folder)],
        env=tiny_run.environment(), capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    found = json.loads(child.stdout)
    assert found["rows"] == 140_000 and found["points"] <= 1024
    assert found["layers"][0] == 50 and found["layers"][1] <= 256
    assert found["seconds"] < 20, "seconds of processor time: 4 on a core of 2020"
    assert found["grown_kb"] < 60_000, "below the size of the file"


# --- groups ---


def test_runs_that_differ_in_their_seed_alone_are_one_group(tmp_path):
    folders = [runs.write(tmp_path / f"mst-{seed}", seed=seed) for seed in (1, 2, 3)]
    folders += [runs.write(tmp_path / "long", steps=900), runs.write(tmp_path / "dense", "dense", steps=400)]
    found = [read(folder) for folder in folders]
    groups = group_runs(found)
    assert [len(group.runs) for group in groups] == [3, 1, 1]
    assert [group.name for group in groups] == ["mst, steps 600", "mst, steps 900", "dense"]
    curve = spread([(run.series.last("step"), run.series.mean("loss")) for run in groups[0].runs])
    by_hand = np.array([run.series.mean("loss") for run in found[:3]])
    np.testing.assert_allclose(curve.mean, by_hand.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(curve.high, by_hand.max(axis=0), rtol=1e-9)
    (row, *_) = table_rows(groups)
    assert row["val_loss"] == pytest.approx(2 + 4 * math.exp(-6) + 0.02)
    assert row["perplexity_range"][1] / row["perplexity_range"][0] == pytest.approx(math.exp(0.02))
    last = found[0].last
    assert row["reduction"] == pytest.approx(last["flops_dense"] / last["flops"])
    assert row["reduction_causal"] == pytest.approx(last["flops_dense_causal"] / last["flops_causal"])


def test_seeds_of_different_length_are_averaged_where_they_are(tmp_path):
    folders = [runs.write(tmp_path / "a", seed=1), runs.write(tmp_path / "b", seed=2, until=300)]
    (group,) = group_runs([read(folder) for folder in folders])
    curve = spread([(run.series.last("step"), run.series.mean("loss")) for run in group.runs])
    assert curve.x[-1] == 600 and np.isfinite(curve.mean).all() and curve.runs == 2
    assert (curve.high[curve.x > 300] == curve.low[curve.x > 300]).all()


def test_smoothing_keeps_a_line_and_its_ends():
    x = np.arange(101.0)
    _, y = smoothed((x, 3 * x + 1), fraction=0.1)
    np.testing.assert_allclose(y, 3 * x + 1)
    noisy = np.where(np.arange(101) % 2 == 0, 1.0, -1.0)
    assert np.abs(smoothed((x, noisy), fraction=0.1)[1][10:90]).max() < 0.2


# --- thinned series ---


@pytest.mark.parametrize("rows", [1, 7, 64, 65, 5_000, 20_001])
def test_buckets_are_means_and_extremes_of_neighbours(rows):
    rng = np.random.default_rng(rows)
    whole = np.stack([np.arange(1.0, rows + 1), rng.standard_normal(rows)], axis=1)
    whole[rng.random(rows) < 0.2, 1] = np.nan
    table = Thinned(["step", "loss"], limit=64)
    for row in whole:
        table.add(row.tolist())
    ends = table.last("step").astype(int)
    assert len(ends) <= 64 and ends[-1] == rows and table.rows == rows
    for begin, end, mean, low, high in zip(
        [0, *ends[:-1]], ends, table.mean("loss"), table.low("loss"), table.high("loss"), strict=True
    ):
        values = whole[begin:end, 1]
        values = values[np.isfinite(values)]
        if values.size:
            assert mean == pytest.approx(values.mean(), rel=1e-12, abs=1e-12)
            assert (low, high) == (values.min(), values.max())
        else:
            assert np.isnan(mean) and np.isnan(low)
    last = [whole[begin:end, 1] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    expected = [part[np.isfinite(part)][-1] if np.isfinite(part).any() else np.nan for part in last]
    np.testing.assert_array_equal(table.last("loss"), expected)


def test_reading_on_the_way_changes_nothing():
    once, often = Thinned(["x"], 8), Thinned(["x"], 8)
    for i in range(10_000):
        once.add([float(i)])
        often.add([float(i)])
        if i % 997 == 0:
            often.mean("x")
    np.testing.assert_array_equal(once.mean("x"), often.mean("x"))


def test_what_is_not_finite_is_missing():
    table = Thinned(["x"], 4)
    for value in (1.0, np.inf, np.nan, 3.0):
        table.add([value])
    np.testing.assert_array_equal(table.mean("x"), [1.0, np.nan, np.nan, 3.0])


def test_any_name_of_a_parameter_and_of_a_run_is_shown(tmp_path):
    keys = [as_key(name) for name in ("blocks.0.mlp.up", "m.user/item", "m.user.item", 'm."<b>')]
    assert len(set(keys)) == 4 and keys[0] == "blocks-0-mlp-up"
    assert all(re.fullmatch("[A-Za-z0-9_-]+", key) for key in keys)
    made = [runs.write(tmp_path / name, "dense", steps=100, seed=1) for name in (r"a$\frac$b", "_under")]
    for path in made:
        (path / "config.json").unlink()
        (path / "run.json").unlink(missing_ok=True)
    assert main(["report", *map(str, made), "--out", str(tmp_path / "out")]) == 0
    assert "_under" in (tmp_path / "out" / "index.html").read_text()
