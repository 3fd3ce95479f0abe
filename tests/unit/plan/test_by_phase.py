"""Numbers of GPUs for each phase of a run."""

import json

import pytest

from mst_scale.cli import main
from mst_scale.config import load
from mst_scale.errors import UserError
from mst_scale.plan.answer import plan
from mst_scale.plan.by_phase import Option, PhaseOptions, by_phase
from mst_scale.plan.gpus import machine
from tests.support.plan_configs import ready
from tests.support.tiny_run import ROOT

COMPACT = "mst.compute.compact=auto"
TARGET = machine("a100-40gb", 16)


def test_the_sparse_phase_needs_fewer_gpus():
    phases = {phase.name: phase for phase in by_phase(ready("gpt3_2.7b", COMPACT), 16, TARGET)}
    assert [name for name, phase in phases.items() if phase.compact] == ["ultra"]
    assert phases["ultra"].fewest.gpus < phases["dense"].fewest.gpus == phases["warmup"].fewest.gpus
    for phase in phases.values():
        numbers = [option.gpus for option in phase.options]
        assert numbers == sorted(numbers) and numbers[-1] == 16
        for option in phase.options:
            assert option.choice.setting.ranks == option.gpus and option.choice.memory.fits(TARGET.gpu)
            assert option.choice.setting.batch == phases["dense"].fewest.choice.setting.batch
            assert option.gpu_hours >= phase.best.gpu_hours / 1.04
        assert phase.fewest.gpus <= phase.best.gpus


@pytest.mark.full
def test_all_gpus_take_the_time_of_the_plan():
    """Where the plan recommends the config as it is."""
    experiment = ready("gpt2_small", COMPACT)
    target = machine("a100-80gb", 8)
    answer = plan(experiment, 8, target)
    assert answer.recommended.setting == answer.setting
    for phase, wanted in zip(by_phase(experiment, 8, target), answer.phases, strict=True):
        last = phase.options[-1]
        assert (phase.name, phase.steps, last.gpus) == (wanted.name, wanted.steps, 8)
        if phase.name != "restore":  # its stages have two storages
            assert last.choice.setting.ranks == 8
            assert last.step_seconds == pytest.approx(wanted.expected_seconds, rel=0.03)


def test_the_best_is_the_largest_number_as_cheap_as_the_cheapest():
    choice = plan(ready("gpt2_small"), 8, machine("a100-80gb", 8)).recommended
    options = [Option(n, choice, 10, seconds) for n, seconds in ((1, 8.0), (2, 4.02), (4, 2.04), (8, 1.2))]
    phase = PhaseOptions("ultra", 10, options)
    assert (phase.fewest.gpus, phase.best.gpus) == (1, 4)


def test_what_cannot_be_compared():
    no_batch = load({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1,
                     "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "mst": {"method": "mst"}})  # fmt: skip
    with pytest.raises(UserError, match="train_batch_size"):
        by_phase(no_batch, 8, TARGET)
    with pytest.raises(UserError, match="phase warmup fits on none of 1, 2 GPUs"):
        by_phase(ready("gpt3_13b"), 2, TARGET)


def test_the_command(capsys):
    words = ["plan", "--config", str(ROOT / "ds_configs" / "gpt2_small.json"), "--gpus", "4", "--set", COMPACT]
    assert main([*words, "--by-phase", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [phase["name"] for phase in found["by_phase"]] == ["warmup", "ultra", "restore", "dense"]
    assert all(phase["fewest"]["gpus"] == 1 for phase in found["by_phase"])
    assert main([*words, "--by-phase"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["phase", "steps", "storage", "fewest"] and max(map(len, lines)) <= 120
    assert main([*words, "--by-phase", "--tp", "2"]) == 2
    assert "omit --tp" in capsys.readouterr().err


def test_the_last_columns_are_named_after_the_gpus_that_they_are_for(capsys):
    """6 GPUs cannot share 16 sequences; 4 can."""
    words = ["plan", "--config", str(ROOT / "ds_configs" / "demo.json"), "--gpus", "6", "--by-phase"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "4:" in shown.splitlines()[0].split() and "6:" not in shown and "6 GPUs cannot share" in shown
