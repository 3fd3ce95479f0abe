"""Which steps of a run are trained with compact storage."""

from dataclasses import replace

import pytest

from mst_scale.config import load
from mst_scale.config.compact import Stretch, could_be_compact, stretches
from mst_scale.pretrain.storage import stretch_after


def experiment(steps=1000, **mst):
    raw = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "training": {"steps": steps},
        "mst": {"method": "mst", "compute": {"compact": "auto"}, **mst},
    }
    return load(raw)


def test_the_sparse_phase_of_mst_is_compact():
    found = experiment(sparsity={"max": 0.96, "warmup": 100, "ultra": 600, "restore": 200})
    (stretch,) = stretches(found)
    schedule = found.schedule
    assert schedule.at(stretch.first - 1).sparsity < schedule.at(stretch.first).sparsity == 0.96
    assert schedule.at(stretch.last).sparsity == 0.96 > schedule.at(stretch.last + 1).sparsity
    assert replace(found, trains=(stretch.first, stretch.last)).sparsities == {0.96}


def test_a_stretch_begins_when_its_topology_step_is_done():
    stretch = Stretch(100, 700)
    assert stretch_after([stretch], 99, 99) is None
    assert stretch_after([stretch], 100, 99) is None, "the step was skipped for an overflow"
    assert stretch_after([stretch], 101, 101) == stretch_after([stretch], 699, 699) == stretch
    assert stretch_after([stretch], 700, 700) is None, "step 701 gives the masks a different number of weights"


@pytest.mark.parametrize(
    "mst",
    [
        {"method": "rigl"},
        {"method": "dense"},
        {"compute": {"compact": "off"}},
        {"sparsity": {"max": 0.4, "warmup": 100, "ultra": 600, "restore": 200}},
        {"sparsity": {"max": 0.96, "warmup": 900, "ultra": 20, "restore": 60}, "topology": {"interval": 20}},
        {"topology": {"granularity": {"block": 16}}},
    ],
    ids=["one sparsity", "dense", "off", "hardly sparse", "too short", "blocks"],
)
def test_other_runs_keep_one_storage(mst):
    assert stretches(experiment(**mst)) == []


@pytest.mark.parametrize(
    ("large", "mst", "could"),
    [
        (True, {"compute": {"compact": "off"}}, True),
        (True, {"method": "rigl", "compute": {"compact": "off"}}, True),
        (True, {}, False),
        (False, {"compute": {"compact": "off"}}, False),
        (True, {"compute": {"compact": "off"}, "topology": {"granularity": {"block": 16}}}, False),
        (True, {"method": "dense", "compute": {"compact": "off"}}, False),
    ],
    ids=["mst", "one sparsity", "it is on", "a small model", "blocks", "dense"],
)
def test_runs_of_large_models_that_could_be_compact(large, mst, could):
    found = experiment(**mst)
    model = found.model if large else replace(found.model, vocab_size=64, n_layer=1)
    assert could_be_compact(replace(found, model=model)) is could


def test_each_long_sparse_phase_of_acdc_is_compact():
    found = experiment(method="acdc", sparsity={"max": 0.9, "warmup": 100, "ultra": 600, "turn": 150})
    compact = stretches(found)
    assert len(compact) > 1 and compact[-1].last == 1000
    for stretch in compact:
        assert {found.schedule.at(step).sparsity for step in range(stretch.first, stretch.last + 1)} == {0.9}
