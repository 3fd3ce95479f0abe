"""A report of a run that lacks something draws the rest, and notes what is missing."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from matplotlib.figure import Figure as Canvas

from mst_scale.report import Report
from mst_scale.report.comparison import comparison_charts
from mst_scale.report.groups import group_runs
from mst_scale.report.reader import Reader
from mst_scale.report.style import LIGHT, Missing, Plot, render
from mst_scale.report.summary import results
from mst_scale.report.topology_charts import run_charts
from mst_scale.report.weight_charts import weight_charts
from mst_scale.run_logging import snapshots
from tests.ranks.report.test_report import report, row_of
from tests.support import reported_runs as runs


def test_a_run_of_which_much_is_missing_is_drawn_as_far_as_it_goes(tmp_path, capsys):
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.5}\n{"step": 3, "lo')
    found = report(capsys, str(folder))
    assert [figure["name"] for figure in found["figures"]] == ["loss-steps"]
    notes = "\n".join(found["notes"])
    for name in ("loss-flops, loss-flops-causal, loss-time", "gradient-norm", "throughput", "std-layers, std-phases"):
        assert f"no figure of {name}" in notes
    assert "metrics.jsonl has no sparsity" in notes
    assert '<p class="lead">at step 2</p>' in (folder / "report" / "index.html").read_text()
    (folder / "metrics.jsonl").write_text("")
    assert report(capsys, str(folder))["figures"] == []


OPTIONAL = (
    "loss", "tokens", "lr", "grad_norm", "phase", "target_sparsity", "sparsity", "update_fraction", "attention",
    "attention_stride", "flops", "flops_dense", "flops_causal", "flops_dense_causal", "tokens_per_s", "step_ms",
    "seconds", "peak_memory_bytes", "state_bytes", "comm_bytes", "units", "dead_units", "val_loss", "layers",
)  # fmt: skip


NEEDED = {
    "loss-flops": "flops", "gradient-norm": "grad_norm", "throughput": "tokens_per_s", "sparsity": "sparsity",
    "update-fraction": "update_fraction", "dead-units": "units", "churn": "layers",
}  # fmt: skip


def lacking(folder: Path, keys: Iterable[str], blocks: Iterable[str] = ()) -> Path:
    """A run whose rows have none of these keys and whose config none of these blocks."""
    runs.write(folder, blocks=1, steps=200)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{key: value for key, value in row.items() if key not in keys} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    resolved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in resolved.items() if k not in blocks}))
    return folder


def drawable(plot: Plot) -> bool:
    try:
        render(plot, LIGHT)
    except Missing:
        return False
    return True


@pytest.mark.full
@pytest.mark.parametrize("absent", [*((key,) for key in OPTIONAL), OPTIONAL[1:]], ids=lambda keys: keys[0])
def test_rows_of_other_loops_may_lack_any_key(tmp_path, absent):
    """What does not need the key is drawn all the same, and stands in the table."""
    reader = Reader(lacking(tmp_path / "run", absent))
    reader.update()
    groups = group_runs([reader.run])
    drawn = {plot.key for plot in (*comparison_charts(groups), *run_charts(reader.run)) if drawable(plot)}
    assert "loss-steps" in drawn, "training or validation"
    assert {figure for figure in NEEDED if figure not in drawn} == {f for f, key in NEEDED.items() if key in absent}
    told = [row[0] for row in results(groups).rows]
    assert ("tokens" in told) == ("tokens" not in absent) and ("FLOPs" in told) == ("flops" not in absent)


@pytest.mark.full
@pytest.mark.parametrize("blocks", [("model", "data"), ("model", "data", "training", "mst")])
def test_a_loop_of_ones_own_may_have_no_model_in_its_config(tmp_path, blocks):
    """And rows with nothing but a loss, or without any."""
    for name, absent in (("a", OPTIONAL[1:]), ("b", OPTIONAL)):
        made = Report([lacking(tmp_path / name, absent, blocks)], tmp_path / f"page-{name}")
        made.read()
        found = made.write(pictures=False)
        text = re.sub(r"base64,[\w+/=\s]+", "", Path(found["page"]).read_text())  # pictures may spell anything
        assert row_of(text, "batch") == ["8 sequences"] and row_of(text, "steps")[0].startswith("200")
        assert ">model<" not in text and ">tokens<" not in text and "None" not in text and "nan" not in text
        assert ("loss-steps" in [figure["name"] for figure in found["figures"]]) == (name == "a")


def test_what_only_some_rows_tell_is_known_at_the_end(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    told = [{"step": 10, "loss": 3.0, "flops": 5e12, "tokens": 640}, {"step": 20, "loss": 2.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
    made = Report([folder], tmp_path / "page")
    made.read()
    (row,) = made.write(pictures=False)["runs"]
    assert (row["step"], row["flops"], row["tokens"]) == (20, 5e12, 640)


def test_a_panel_that_would_say_nothing_is_a_note(tmp_path):
    """What is constant, and how many weights were ever active in a run that starts dense."""

    def same(row):
        for layer in row.get("layers", {}).values():
            layer |= {"ever_active": 1.0, "density": 0.3}
        return row | {"update_fraction": 0.3, "units": {"mlp": {"dead": 0, "all": 9}}}

    folder = runs.write(tmp_path / "run", "rigl", blocks=1, steps=200)
    lines = [same(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    made = Report([folder], tmp_path / "page")
    made.read()
    found = made.write(pictures=False)
    assert {"prune-grow", "churn"} <= {figure["name"] for figure in found["figures"]}
    assert [note for note in found["notes"] if "no figure" in note] == [
        "no figure of sparsity: the sparsity is 80 % throughout",
        "no figure of update-fraction: the update fraction is 30 % throughout",
        "no figure of dead-units: they are constant, 0 % of MLP neurons",
        "no figure of exploration: 100 % of the weights of every layer were ever active",
        "no figure of densities: all layers have the same density",
    ]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_panel_of_a_heat_map_is_empty(tmp_path, count):
    folder = runs.write(tmp_path / "run", steps=600)
    for path in snapshots.paths(folder)[1 + count :]:
        path.unlink()
    reader = Reader(folder)
    reader.update()
    for plot in weight_charts(reader.run, all_blocks=True)[2:]:  # the heat maps
        figure = Canvas(layout="constrained")
        plot.draw(figure, LIGHT)
        panels = [axes for axes in figure.axes if axes.images]
        assert len(panels) == 2 * count and all(axes.get_visible() for axes in figure.axes)
