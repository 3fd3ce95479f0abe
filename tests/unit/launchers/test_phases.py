"""Which steps each job of `mst launch slurm --nodes-by-phase` trains."""

import json

import pytest

from mst_scale.errors import UserError
from mst_scale.launch.slurm import Share, shares_of

PHASES = "warmup=4,ultra=1,restore=4,dense=4"


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    mst = {"method": "mst", "sparsity": {"max": 0.9, "warmup": 100, "ultra": 600, "restore": 200}}
    raw = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "data": {"source": "package:sympy"},
        "training": {"steps": 1000},
        "mst": mst,
    }
    path.write_text(json.dumps(raw))
    return str(path)


def test_neighbors_with_equal_nodes_are_one_job(config):
    assert shares_of(PHASES, config, []) == [
        Share(("warmup",), 4, 100), Share(("ultra",), 1, 700), Share(("restore", "dense"), 4, None)
    ]  # fmt: skip


def test_a_step_that_grows_weights_belongs_to_the_job_with_more_nodes(config):
    found = shares_of("ultra=1,dense=4", config, ["--set", "mst.sparsity.variation=sd"])
    assert found == [Share(("ultra",), 1, 699), Share(("dense",), 4, None)]


@pytest.mark.parametrize("batch", ['"auto"', "null"])
def test_phases_in_tokens_need_a_batch(config, batch):
    words = [f"train_batch_size={batch}", 'mst.sparsity={"max": 0.9, "sparse_tokens": 0.5}']
    with pytest.raises(UserError, match="needs train_batch_size"):
        shares_of(PHASES, config, [word for key in words for word in ("--set", key)])


@pytest.mark.parametrize(
    "text",
    [
        "ultra=1",
        "warmup=4,ultra=0,restore=4,dense=4",
        f"warmup={'9' * 5000},ultra=1,restore=4,dense=4",
        f"{PHASES},sparse=2",
        "4",
        f"{PHASES},dense=2",
    ],
)
def test_mistakes_name_the_option(config, text):
    with pytest.raises(UserError, match="--nodes-by-phase"):
        shares_of(text, config, [])
