"""Models that end sparse against dense models that are no larger: sizes, and which baselines count."""

import copy
import json

import pytest
from mst_scale.benchmarks.studies import no_larger, outcome, page
from mst_scale.benchmarks.studies.plan import read_plan

from mst_scale.config import load
from mst_scale.models import build
from tests.support.tiny_study import TINY, everything

CONFIG = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "model": {"n_layer": 2, "n_head": 2, "n_embd": 16, "seq_length": 32, "vocab_size": 50, "vocab_multiple": 1},
    "training": {"steps": 60, "warmup": 6},
    "mst": {"sparsity": {"max": 0.75}, "targets": {"lm_head": False}},
}


def test_the_size_of_a_finished_model():
    everything_else = sum(parameter.numel() for parameter in build(load(CONFIG).model).parameters())
    sparse = no_larger.finished(load(CONFIG, method="sparse"))
    targets = 2 * 12 * 16 * 16
    assert sparse.masked == 0.75 * targets and sparse.nonzero == everything_else - sparse.masked
    assert sparse.bytes == 2 * sparse.nonzero + targets / 8, "values, and a bit per weight of each sparse matrix"
    for ends_dense in ("dense", "mst"):
        found = no_larger.finished(load(CONFIG, method=ends_dense))
        assert (found.masked, found.nonzero, found.bytes) == (0, everything_else, 2 * everything_else)


def test_only_dense_models_that_are_no_larger_are_baselines(folder):
    """A dense model that is larger learns the most; one of fewer nonzero weights needs three times the FLOPs."""
    raw = copy.deepcopy(TINY)
    raw["variants"] = {
        "sparse": {"method": "sparse", "set": {"mst.sparsity.max": 0.5}},
        "dense": {"as_long_as": "sparse", "shares": [0.5, 1.0, 2.0]},
        "dense-narrow": {"as_long_as": "sparse", "shares": [1.0, 2.0, 4.0], "set": {"model.n_embd": 8}},
    }
    (folder / "tiny.json").write_text(json.dumps(raw))
    plan = read_plan("tiny", folder)
    needs = {"sparse": 1.0, "dense": 0.5, "dense-narrow": 3.0}
    rows = everything(plan, lambda one: 10 * (one.flops / needs[one.cell.variant]) ** -0.05)
    found = outcome.outcomes(plan, rows, "c")
    compared = no_larger.comparisons(plan, found, "c")
    assert {one.run.cell.variant for one in compared} == {"sparse"}
    for one in compared:
        size = {
            other.cell.variant: no_larger.finished(outcome.job(plan, other.cell, other.rate, 1, "c").experiment)
            for other in found
        }
        assert size["dense-narrow"].nonzero <= one.size.nonzero < size["dense"].nonzero
        assert one.of_nonzero.value == pytest.approx(3.0, rel=0.02) and not one.of_nonzero.bound
    text = page.written(plan, rows, "c", folder).read_text()
    assert "## Against dense models that are no larger" in text
    for name in ("multiplier_equal_nonzero", "multiplier_equal_bytes"):
        assert page.answers(plan, rows, "c")["no_larger"][0][name]["value"] == pytest.approx(3.0, rel=0.02)
