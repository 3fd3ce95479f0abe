"""The commands that read a run take one of any layout of ranks: what they say is that of its reshaped copy."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from mst_scale.checkpoints import finding
from mst_scale.cli import main
from mst_scale.config.parallel import KEYS
from mst_scale.data.sampler import open_sampler
from mst_scale.hugging_face.export import open_source, validation_loss
from mst_scale.run_logging.observer import snapshot_of_checkpoint
from tests.support import tiny_run
from tests.support.evaluation_calls import TEXT
from tests.support.layouts import Layout
from tests.support.pool import run
from tests.support.whole_runs import MST, arguments, attempt

MODEL = {"n_layer": 2, "n_head": 2, "vocab_size": 257}
TRAINING = {"steps": 6, "eval_every": 6, "save_every": 6}
TESTED = [
    Layout(tensor=2, stage=0), Layout(tensor=2, stage=1), Layout(tensor=2, stage=3),
    Layout(pipeline=2, stage=0), Layout(pipeline=2, stage=1),
    Layout(tensor=2, pipeline=2, stage=0), Layout(tensor=2, pipeline=2, stage=1),
]  # fmt: skip
PLACES = ("checkpoint", "out")
OFTEN = (Layout(tensor=2, stage=3), Layout(tensor=2, pipeline=2, stage=0))


def trained(folder: Path, layout: Layout) -> Path:
    blocks = {"model": MODEL, "training": TRAINING, "mst": MST, "zero_optimization": {"stage": layout.stage}}
    cut = [f"--set={KEYS[what]}={size}" for what, size in layout.sizes.items()]
    results = run(attempt, layout.world, arguments(folder, "out", *cut, **blocks))
    assert results == [(0, "")] * layout.world
    return folder / "out"


def said(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def answers(source: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What the commands say of a run and write of it, and what a report reads where a run has no snapshots."""
    folder.mkdir()
    (folder / "wikitext2.txt").write_text(TEXT)
    where, masks, exported = str(source), folder / "masks", folder / "export"
    of_eval = ["--tasks", "wikitext2", "--data-dir", str(folder), "--tokenizer", "byte", "--out", str(folder / "eval")]
    found = {
        "inspect": said(capsys, "inspect", where),
        "masks": said(capsys, "masks", where, str(masks)),
        "export": said(capsys, "export", where, str(exported), "--prune", "0.9"),
        "eval": said(capsys, "eval", where, *of_eval)["tasks"]["wikitext2"]["metrics"],
        "report": dataclasses.asdict(snapshot_of_checkpoint(finding.locate(source))),
    }
    for what in ("weights", "active"):
        found["report"][what] = {name: cells.tolist() for name, cells in found["report"][what].items()}
    found = {command: {k: v for k, v in said.items() if k not in PLACES} for command, said in found.items()}
    return {**found, "bytes": [path.read_bytes() for path in (masks, exported / "model.safetensors")]}


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=[] if each in OFTEN else [pytest.mark.slow]) for each in TESTED], ids=str
)
def test_the_output_of_commands_does_not_depend_on_the_layout(layout: Layout, tmp_path, capsys):
    out = trained(tmp_path, layout)
    source = open_source(out)
    val = open_sampler(str(tmp_path / "corpus"), "val", source.experiment.model, source.experiment.training.seed)
    read = validation_loss(source.model(), val, source.experiment)
    assert read == pytest.approx(tiny_run.rows(out)[-1]["val_loss"], rel=1e-5), "the weights are those of training"
    assert main(["reshape", str(out), str(tmp_path / "copy")]) == 0
    capsys.readouterr()
    mine, copy = answers(out, tmp_path / "1", capsys), answers(tmp_path / "copy", tmp_path / "2", capsys)
    for what, answer in mine.items():
        assert answer == copy[what], what
    assert all(layer["density"] > 0 for layer in mine["inspect"]["layers"]) and mine["eval"]
