"""Whole runs of models that several ranks share, against one rank's: rows, evaluation, resume, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mst_scale.errors import UserError
from mst_scale.pretrain.batches import Share
from tests.support import pool, tiny_run
from tests.support.whole_runs import MST, arguments, attempt, logged_attempt, without_times

MODEL = {"n_layer": 2, "n_head": 2, "n_embd": 16, "seq_length": tiny_run.CONTEXT, "vocab_size": 64}
# evaluation: three micro-batches, which two replicas cannot share evenly
TRAINING = {"steps": 6, "warmup": 2, "log_every": 1, "eval_every": 3, "eval_sequences": 6, "save_every": 3}
LAYOUTS = {
    "tensor": (2, {"tensor_parallel": {"autotp_size": 2}}),
    "tensor-data": (4, {"tensor_parallel": {"autotp_size": 2}}),
    "pipeline": (2, {"pipeline": {"stages": 2}}),
    "pipeline-data": (4, {"pipeline": {"stages": 2}}),
    "both": (4, {"tensor_parallel": {"autotp_size": 2}, "pipeline": {"stages": 2}}),
}


def _run(world: int, folder: Path, out: str, *more: str, **blocks: Any) -> list[dict[str, Any]]:
    blocks = {"model": MODEL, "training": TRAINING, **blocks}
    results = pool.run(attempt, world, arguments(folder, out, *more, **blocks))
    assert all(code == 0 for code, _ in results), results
    return without_times(tiny_run.rows(folder / out))


def _close(mine: list[dict[str, Any]], reference: list[dict[str, Any]], rtol: float = 1e-4) -> None:
    """float32 in another order of sums, by default."""
    assert len(mine) == len(reference)
    for ours, theirs in zip(mine, reference, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            same = theirs[key]
            assert value == (pytest.approx(same, rel=rtol) if isinstance(value, float) else same), key


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of one rank."""
    return _run(1, tmp_path_factory.mktemp("whole"), "whole")


@pytest.mark.parametrize(
    "layout", [one if one == "both" else pytest.param(one, marks=pytest.mark.full) for one in LAYOUTS]
)
def test_a_run_equals_that_of_one_rank_and_continues_from_its_checkpoint(
    tmp_path: Path, layout: str, reference: list[dict[str, Any]]
):
    world, keys = LAYOUTS[layout]
    mine = _run(world, tmp_path, "cut", **keys)
    _close(mine, reference)
    assert {"val_loss", "loss", "grad_norm", "flops"} <= mine[-1].keys()
    shutil.copytree(tmp_path / "cut", tmp_path / "whole")
    again = _run(world, tmp_path, "cut", "--resume", "step00000003", **keys)
    tiny_run.assert_continued(tmp_path / "cut", tmp_path / "whole", 3)
    assert again == mine, "bit for bit"


@pytest.mark.full
def test_a_pipeline_in_bf16_that_recomputes_activations(tmp_path: Path):
    """Within a few of bfloat16's steps (8 bits)."""
    world, keys = LAYOUTS["both"]
    keys = {**keys, "bf16": {"enabled": True}}
    keys["model"] = {**MODEL, "activation_checkpointing": True}
    _close(_run(world, tmp_path, "cut", **keys), _run(1, tmp_path, "whole", bf16={"enabled": True}), 5e-2)
    assert _run(world, tmp_path, "cut", "--resume", "step00000003", **keys) == without_times(
        tiny_run.rows(tmp_path / "cut")
    )


def test_stages_of_a_pipeline_report_the_revived_units_of_the_whole_model(tmp_path: Path):
    """Also if a stage has revived none of a kind: it still counts all of its units."""
    sparsity = {"max": 0.96, "warmup": 0, "ultra": 4, "restore": 1, "stages": 1}
    blocks = {"model": MODEL, "training": TRAINING, "mst": {**MST, "sparsity": sparsity}}
    revived = []
    for out, (world, keys) in {"whole": (1, {}), "cut": LAYOUTS["pipeline"]}.items():
        code, log = pool.run(logged_attempt, world, arguments(tmp_path, out, **blocks, **keys))[0]
        events = map(json.loads, (tmp_path / out / "events.jsonl").read_text().splitlines())
        (event,) = [event for event in events if event["event"] == "revived dead units"]
        assert code == 0 and f"step {event['step']}: revived {event['units']}\n" in log
        revived.append(event["units"])
    assert revived[0] == revived[1]


MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}
REFUSED = [
    ({"pipeline": {"stages": 2}, "zero_optimization": {"stage": 2}}, "zero_optimization.stage = 2"),
    (
        {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 0}, "bf16": {"enabled": True}},
        "bf16 without ZeRO",
    ),
    ({"pipeline": {"stages": 3}, "model": {**MODEL, "n_layer": 3}}, "into groups of pipeline 3"),
    ({"tensor_parallel": {"autotp_size": 2}, "model": {**MODEL, "n_head": 1}}, "model.n_head = 1"),
    ({"tensor_parallel": {"autotp_size": 2}, "model": {**MODEL, "dropout": 0.1}}, "model.dropout = 0.1"),
    ({"pipeline": {"stages": 2}, "model": {**MODEL, "n_layer": 1}}, "each stage needs a block"),
    ({"pipeline": {"stages": 2}, "model": {**MODEL, "arch": "bert"}}, "model.arch"),
    ({"tensor_parallel": {"autotp_size": 2}, "training": {**TRAINING, "eval_tasks": "x"}}, "training.eval_tasks"),
    ({"sequence_parallel_size": 2, "model": {**MODEL, "seq_length": 31}}, "model.seq_length = 31"),
    ({"sequence_parallel_size": 2, "pipeline": {"stages": 2}}, "sequence_parallel_size = 2"),
    ({"tensor_parallel": {"autotp_size": "two"}}, "tensor_parallel.autotp_size must be a positive integer, not 'two'"),
    ({"pipeline": {"stages": 2}, "flops_profiler": {"enabled": True}}, "flops_profiler.enabled"),
    ({"pipeline": {"stages": 2}, "wall_clock_breakdown": True}, "wall_clock_breakdown"),
    ({"pipeline": {"stages": 2}, "managed_gradient_accumulation": False}, "managed_gradient_accumulation = false"),
    ({"managed_gradient_accumulation": False}, "is for your own training loop"),
    (
        {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "bf16"}},
        "grad_accum_dtype = bf16 at ZeRO-1 in fp32 does not work with a pipeline that ties weights",
    ),
    ({"pipeline": [2]}, "pipeline must be an object, not [2]"),
    ({**MUON, "tensor_parallel": {"autotp_size": 2}, "mst": {"method": "mst"}}, "sparse training with Muon"),
    ({"pipeline": {"stages": 2}, "mst": {"method": "mst"}, "zero_optimization": {"stage": 2}}, "pipeline.stages = 2"),
]


@pytest.mark.parametrize("blocks, words", REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_contradictory_options_are_one_line(tmp_path: Path, blocks: dict[str, Any], words: str):
    results = pool.run(attempt, 2, arguments(tmp_path, "out", **{"model": MODEL, "training": TRAINING, **blocks}))
    said = "".join(text for _, text in results)
    assert [code for code, _ in results] == [2, 2]
    assert words in said and "Traceback" not in said
    assert len({line.replace("rank 1: ", "") for line in said.strip().splitlines()}) == 1, said


def test_parts_of_sequences_are_in_rank_order():
    tokens = torch.arange(24).view(2, 12)
    parts = [Share(replicas=1, replica=0, parts=3, part=part).cut(tokens) for part in range(3)]
    assert torch.equal(torch.cat(parts, dim=1), tokens)
    with pytest.raises(UserError, match="sequence_parallel_size"):
        Share(replicas=1, replica=0, parts=5, part=0).cut(tokens)
