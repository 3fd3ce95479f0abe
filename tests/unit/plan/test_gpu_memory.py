"""The plan's memory against what one H100 allocated: benchmarks/results/gpu.jsonl, with the settings of gpu_parts."""

import json
import re

import pytest

from mst_scale.benchmarks import step_cuda
from mst_scale.config import load
from mst_scale.plan.memory import Memory, memory
from mst_scale.plan.setting import setting_of
from tests.support.tiny_run import ROOT

ROWS = [json.loads(line) for line in (ROOT / "benchmarks" / "results" / "gpu.jsonl").read_text().splitlines()]
DENSITY = [row for row in ROWS if row.get("part") == "density" and "sides" in row]
HELD, PEAK = 0.035, {"masked": 0.02, "compact": 0.01, "dense": 0.03}
"""The dense side is compiled, and torch.compile frees some activations earlier."""
HELD_COMPILED, PEAK_COMPILED = 0.042, 0.03
"""Of the second day, when every side was compiled, and the first case counts what CUDA's libraries allocate once."""
WIDTHS = ("124M", "1.5B", "6.7B")


def of_stage(stage: int) -> Memory:
    """The plan of `gpu_parts.speed.peak`."""
    batch = ["train_micro_batch_size_per_gpu=8", "train_batch_size=8", "gradient_accumulation_steps=1"]
    more = ["optimizer.params.torch_adam=true", "mst.topology.interval=2", f"zero_optimization.stage={stage}"]
    experiment = load("gpt2_small", [*batch, *more])
    return memory(experiment, setting_of(experiment, 1))


def measured(case: str) -> int:
    """The latest measurement."""
    return [row["bytes"] for row in ROWS if row.get("case") == case and "bytes" in row][-1]


@pytest.mark.parametrize("stage", [2, 3])
def test_the_peak_of_gpt2_small(stage):
    """CUDA's libraries take some workspace in the first run of a process, which the plan counts as `CONTEXT`."""
    assert of_stage(stage).peak == pytest.approx(measured(f"gpt2_small, ZeRO {stage}"), rel=0.01)


@pytest.mark.parametrize("side", ["dense", "masked", "compact"])
@pytest.mark.parametrize("row", DENSITY, ids=lambda row: row["case"])
def test_bytes_between_steps_and_at_the_peak(row: dict, side: str):
    micro_batches = int(re.search(r"(\d+) ×", row["model"]).group(1))
    raw = step_cuda.constant(side)
    experiment = step_cuda.experiment_of(step_cuda.SHAPES[row["parameters"]], raw, micro_batches, False)
    of_held, of_peak = (HELD_COMPILED, PEAK_COMPILED) if "compiled" in row else (HELD, PEAK[side])
    wanted, found = memory(experiment, setting_of(experiment, 1)), row["sides"][side]
    assert wanted.optimizer == pytest.approx(found["state_bytes"], rel=0.001)
    assert wanted.held == pytest.approx(found["held_bytes"], rel=of_held)
    assert wanted.peak == pytest.approx(found["held_bytes"] + found["peak_bytes"], rel=of_peak)


def test_all_widths_were_measured():
    assert {row["parameters"] for row in DENSITY} == {*WIDTHS}
