"""Which steps of a run are trained with compact storage."""

from dataclasses import replace

import pytest

from mst_scale.config import load
from mst_scale.config.compact import Stretch, stretches
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
    assert stretch_after([stretch], 700, 700) is None, "step 701 gives the masks another number of weights"


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


def test_each_long_sparse_phase_of_acdc_is_compact():
    found = experiment(method="acdc", sparsity={"max": 0.9, "warmup": 100, "ultra": 600, "turn": 150})
    compact = stretches(found)
    assert len(compact) > 1 and compact[-1].last == 1000
    for stretch in compact:
        assert {found.schedule.at(step).sparsity for step in range(stretch.first, stretch.last + 1)} == {0.9}
