"""Configs of version 0.1 are read, with one logged line for each name that has changed."""

import json

import pytest

from mst_scale._deprecated import CONFIG_KEYS, CONFIG_VALUES
from mst_scale.config import load, renamed, to_dict
from mst_scale.config.changes import differences, result_keys
from mst_scale.config.load import read_saved
from mst_scale.errors import UserError

# as version 0.1 wrote it to RUN/config.json, shortened
OLD = """{
  "train_batch_size": 16, "optimizer": {"type": "AdamW", "params": {"lr": 0.016}},
  "model": {"preset": null, "arch": "gpt", "n_layer": 2, "n_head": 4, "n_embd": 64, "d_ffw": 100, "context": 128,
            "vocab_size": 257, "vocab_multiple": 1},
  "data": {"dir": "corpora/sympy-byte", "source": "package:sympy", "tokenizer": "byte"},
  "training": {"steps": 3000, "warmup": 0.02, "min_lr": 0.0001, "look_every": 250,
               "rival": {"name": "tuned dense", "flops": 1979000000000.0, "val_loss": 1.5529}},
  "mst": {"method": "mst", "sparsity": {"max": 0.8},
          "topology": {"random_ratio": 1.0, "grown_moments": "living", "fresh_momentum": true,
                       "wake_dead_units": false},
          "allow_unclassified": ["zero_optimization.new_key"]}
}"""


@pytest.fixture(autouse=True)
def clear_logged():
    renamed._log.cache_clear()


def test_a_config_of_version_0_1_is_read(tmp_path, caplog):
    path = tmp_path / "config.json"
    path.write_text(OLD)
    new = load(path)
    assert (new.model.d_ff, new.model.seq_length, new.training.histogram_every) == (100, 128, 250)
    assert (new.training.baseline.name, new.training.baseline.val_loss) == ("tuned dense", 1.5529)
    topology = new.mst.topology
    assert (topology.grown_moments, topology.reset_momentum, topology.revive_dead_units) == ("active_mean", True, False)
    assert new.mst.allow_untested == ["zero_optimization.new_key"]
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(CONFIG_KEYS) + len(CONFIG_VALUES) and not any("\n" in line for line in lines)
    assert load(json.loads(json.dumps(to_dict(new)))) == new and load(read_saved(path)) == new
    assert len(caplog.records) == len(lines), "each is logged once"


@pytest.mark.parametrize(("old", "new"), CONFIG_KEYS.items())
def test_both_names_are_one_too_many(old, new):
    block, _, name = old.rpartition(".")
    raw = json.loads(OLD)
    node = raw
    for part in block.split("."):
        node = node[part]
    node[new.rpartition(".")[2]] = node[name]
    with pytest.raises(UserError, match=f"{old} is now called {new}"):
        load(raw)


def test_old_names_on_the_command_line():
    overrides = ["training.rival.name=x", "mst.topology.grown_moments=living", "mst.topology.wake_dead_units=false"]
    new = load("demo", overrides)
    assert new.training.baseline.name == "x" and new.training.baseline.flops == load("demo").training.baseline.flops
    assert new.mst.topology.grown_moments == "active_mean" and not new.mst.topology.revive_dead_units


def test_a_checkpoint_of_version_0_1_is_compared():
    now = result_keys(load(json.loads(OLD)))
    before = {key: value for key, value in now.items() if key not in CONFIG_KEYS.values()}
    before |= {old: now[new] for old, new in CONFIG_KEYS.items() if new in now}
    before["mst.topology.grown_moments"] = "living"
    assert differences(before, now) == []
    before["model.d_ffw"] = 99
    assert differences(before, now) == ["model.d_ff 99 → 100"]
