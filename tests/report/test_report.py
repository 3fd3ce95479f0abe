"""`mst report` as a user calls it: every figure of one run and of several; what is missing is a note; it watches."""

import json
import shutil
import threading
import time

import numpy as np
import pytest
from PIL import Image

from mst_scale.cli import main
from mst_scale.report.build import Report
from mst_scale.report.style import DARK, LIGHT
from tests.report import runs
from tests.support import pool, tiny_run
from tests.support.whole_runs import MST, arguments, attempt

ONE_RUN = [
    "loss-steps", "loss-flops", "loss-flops-causal", "loss-time", "perplexity-steps", "perplexity-flops",
    "perplexity-flops-causal", "perplexity-time", "throughput", "memory", "sparsity", "update-fraction",
    "gradient-norm", "prune-grow", "dead-units", "layers-pruned", "layers-grown", "churn", "exploration", "densities",
    "std-layers", "std-phases",
    *(f"weights-blocks-{i}-{kind}" for i in (0, 1) for kind in (
        "attention-qkv", "attention-proj", "mlp-up", "mlp-down"
    )),
]  # fmt: skip


def report(capsys, *argv: str) -> dict:
    assert main(["report", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_real_run_draws_every_figure_as_page_png_and_svg(tmp_path, capsys):
    block = {"model": {"n_layer": 2}, "training": {"steps": 30, "eval_every": 10, "save_every": 0}}
    assert pool.run(attempt, 2, arguments(tmp_path, mst=MST, **block)) == [(0, "")] * 2
    found = report(capsys, str(tmp_path / "out"))
    names = [figure["name"] for figure in found["figures"]]
    left_out = [name for name in ONE_RUN if name not in names]
    assert set(left_out) <= {"loss-flops-causal", "perplexity-flops-causal"} and set(names) <= set(ONE_RUN)
    assert "std-scale is left out: this needs runs of models of at least two sizes" in found["notes"]
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
    (made[0] / "eval.json").write_text(json.dumps({"model": "x", "tasks": tasks}))
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
    assert "run2-churn" not in names, "a dense run prunes nothing"
    assert [(row["name"], len(row["runs"])) for row in found["runs"]] == [("mst", 3), ("dense", 1), ("rigl", 1)]
    assert "rigl: not finished: step 700 of 900" in found["notes"]
    text = (folder / "both" / "index.html").read_text()
    assert "mst (3 seeds)" in text and "one of 3 seeds" in text
    assert "<th>dead units</th>" in text and "<td>2 of 300</td>" in text
    assert "<th>lambada acc</th>" in text and "<td>0.6074</td>" in text, "what mst eval has left"
    assert "spike: step 40, loss 9.5" in text and "started again from step 30" in text, "what run.json tells"


def test_a_comparison_goes_into_a_folder_of_its_own(tmp_path, monkeypatch, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.5}\n')
    monkeypatch.chdir(tmp_path)
    assert report(capsys, "a", "b")["page"] == "report/index.html"
    assert (tmp_path / "report" / "index.html").is_file() and not (tmp_path / "a" / "report").exists()


def test_a_run_of_which_much_is_missing_is_drawn_as_far_as_it_goes(tmp_path, capsys):
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.5}\n{"step": 3, "lo')
    found = report(capsys, str(folder))
    assert [figure["name"] for figure in found["figures"]] == ["loss-steps", "loss-time"]
    notes = "\n".join(found["notes"])
    for name in ("sparsity", "churn", "gradient-norm", "throughput", "weights-weights", "std-layers"):
        assert f"{name} is left out" in notes
    (folder / "metrics.jsonl").write_text("")
    assert report(capsys, str(folder))["figures"] == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere"], "there is no folder nowhere"),
        (["loop"], "there is no folder loop"),
        (["."], "is not a run"),
        (["a", "--every", "0"], "at least 1 second"),
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


def test_the_frontier_says_what_a_method_is_worth(tmp_path, capsys):
    """Dense runs of three lengths and two seeds; MST reaches the loss that twice its FLOPs buy."""
    lengths, made = (200, 400, 800), []
    for seed in (1, 2):
        for steps in lengths:
            made.append(ending(runs.write(tmp_path / f"dense-{steps}-{seed}", "dense", steps=steps, seed=seed), 0.1))
        mst = ending(runs.write(tmp_path / f"mst-{seed}", steps=600, seed=seed), None)
        spent = json.loads((mst / "metrics.jsonl").read_text().splitlines()[-1])["flops"]
        ending(mst, 0.1, flops=2 * spent)
        made.append(mst)
    half = runs.write(tmp_path / "half", "rigl", until=100)
    found = report(capsys, "--frontier", *map(str, [*made, half]), "--out", str(tmp_path / "out"))
    (row,) = [row for row in found["runs"] if not row["dense"]]
    assert row["seeds"] == [1, 2] and row["worth_all_sizes_paper"]["value"] == pytest.approx(2.0)
    assert row["worth_same_model_paper"]["low"] == pytest.approx(2.0)
    assert [figure["name"] for figure in found["figures"]] == ["frontier-paper", "frontier-causal"]
    assert found["notes"] == ["half has not finished and is left out"]
    assert "2.00 (2.00 to 2.00)" in (tmp_path / "out" / "index.html").read_text()
    assert main(["report", "--frontier", str(mst)]) == 2 and "no finished dense run" in capsys.readouterr().err


def ending(folder, power, flops=None):
    """The last validation loss of a run becomes 10 · C^-power, of its FLOPs or of these; None leaves it."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    last["flops_causal"] = last.get("flops_causal", last["flops"])
    if power is not None:
        last["val_loss"] = 10 * (flops or last["flops"]) ** -power
    (folder / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    return folder


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
