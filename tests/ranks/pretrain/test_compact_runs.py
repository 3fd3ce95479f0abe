"""`mst_scale.pretrain` with compact storage: the run of dense storage, resumed, reshaped and read by the tools."""

import shutil

import pytest
import torch

from mst_scale.checkpoints import store
from mst_scale.checkpoints.mask_report import inspect
from mst_scale.zero_shards.weight_files import weights_of
from tests.support import pool, tiny_run, whole_runs

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
    sets = ["--set", f"mst.compute.compact={compact}", "--set", f"zero_optimization.stage={stage}"]
    argv = whole_runs.arguments(folder, out, *sets, *more, **RUN)
    for code, said in pool.run(whole_runs.attempt, world, argv):
        assert code == 0, said
    return folder / out


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_run_is_that_of_dense_storage_and_resumes(stage, tmp_path):
    compact, dense = (run(tmp_path, kind, compact=kind, stage=stage) for kind in ("auto", "off"))
    for mine, theirs in zip(tiny_run.rows(compact), tiny_run.rows(dense), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6) and mine["sparsity"] == theirs["sparsity"]
    last = store.tag_of(12)
    mine, theirs = (inspect(out / "checkpoints" / last).layers for out in (compact, dense))
    assert mine == theirs and "wte.weight" in [layer.name for layer in mine]
    weights = [weights_of(out / "checkpoints" / last) for out in (compact, dense)]
    assert weights[0].shapes == weights[1].shapes
    for name in weights[0].shapes:  # at ZeRO-1 and 2 dense storage sums its norm in float32
        torch.testing.assert_close(weights[0].read(name), weights[1].read(name), rtol=1e-5, atol=1e-6)

    shutil.copytree(compact, tmp_path / "again")
    again = run(tmp_path, "again", "--resume", store.tag_of(8), stage=stage)
    before, after = (whole_runs.weights(out, last) for out in (compact, again))
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_a_run_continues_on_other_ranks_and_at_another_stage(tmp_path):
    first = run(tmp_path, "first", stage=2)
    shutil.copytree(first, tmp_path / "other")
    other = run(tmp_path, "other", "--resume", store.tag_of(8), stage=3, world=1)
    last = store.tag_of(12)
    one, two = (inspect(out / "checkpoints" / last).layers for out in (first, other))
    assert [layer.density for layer in one] == [layer.density for layer in two]
    for mine, theirs in zip(tiny_run.rows(first), tiny_run.rows(other), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


def test_a_compact_checkpoint_takes_a_fraction_of_the_bytes(tmp_path):
    sizes = {}
    for kind in ("auto", "off"):
        out = run(tmp_path, kind, "--set", "mst.sparsity.max=0.96", "--set", "model.n_embd=128", compact=kind)
        files = (out / "checkpoints" / store.tag_of(12)).rglob("*.pt")
        sizes[kind] = sum(path.stat().st_size for path in files)
    assert sizes["auto"] < 0.2 * sizes["off"]
