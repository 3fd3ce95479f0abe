"""Which Adam a run takes: torch's fused one on a CPU, unless the config or the run's checkpoint says otherwise."""

import json
import shutil

import pytest
import torch

from mst_scale import zero_shards
from mst_scale.checkpoints import finding, manifests
from mst_scale.config import load
from mst_scale.pretrain.validation import TORCH_ADAM, choose_adam, leaves_adam_open
from tests.support import pool, tiny_run
from tests.support.whole_runs import MST, arguments, attempt, weights, without_times

pytestmark = pytest.mark.full

BASE = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}}}


DEEPSPEEDS = {"lr": 1e-2, "torch_adam": False}


def params(experiment):
    return experiment.deepspeed["optimizer"]["params"]


def test_a_new_run_uses_torchs_adam_on_a_cpu_and_deepspeeds_on_a_gpu(monkeypatch):
    experiment = load(BASE)
    assert params(choose_adam(experiment, True, None)) == {**params(experiment), **TORCH_ADAM}
    assert params(experiment).keys() == {"lr", "betas"}, "the experiment itself stays as the user wrote it"
    monkeypatch.setattr(zero_shards, "on_cpu", lambda: False)
    assert choose_adam(experiment, True, None) == experiment


@pytest.mark.parametrize(
    ("saved", "torchs"),
    [("torch.AdamW, fused", True), ("torch.Adam, fused", True), ("torch.AdamW", False), ("deepspeed.FusedAdam", False),
     (None, False)],
)  # fmt: skip
def test_a_resumed_run_keeps_the_one_it_started_with(monkeypatch, saved, torchs):
    for cpu in (True, False):
        monkeypatch.setattr(zero_shards, "on_cpu", lambda cpu=cpu: cpu)
        assert ("fused" in params(choose_adam(load(BASE), False, saved))) == torchs


@pytest.mark.parametrize(
    "stated",
    [
        ["optimizer.params.torch_adam=false"],
        ["optimizer.params.torch_adam=true"],
        ["optimizer.params.bias_correction=true"],
        ["optimizer.type=Muon"],
        ["zero_optimization.stage=2", 'zero_optimization.offload_optimizer={"device": "cpu"}'],
        ["bf16.enabled=true"],
    ],
)
def test_a_config_with_more_keys_is_unchanged(stated):
    experiment = load(BASE, stated)
    assert not leaves_adam_open(experiment)
    assert choose_adam(experiment, True, None) == experiment


@pytest.mark.parametrize("stated", [["bf16.enabled=true", "zero_optimization.stage=2"], ["optimizer.type=Adam"]])
def test_other_settings_leave_the_choice_open(stated):
    assert leaves_adam_open(load(BASE, stated))


def optimizers(out):
    """By tag, what each checkpoint of a run says of its optimizer."""
    folder = out / "checkpoints"
    return {tag: manifests.head(folder / tag)["optimizer"] for tag in finding.list_tags(folder)}


def back_to_step_8(out):
    shutil.rmtree(out / "checkpoints" / "step00000012")


@pytest.mark.parametrize(("stage", "bf16"), [(0, False), (1, False), (2, False), (3, False), (1, True), (3, True)])
def test_a_run_uses_torchs_adam_and_resumes_bit_for_bit(tmp_path, stage, bf16):
    words = arguments(tmp_path, mst=MST, zero_optimization={"stage": stage}, bf16={"enabled": bf16})
    out = tmp_path / "out"
    assert pool.run(attempt, 2, words) == [(0, "")] * 2
    assert set(optimizers(out).values()) == {"torch.AdamW, fused"}
    assert "torch_adam" not in json.loads((out / "config.json").read_text())["optimizer"]["params"]
    rows, last = without_times(tiny_run.rows(out)), weights(out, "step00000012")
    back_to_step_8(out)
    assert pool.run(attempt, 2, words) == [(0, "")] * 2
    assert without_times(tiny_run.rows(out)) == rows
    again = weights(out, "step00000012")
    assert last.keys() == again.keys() and all(torch.equal(value, again[name]) for name, value in last.items())


def test_a_resumed_run_keeps_its_adam_on_any_number_of_ranks(tmp_path):
    out, words = tmp_path / "out", arguments(tmp_path, mst=MST)
    assert pool.run(attempt, 2, [*words, "--set", "optimizer.params.torch_adam=false"]) == [(0, "")] * 2
    back_to_step_8(out)
    assert pool.run(attempt, 2, words) == [(0, "")] * 2
    assert set(optimizers(out).values()) == {"deepspeed.FusedAdam"}
    other, words = tmp_path / "other", arguments(tmp_path, "other", mst=MST)
    assert pool.run(attempt, 2, words) == [(0, "")] * 2
    back_to_step_8(other)
    assert pool.run(attempt, 1, words) == [(0, "")]
    assert set(optimizers(other).values()) == {"torch.AdamW, fused"}


@pytest.mark.parametrize(
    "more",
    [
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        {"optimizer": {"params": DEEPSPEEDS}},
    ],
)
def test_states_of_torchs_adam_are_not_loaded_into_deepspeeds(tmp_path, more):
    blocks = {"mst": MST, "zero_optimization": {"stage": 2}}
    assert pool.run(attempt, 1, arguments(tmp_path, **blocks)) == [(0, "")]
    back_to_step_8(tmp_path / "out")
    ((code, said),) = pool.run(attempt, 1, arguments(tmp_path, **{**blocks, **more}))
    assert code == 2 and "torch.AdamW, fused" in said and "optimizer.params.torch_adam" in said
    assert len(said.splitlines()) == 1


def test_states_of_adam_are_not_loaded_into_muon(tmp_path):
    assert pool.run(attempt, 1, arguments(tmp_path, mst=MST)) == [(0, "")]
    back_to_step_8(tmp_path / "out")
    ((code, said),) = pool.run(attempt, 1, arguments(tmp_path, mst=MST, optimizer={"type": "Muon"}))
    assert code == 2 and "the states of torch.AdamW, and this run trains with deepspeed.Muon" in said
    assert len(said.splitlines()) == 1
