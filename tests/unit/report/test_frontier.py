"""FLOP multipliers of methods, as figures and in words: `mst report --compute-frontier`."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from matplotlib.text import Text

from mst_scale.cli import main
from mst_scale.config import load
from mst_scale.flops.frontier import Point
from mst_scale.flops.ledger import topology_flops
from mst_scale.report import frontier
from mst_scale.report.groups import group_runs
from mst_scale.report.reader import Reader
from mst_scale.report.style import LIGHT, render
from tests.support import reported_runs as runs


def test_the_frontier_says_what_a_method_is_worth(tmp_path, capsys):
    """Dense runs of three lengths and two seeds; MST reaches the loss that twice its FLOPs buy."""
    lengths, made = (200, 400, 800), []
    for seed in (1, 2):
        for steps in lengths:
            made.append(ending(runs.write(tmp_path / f"dense-{steps}-{seed}", "dense", steps=steps, seed=seed), 0.1))
        mst = ending(runs.write(tmp_path / f"mst-{seed}", steps=600, seed=seed), 0.1, multiplier=2.0)
        made.append(mst)
    half, endless = (runs.write(tmp_path / name, "rigl", until=100) for name in ("half", "endless"))
    raw = json.loads((endless / "config.json").read_text())
    (endless / "config.json").write_text(json.dumps({**raw, "training": {"seed": 1}}))
    out = tmp_path / "out"
    assert main(["report", "--frontier", *map(str, [*made, half, endless]), "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = [row for row in found["runs"] if not row["dense"]]
    assert row["seeds"] == [1, 2] and row["worth_all_sizes_paper"]["value"] == pytest.approx(2.0)
    assert row["worth_same_model_paper"]["low"] == pytest.approx(2.0)
    names = [figure["name"] for figure in found["figures"]]
    assert names == ["frontier-paper", "worth-paper", "frontier-causal", "worth-causal"]
    assert found["notes"] == [
        "half has not finished and is left out",
        "left out, because training.steps, the length of the run, is not known: endless",
    ]
    assert "2.00 (2.00 to 2.00)" in (out / "index.html").read_text()
    assert main(["report", "--frontier", str(mst)]) == 2 and "needs finished dense runs" in capsys.readouterr().err


def test_no_two_methods_look_alike_and_others_than_dense_are_not_dense(tmp_path):
    looks = [(i % 8, frontier.marker_of(i, 8)) for i in range(40)]
    assert len(set(looks)) == 40
    points = {a: {1: Point(1e12, 2.0)} for a in frontier.KEYS}
    assert frontier.multipliers_chart([frontier.Method("d", "dense", "m", True, points)], "paper") is None
    made = [ending(runs.write(tmp_path / name, name, steps=100, seed=1), 0.1) for name in ("dense", "powerprop")]
    readers = [Reader(path) for path in made]
    for reader in readers:
        reader.update()
    found = frontier.compare(group_runs([reader.run for reader in readers]))
    methods = {method.kind: method.dense for method in found}
    assert methods == {"dense": True, "powerprop": False}
    for setting in (
        {"mst": {"method": "mst", "sparsity": {"variation": "dense"}, "attention": {"stride": 4, "dense_from": 0.5}}},
        {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}},
        {"training": {"steps": 100, "init": "gpt2"}},
    ):
        run = replace(readers[0].run, experiment=load({**readers[0].run.config, **setting}))
        assert not frontier._is_dense(run), setting
    whole = found[0].points["paper"][1].flops
    del readers[0].run.config["model"]
    (told,) = frontier.notes([reader.run for reader in readers])
    assert told == (
        "without FLOPs of the optimizer and of topology steps, because their config or rows do not state them: dense"
    )
    (dense,) = frontier.compare(group_runs([readers[0].run]))
    assert dense.points["paper"][1].flops == readers[0].run.last["flops"] < whole


def test_what_cannot_be_compared_is_refused_or_told(tmp_path, capsys):
    """Two texts; two runs of one seed; a finished run that tells no loss."""
    made = [ending(runs.write(tmp_path / f"dense-{s}", "dense", steps=s, seed=1), 0.1) for s in (100, 200)]
    for folder, corpus in zip(made, ("0a", "0b"), strict=True):
        told = {"starts": [{"from_step": 0, "last_step": 100, "corpus": corpus}]}
        (folder / "run.json").write_text(json.dumps(told))
    words = ["report", "--frontier", *map(str, made), "--out", str(tmp_path / "out")]
    assert main(words) == 2
    assert "dense-100 read corpus 0a and dense-200 0b" in capsys.readouterr().err
    for folder in made:
        (folder / "run.json").unlink()
    again = ending(runs.write(tmp_path / "again", "dense", steps=100, seed=1), 0.1)
    assert main([*words[:2], *map(str, [*made, again]), *words[4:]]) == 2
    assert "dense-100 and again have the same training.seed and setting: give one" in capsys.readouterr().err
    silent = runs.write(tmp_path / "silent", "dense", steps=300, seed=1)
    rows = [json.loads(line) for line in (silent / "metrics.jsonl").read_text().splitlines()]
    without = [{key: value for key, value in row.items() if key != "flops_causal"} for row in rows]
    (silent / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in without))
    assert main([*words[:2], *map(str, [*made, silent]), *words[4:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == [
        "left out, because their validation loss or FLOPs are missing: silent"
    ]


@pytest.mark.parametrize("value", [None, float("nan"), "x", -1.0, 0, {}])
@pytest.mark.parametrize("key", ["flops", "flops_causal", "val_loss"])
def test_a_run_without_flops_or_loss_is_left_out(tmp_path, key, value):
    """Rows may come from a loop of one's own, or from a disk that has damaged them."""
    run = read(ending(runs.write(tmp_path / "run", "dense", steps=100, seed=1), 0.1, **{key: value}))
    assert frontier.notes([run]) == ["left out, because their validation loss or FLOPs are missing: run"]


@pytest.mark.parametrize("value", [None, float("nan"), "x"])
def test_flops_that_follow_from_tokens_are_left_out_without_them(tmp_path, value):
    run = read(ending(runs.write(tmp_path / "run", "dense", steps=100, seed=1), 0.1, tokens=value))
    (method,) = frontier.compare(group_runs([run]))
    assert method.points["paper"][1].flops == run.last["flops"]


def test_many_methods_are_named_beside_their_points(tmp_path):
    """Each with its loss, none over another, the lowest loss at the bottom; few have a legend and bars."""
    losses = [2.0 + 0.01 * i for i in range(24)]
    methods = [
        frontier.Method(f"m{i}, tiny", f"m{i}", "m", i == 0, {a: {s: Point(1e12, loss + 0.1 * s) for s in (1, 2, 3)}
                        for a in frontier.KEYS})
        for i, loss in enumerate(losses)
    ]  # fmt: skip
    figure = render(frontier.frontier_chart(methods, "paper"), LIGHT)
    (axes,) = figure.axes
    figure.draw_without_rendering()
    corner, *beside = axes.texts
    boxes = [Text.get_window_extent(text) for text in beside]  # without its line
    assert [text.get_text() for text in beside][:2] == ["m1  2.210 ± 0.248", "m2  2.220 ± 0.248"]
    assert corner.get_text() == "m0"  # a dense run that the frontier goes through has its name there
    assert all(below.y1 <= above.y0 for below, above in pairwise(boxes)) and len(boxes) == 23
    assert all(box.x0 > axes.bbox.x1 and box.x1 < figure.bbox.x1 for box in boxes)
    assert legend_of(figure) == ["dense frontier", "dense runs"] and len(axes.lines) == 2 + 23

    few = render(frontier.frontier_chart(methods[:5], "paper"), LIGHT)
    assert legend_of(few) == ["dense frontier", "dense runs", "m1", "m2", "m3", "m4"]
    assert len(few.axes[0].texts) == 1 and len(few.axes[0].lines) == 2 + 2 * 4
    other = [*methods[:1], replace(methods[1], name="m1, large"), *methods[2:]]
    assert render(frontier.frontier_chart(other, "paper"), LIGHT).axes[0].texts[1].get_text().startswith("m1, large")


def legend_of(figure):
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def read(folder):
    reader = Reader(folder)
    reader.update()
    return reader.run


def ending(folder, power, multiplier=1.0, **others):
    """Make the last validation loss of a run 10 · C^-power, where C is all of its FLOPs times `multiplier`.

    `others` are values of the last row that replace its own.
    """
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    last, config = json.loads(lines[-1]), load(json.loads((folder / "config.json").read_text()))
    optimizer = 17 * last["step"] * config.model.weights
    topology = last["step"] * 8 * topology_flops(config)[1].total
    assert (topology > 0) == (config.mst.method == "mst")
    last["val_loss"] = 10 * (multiplier * (last["flops"] + optimizer + topology)) ** -power
    (folder / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps({**last, **others})]) + "\n")
    return folder
