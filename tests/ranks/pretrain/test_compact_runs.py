"""`mst_scale.pretrain` with compact storage: the run of dense storage, resumed, reshaped and read by the tools."""

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from mst_scale.checkpoints import finding
from mst_scale.checkpoints.mask_report import inspect
from mst_scale.comm import Ranks
from mst_scale.config import load
from mst_scale.engine.targets import choose_targets
from mst_scale.run_logging.observer import Observer
from mst_scale.zero_shards import compact_files
from mst_scale.zero_shards.weight_files import weights_of
from tests.support import pool, tiny_run, whole_runs
from tests.support.compact_pairs import constant_config, started
from tests.support.toy_engine import train

RUN = {
    "mst": {
        "method": "rigl",
        "sparsity": {"max": 0.8},
        "topology": {"interval": 3, "check_every": 2},
        "targets": {"lm_head": True},
        "compute": {"backend": "dense"},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
}


def run(folder, out, *more, compact="auto", stage=2, world=2):
    """A run of 12 steps, which is saved after 4, 8 and 12."""
    sets = ["--set", f"mst.compute.compact={compact}", "--set", f"zero_optimization.stage={stage}"]
    argv = whole_runs.arguments(folder, out, *sets, *more, **RUN)
    for code, said in pool.run(whole_runs.attempt, world, argv):
        assert code == 0, said
    return folder / out


def saved_as(form):
    return "--set", f"training.checkpoint_form={form}"


RUNS = [
    (2, "compact"),
    (3, "dense"),
    *(pytest.param(*case, marks=pytest.mark.full) for case in ((0, "dense"), (2, "dense"), (3, "compact"))),
]


@pytest.mark.parametrize(("stage", "form"), RUNS)
def test_a_run_is_that_of_dense_storage_and_resumes(stage, form, tmp_path):
    compact, dense = (run(tmp_path, kind, *saved_as(form), compact=kind, stage=stage) for kind in ("auto", "off"))
    for mine, theirs in zip(tiny_run.rows(compact), tiny_run.rows(dense), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6) and mine["sparsity"] == theirs["sparsity"]
        assert 0 < mine["state_bytes"] < 0.5 * theirs["state_bytes"]
        assert mine["comm_bytes"] > 0
    last = finding.tag_of(12)
    assert compact_files.file_of(compact / "checkpoints" / last).is_file() == (form == "compact")
    mine, theirs = (inspect(out / "checkpoints" / last).layers for out in (compact, dense))
    assert mine == theirs and "wte.weight" in [layer.name for layer in mine]
    weights = [weights_of(out / "checkpoints" / last) for out in (compact, dense)]
    assert weights[0].shapes == weights[1].shapes
    for name in weights[0].shapes:  # at ZeRO-1 and 2 dense storage sums its norm in float32
        torch.testing.assert_close(weights[0].read(name), weights[1].read(name), rtol=1e-5, atol=1e-6)

    shutil.copytree(compact, tmp_path / "again")
    again = run(tmp_path, "again", "--resume", finding.tag_of(8), *saved_as(form), stage=stage)
    tiny_run.assert_continued(again, compact, 8)
    assert whole_runs.differing(compact, again) == []


@pytest.mark.full
@pytest.mark.parametrize(("form", "stage"), [("compact", 2), ("dense", 3)])
def test_a_pruned_model_is_trained_further_and_resumes(form, stage, tmp_path):
    """Its zeros are known from the weights it starts with, and after that from the masks of the checkpoint."""
    pruned = run(tmp_path, "pruned", compact="off", stage=stage)
    blocks = {"method": "fixed", "compute": {"backend": "dense"}, "targets": {"lm_head": True}}

    def further(out, *more, kind="auto"):
        sets = ["--set", f"mst.compute.compact={kind}", "--set", f"zero_optimization.stage={stage}"]
        argv = whole_runs.arguments(
            tmp_path, out, *sets, "--init", str(pruned), *saved_as(form), *more, **{**RUN, "mst": blocks}
        )
        for code, said in pool.run(whole_runs.attempt, 2, argv):
            assert code == 0, said
        return tmp_path / out

    compact, dense = further("compact"), further("dense", kind="off")
    last = finding.tag_of(12)
    mine, theirs = (inspect(out / "checkpoints" / last).layers for out in (compact, dense))
    assert mine == theirs and [layer.density for layer in mine] == [
        layer.density for layer in inspect(pruned / "checkpoints" / last).layers
    ]
    for one, other in zip(tiny_run.rows(compact), tiny_run.rows(dense), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert 0 < one["state_bytes"] < 0.5 * other["state_bytes"]
    shutil.copytree(compact, tmp_path / "again")
    again = further("again", "--resume", finding.tag_of(8))
    tiny_run.assert_continued(again, compact, 8)
    assert whole_runs.differing(compact, again) == []
    assert tiny_run.rows(again)[-1]["state_bytes"] == tiny_run.rows(compact)[-1]["state_bytes"], "compact as before"


@pytest.mark.parametrize(("form", "stage", "kind"), [
    ("compact", 3, "auto"),
    pytest.param("dense", 3, "auto", marks=pytest.mark.full),
    pytest.param("dense", 2, "off", marks=pytest.mark.full),
])  # fmt: skip
def test_a_run_continues_on_other_ranks_at_another_stage_and_with_dense_storage(form, stage, kind, tmp_path):
    first = run(tmp_path, "first", *saved_as(form), stage=2)
    shutil.copytree(first, tmp_path / "other")
    other = run(tmp_path, "other", "--resume", finding.tag_of(8), stage=stage, world=1, compact=kind)
    tiny_run.assert_continued(other, first, 8)
    last = finding.tag_of(12)
    one, two = (inspect(out / "checkpoints" / last).layers for out in (first, other))
    assert [layer.density for layer in one] == [layer.density for layer in two]
    for mine, theirs in zip(tiny_run.rows(first), tiny_run.rows(other), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


def observed(rank, world, stage, kind, folder):
    config = constant_config(stage, world, kind, policy="rigl")
    engine = started(config)
    ranks, experiment = Ranks(rank, rank, world, torch.distributed.group.WORLD), load(config)
    targets = partial(choose_targets, engine.module, experiment.mst.targets)
    observer = Observer(engine, experiment, Path(folder), ranks, step=0, choose_targets=targets)
    train(engine, rank, world, 4)
    seen = observer.snapshot(4, "ultra")
    return seen, observer._histograms({matrix.name: matrix.largest for matrix in seen.matrices})


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_report_sees_the_same_weights(stage, tmp_path):
    (mine, bars), (theirs, other) = (pool.run(observed, 3, stage, kind, str(tmp_path))[0] for kind in ("auto", "off"))
    assert bars == other and mine.parameters == theirs.parameters and mine.sparsity == theirs.sparsity
    for one, two in zip(mine.matrices, theirs.matrices, strict=True):
        assert (one.name, one.shape, one.active, one.largest) == (two.name, two.shape, two.active, two.largest)
    for name, cells in mine.weights.items():
        np.testing.assert_allclose(cells, theirs.weights[name], rtol=1e-6)  # slices lie elsewhere


@pytest.mark.full
def test_a_compact_checkpoint_takes_a_fraction_of_the_bytes(tmp_path):
    sizes = {}
    for kind in ("auto", "off"):
        out = run(
            tmp_path,
            kind,
            *saved_as("compact"),
            "--set",
            "mst.sparsity.max=0.96",
            "--set",
            "model.n_embd=128",
            compact=kind,
        )
        files = (out / "checkpoints" / finding.tag_of(12)).rglob("*.pt")
        sizes[kind] = sum(path.stat().st_size for path in files)
    assert sizes["auto"] < 0.2 * sizes["off"]
