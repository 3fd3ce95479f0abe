"""`mst report` as a user calls it: every figure of one run and of several; what is missing is a note; it watches."""

import contextlib
import html
import json
import re
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from PIL import Image

from mst_scale.cli import main
from mst_scale.report import Figure, Report, Section, render_page, summary
from mst_scale.report.comparison import FLOPS, STEPS, TIME, comparison_charts, gradient_norm, loss, throughput
from mst_scale.report.groups import group_runs
from mst_scale.report.reader import Reader
from mst_scale.report.style import DARK, LIGHT, Missing, render
from mst_scale.report.summary import headline
from mst_scale.report.summary import rows as table_rows
from mst_scale.report.topology_charts import run_charts
from tests.support import pool, tiny_run
from tests.support import reported_runs as runs
from tests.support.whole_runs import MST, arguments, attempt

ONE_RUN = [
    "loss-steps", "loss-flops", "loss-flops-causal", "loss-time", "gradient-norm", "throughput", "sparsity",
    "update-fraction", "prune-grow", "dead-units", "churn", "layers-pruned", "layers-grown", "densities", "std-layers",
    "std-phases",
    *(f"weights-blocks-{i}-{kind}" for kind in ("attention-qkv", "attention-proj", "mlp-up", "mlp-down")
      for i in (0, 1)),
]  # fmt: skip


def report(capsys, *argv: str) -> dict:
    assert main(["report", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.full
def test_a_real_run_draws_every_figure_as_page_png_and_svg(tmp_path, capsys):
    block = {"model": {"n_layer": 2}, "training": {"steps": 30, "eval_every": 10, "save_every": 0}}
    assert pool.run(attempt, 2, arguments(tmp_path, mst=MST, **block)) == [(0, "")] * 2
    found = report(capsys, str(tmp_path / "out"))
    names = [figure["name"] for figure in found["figures"]]
    left_out = [name for name in ONE_RUN if name not in names]
    assert set(left_out) <= {"loss-flops-causal", "dead-units"} and names == [n for n in ONE_RUN if n not in left_out]
    assert "no figure of exploration: 100 % of the weights of every layer were ever active" in found["notes"]
    folder = tmp_path / "out" / "report"
    assert found["page"] == str(folder / "index.html")
    text = (folder / "index.html").read_text()
    for figure in found["figures"]:
        assert f'<figure id="{figure["name"]}">' in text
        assert len(figure["files"]) == 4 and all((folder / name).stat().st_size > 1000 for name in figure["files"])
    shutil.rmtree(tmp_path / "out" / "snapshots")
    again = Report([tmp_path / "out"], tmp_path / "bare")
    again.read()
    bare = again.write(pictures=False)
    assert "no snapshots of the weights: those of checkpoint step00000030 are shown" in bare["notes"]
    drawn = [figure["name"] for figure in bare["figures"]]
    assert "std-layers" in drawn and [name for name in names if name not in drawn] == ["std-phases"]
    (row,) = found["runs"]
    last = tiny_run.rows(tmp_path / "out")[-1]
    assert row["step"] == row["steps"] == 30 and row["val_loss"] == last["val_loss"] and row["flops"] == last["flops"]
    assert row["dead_units"] == last["dead_units"] == 0 and row["units"] == 2 * (64 + 16 + 16)
    assert row["reduction"] == last["flops_dense"] / last["flops"] > 1 and row["seconds"] > 0
    for figure in found["figures"]:
        for name in figure["files"]:
            if name.endswith(".png"):
                picture = Image.open(folder / name).convert("L")
                assert picture.width >= 1280, "at half size a font of 10 points is 14 pixels high"
                assert picture.getpixel((1, 1)) == (24 if name.endswith("-dark.png") else 255), "the paper's colour"


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Three seeds, another length, another method, another size."""
    folder = tmp_path_factory.mktemp("compared")
    made = [runs.write(folder / f"mst-{seed}", seed=seed) for seed in (1, 2, 3)]
    tasks = {"lambada": {"metrics": {"acc": 0.6074, "ppl": 13.22}, "documents": 5153}}
    settings = {"context": 64, "stride": 32, "shots": 0}
    (made[0] / "eval.json").write_text(json.dumps({"model": "x", "step": 10, "settings": settings, "tasks": tasks}))
    events = [{"time": "2026-01-01T00:00:00", "start": 0, "what": "spike", "step": 40, "loss": 9.5}]
    starts = [{"time": "2026-01-01T00:00:00"}, {"time": "2026-01-02T00:00:00", "from_step": 30}]
    (made[0] / "run.json").write_text(json.dumps({"starts": starts, "events": events}))
    made.append(runs.write(folder / "dense", "dense", steps=400, width=128))
    made.append(runs.write(folder / "rigl", "rigl", steps=900, until=700))
    return folder, made


def test_runs_of_other_lengths_methods_and_sizes_are_compared(compared):
    folder, made = compared
    both = Report(made, folder / "both")
    both.read()
    found = both.write(pictures=False)
    names = [figure["name"] for figure in found["figures"]]
    assert {"loss-flops-causal", "perplexity-last", "std-scale"} <= set(names)
    assert {"run1-sparsity", "run3-churn", "run2-std-layers", "run1-weights-blocks-0-mlp-up"} <= set(names)
    assert "run1-dead-units" in names and "run2-dead-units" not in names
    assert [row["dead_units"] for row in found["runs"]][:2] == [2, None]
    assert "run2-churn" not in names and "run2-sparsity" not in names, "a dense run prunes nothing"
    assert [(row["name"], len(row["runs"])) for row in found["runs"]] == [("mst", 3), ("dense", 1), ("rigl", 1)]
    text = (folder / "both" / "index.html").read_text()
    assert "Sparsity: dense" not in text
    assert "mst (3 seeds)" in text and "one of 3 seeds" in text
    assert row_of(text, "dead units") == ["2 of 300", "–", "18 of 300"]
    assert row_of(text, "lambada acc") == ["0.6074", "–", "–", "–", "–"], "what mst eval has left"
    assert row_of(text, "stride") == ["32", "–", "–", "–", "–"]
    assert row_of(text, "2026-01-01 00:00") == ["spike: step 40, loss 9.5"], "what run.json tells"
    assert row_of(text, "2026-01-02 00:00") == ["started again from step 30"]
    assert "Recipe of all runs" in text and row_of(text, "model") == [
        "gpt, 3 layers, 2 heads, 64 wide, vocabulary 64", "gpt, 3 layers, 2 heads, 128 wide, vocabulary 64",
        "gpt, 3 layers, 2 heads, 64 wide, vocabulary 64",
    ]  # fmt: skip
    assert row_of(text, "method") == ["mst", "dense", "rigl"] and row_of(text, "seed") == ["1, 2, 3", "1", "1"]
    assert row_of(text, "precision") == ["fp32"], "said once where all runs agree"
    assert "rigl: not finished: step 700 of 900" in found["notes"]
    assert "rigl: no figure of sparsity: the sparsity is 80 % throughout" in found["notes"]
    assert all(note.partition(":")[0] in {run.name for run in both.runs} for note in found["notes"]), "each names a run"


def row_of(text: str, name: str) -> list[str]:
    """The cells beside this name in the page's first table that has it."""
    (line, *_) = re.findall(rf'<tr><th scope="row">{re.escape(name)}</th>(.*?)</tr>', text)
    return [html.unescape(cell) for cell in re.findall("<td>(.*?)</td>", line)]


def test_a_single_run_stands_upright_with_its_recipe_and_its_machine(tmp_path):
    folder = runs.write(tmp_path / "run")
    start = {
        "time": "2026-01-01T10:00:00+0000", "ended": "2026-01-01T11:00:00+0000", "how": "finished",
        "from_step": 0, "last_step": 600, "ranks": 3, "hosts": ["a", "a", "b"], "device": "NVIDIA H200",
        "git": {"commit": "0123456789abcdef", "changed": ["x.py"]}, "command": ["/bin/python", "-m", "m", "a b"],
        "versions": {"python": "3.11", "torch": "2.8", "system": "Linux"},
        "job": {"SLURM_JOB_ID": "7", "MST_LAUNCHER": "slurm", "MST_START": "1-2", "MST_RESTART": "0"},
    }  # fmt: skip
    nothing = {**start, "time": "2026-01-02T10:00:00+0000", "from_step": 600}
    (folder / "run.json").write_text(json.dumps({"starts": [start, nothing]}))
    resolved = json.loads((folder / "config.json").read_text())
    spent = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["flops"]
    resolved["optimizer"] = {"type": "AdamW", "params": {"lr": 0.003, "betas": [0.9, 0.95]}}
    resolved |= {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "gradient_clipping": 1.0}
    (folder / "config.json").write_text(json.dumps(resolved))
    made = Report([folder], tmp_path / "page")
    made.read()
    made.write(pictures=False)
    text = (tmp_path / "page" / "index.html").read_text()
    for name, said in {
        "steps": "600", "validation loss": "2.0199", "FLOPs": f"{spent / 1e12:.4g} TFLOP", "method": "mst",
        "model": "gpt, 3 layers, 2 heads, 64 wide, vocabulary 64", "batch": "8 sequences, 32 tokens each",
        "learning rate": "0.003, cosine, warm-up 1.43 %, at least 6e-05", "optimizer": "AdamW, betas 0.9 0.95",
        "precision": "bf16", "ZeRO stage": "1", "gradient clipping": "1.0", "seed": "1",
        "phases": "warm-up to step 43, ultra-sparse to step 471, restoration to step 514, dense to step 600",
        "sparsity": "96 % at most, erdos-renyi, variation sv", "attention": "strided, stride 8, dense from restore_end",
        "started": "2026-01-01 10:00 UTC", "ended": "2026-01-01 11:00 UTC, finished",
        "ranks": "3", "hosts": "a (2 ranks), b",
        "hardware": "NVIDIA H200", "commit": "0123456789ab, 1 files changed", "job": "SLURM_JOB_ID 7",
        "versions": "python 3.11, torch 2.8", "system": "Linux", "command": "python -m m 'a b'",
    }.items():  # fmt: skip
        assert row_of(text, name) == [said]
    assert "Events" not in text and "started again" not in text, "a start that took no step is no event"
    assert "<thead>" not in text, "a single run's tables have no head"


def test_phases_are_shaded_behind_the_curves_over_steps_flops_and_time(tmp_path):
    folder = runs.write(tmp_path / "run")
    run = Reader(folder)
    run.update()
    (group,) = group_runs([run.run])
    spent = run.run.series.last("flops")
    for against, unit in ((STEPS, 1.0), (FLOPS, 1e12), (TIME, 1.0)):
        axes = render(loss([group], against), LIGHT).axes[0]
        shades = [patch for patch in axes.patches if patch.get_zorder() == 0]
        colours = [to_hex(patch.get_facecolor()) for patch in shades]
        assert colours == [LIGHT.phases[phase] for phase in ("warmup", "ultra", "restore", "dense")]
        ends = [patch.get_x() + patch.get_width() for patch in shades]
        expected = [np.interp(piece.stop, run.run.series.last("step"), run.run.series.last(against.column) / unit)
                    for piece in run.run.schedule.phases]  # fmt: skip
        assert ends == pytest.approx(expected), f"{against.key}, where {spent[-1]} FLOPs were spent"
    for plot in (gradient_norm([group]), throughput([group])):
        assert len(render(plot, LIGHT).axes[0].patches) == 4


def test_training_and_validation_loss_share_their_axes(tmp_path):
    one, other = (Reader(runs.write(tmp_path / name, name)) for name in ("mst", "dense"))
    one.update(), other.update()
    for readers, names in (([one], {"training", "validation"}), ([one, other], {"mst", "dense"})):
        figure = render(loss(group_runs([reader.run for reader in readers]), STEPS), LIGHT)
        (axes,) = figure.axes
        dotted = [line for line in axes.lines if line.get_marker() == "o"]
        np.testing.assert_allclose(dotted[0].get_ydata(), one.run.validation.mean("val_loss"))
        assert len(dotted) == len(readers)
        assert len(axes.lines) == (3 if len(readers) == 1 else 4), (
            "smoothed and evaluated; single rows of one run alone"
        )
        (told,) = figure.legends
        assert names <= {text.get_text() for text in told.get_texts()}
    assert "Shaded are the phases of mst." in loss(group_runs([other.run, one.run]), STEPS).caption


def test_a_comparison_goes_into_a_folder_of_its_own(tmp_path, monkeypatch, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.5}\n')
    monkeypatch.chdir(tmp_path)
    assert report(capsys, "a", "b")["page"] == "report/index.html"
    assert (tmp_path / "report" / "index.html").is_file() and not (tmp_path / "a" / "report").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere"], "there is no folder nowhere"),
        (["loop"], "there is no folder loop"),
        (["."], "is not a run"),
        (["a", "--every", "0"], "at least 1 second"),
        (["a", "--every", "5"], "no effect without --watch"),
    ],
)
def test_wrong_use_is_one_line(tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    assert main(["report", *argv]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_same_run_twice_is_refused(compared, capsys):
    folder, made = compared
    assert main(["report", str(made[0]), str(made[0]), "--out", str(folder / "x")]) == 2
    assert "is given twice" in capsys.readouterr().err


@pytest.mark.full
def test_watch_draws_anew_until_the_run_ends(tmp_path, capsys):
    folder = runs.write(tmp_path / "run", until=300, blocks=1)
    page = folder / "report" / "index.html"
    seen = []

    def train():
        while not page.exists():
            time.sleep(0.02)
        seen.append(page.read_text())
        rest = [row for row in runs.rows(runs.config(blocks=1), 600) if row["step"] > 300]
        with (folder / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rest)

    thread = threading.Thread(target=train, daemon=True)  # where the report fails there never is a page
    thread.start()
    assert main(["report", "--watch", "--every", "1", str(folder)]) == 0
    thread.join()
    assert 'http-equiv="refresh" content="1"' in seen[0] and "300 of 600" in seen[0]
    text = page.read_text()
    assert "refresh" not in text and "600</td>" in text, "the last page stands still"
    assert (folder / "report" / "sparsity.png").exists(), "picture files come at the end"
    assert "Ctrl-C stops" in capsys.readouterr().err


def contrast(a: str, b: str) -> float:
    """WCAG's ratio of two hex colours."""

    def light(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(a), light(b)))
    return (high + 0.05) / (low + 0.05)


# Viénot, Brettel and Mollon (1999) for red- and green-blindness, in linear RGB
BLIND = {
    "protan": [[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]],
    "deutan": [[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]],
}


def seen_by(colour: str, kind: str | None) -> np.ndarray:
    """CIELAB of a hex colour as such eyes see it."""
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    if kind is not None:
        linear = np.clip(np.array(BLIND[kind]) @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ linear / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_stand_out_and_apart(theme):
    assert len(set(theme.colours().values())) == len(theme.colours()), "roles can be told apart in a drawing"
    assert contrast(theme.ink, theme.paper) > 7 and contrast(theme.axis, theme.paper) > 4.5  # WCAG AAA, AA for text
    for colour in theme.series:
        assert contrast(colour, theme.paper) > 3, "WCAG's least for lines"
        assert all(contrast(colour, shade) > 2.4 for shade in theme.phases.values()) or colour in theme.series[4:]
    for kind in (None, *BLIND):
        first = [seen_by(colour, kind) for colour in theme.series[:4]]
        apart = [np.linalg.norm(a - b) for i, a in enumerate(first) for b in first[:i]]
        assert min(apart) > 10, f"{kind}: four lines differ by much more than the least visible step (about 2)"


def test_the_page_begins_with_the_result_in_a_sentence(tmp_path):
    made = Report([runs.write(tmp_path / "run", steps=600)], tmp_path / "page")
    made.read()
    found = made.write(pictures=False)
    last = made.runs[0].last_val_loss
    assert found["headline"] == (
        f"Reached a validation loss of {last:.4f} with 2.9× fewer FLOPs than the same number of dense steps."
    )
    text = Path(found["page"]).read_text()
    assert text.index(found["headline"]) < text.index('<p class="lead">')

    both = [tmp_path / "run", runs.write(tmp_path / "dense", "dense", steps=600)]
    compared = Report(both, tmp_path / "compared")
    compared.read()
    groups = group_runs(compared.runs)
    best = min(table_rows(groups), key=lambda row: row["val_loss"])
    said = headline(groups)
    assert said.startswith(f"{best['name']} reached the lowest validation loss of these runs, {best['val_loss']:.4f}")

    half = Report([runs.write(tmp_path / "half", steps=600, until=300)], tmp_path / "page-half")
    half.read()
    assert headline(group_runs(half.runs)).startswith("At step 300 of 600: a validation loss of")


@pytest.mark.full
def test_times_have_their_zone():
    times = ("2026-01-02T03:04:05+0000", "2026-01-02T03:04:05-0330", "2026-01-02T03:04:05", None)
    assert [summary._format_time(time) for time in times] == [
        "2026-01-02 03:04 UTC", "2026-01-02 03:04 UTC-03:30", "2026-01-02 03:04", ""
    ]  # fmt: skip


def test_an_event_of_an_older_run_has_its_present_name(tmp_path):
    folder = runs.write(tmp_path / "run")
    event = {"time": "2026-01-01T10:00:00+0000", "what": "woke dead units", "step": 9, "units": "2 of 64 MLP neurons"}
    (folder / "run.json").write_text(json.dumps({"events": [event]}))
    reader = Reader(folder)
    reader.update()
    (table,) = summary.events([reader.run])
    assert table.rows == [("2026-01-01 10:00 UTC", "revived dead units: step 9, units 2 of 64 MLP neurons")]


def test_charts_over_steps_share_their_range_and_captions_are_complete(tmp_path):
    reader = Reader(runs.write(tmp_path / "run", until=300))
    reader.update()
    (group,) = group_runs([reader.run])
    plots = [*comparison_charts([group]), *run_charts(reader.run)]
    assert [plot.key for plot in plots if "{" in plot.caption] == []
    ranges = []
    for plot in plots:
        with contextlib.suppress(Missing):
            axes = render(plot, LIGHT).axes
            ranges += [(plot.key, ax.get_xlim()) for ax in axes if ax.get_xlabel() == "optimizer step"]
    assert len(ranges) >= 8 and {limits for _, limits in ranges} == {(0, 300)}, ranges


def test_a_line_of_counts_breaks_where_nothing_was_pruned(tmp_path):
    folder = runs.write(tmp_path / "run")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    moved = [row for row in rows if "layers" in row]
    for row in moved[3:5]:
        for layer in row["layers"].values():
            layer["pruned"] = 0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = Reader(folder)
    reader.update()
    (plot,) = (plot for plot in run_charts(reader.run) if plot.key == "prune-grow")
    line = next(line for line in render(plot, LIGHT).axes[0].lines if line.get_label() == "pruned")
    assert list(line.get_xdata()) == [row["step"] for row in moved]
    assert list(np.isnan(line.get_ydata()[:7])) == [False, False, False, True, True, False, False]


@pytest.mark.parametrize("live", ["lines", "live"])
def test_the_command_says_at_once_what_it_does(tmp_path, monkeypatch, capsys, live):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.5}\n')
    monkeypatch.setenv("MST_PROGRESS", live)
    assert main(["report", str(tmp_path)]) == 0
    error = capsys.readouterr().err
    assert error.startswith(f"reading {tmp_path} …\n") and "drawing" in error
    assert (error.count("\n") == 2 and error.endswith(" figures …\n")) == (live == "lines")


@pytest.mark.full
def test_losses_of_events_are_rounded(tmp_path):
    folder = runs.write(tmp_path / "run", steps=600)
    spike = {"what": "spike", "step": 340, "loss": 3.8874151706695557, "bound": 3.2, "skipped": [1, 2]}
    (folder / "run.json").write_text(json.dumps({"starts": [], "events": [spike]}))
    made = Report([folder], tmp_path / "page")
    made.read()
    text = Path(made.write(pictures=False)["page"]).read_text()
    assert "spike: step 340, loss 3.8874, bound 3.2, skipped 1, 2" in text and "3.88741" not in text


def test_an_odd_number_of_figures_leaves_no_place_empty():
    figures = [Figure(f"f{i}", "", "<svg></svg>") for i in range(3)]
    assert 'class="figures odd"' in render_page("t", "", [Section("three", figures=figures)])
    assert 'class="figures"' in render_page("t", "", [Section("two", figures=figures[:2])])
