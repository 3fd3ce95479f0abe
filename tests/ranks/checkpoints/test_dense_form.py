"""The dense form of a compact run's checkpoint is read by DeepSpeed alone, without this package's hooks."""

from pathlib import Path

import deepspeed
import pytest
import torch

from mst_scale.checkpoints import finding
from mst_scale.config import load
from mst_scale.hugging_face.export import open_source
from mst_scale.models.gpt import GPT
from tests.support import pool, whole_runs

pytestmark = pytest.mark.full


def loaded_by_deepspeed(rank: int, world: int, config: Path, out: Path, stage: int) -> dict[str, torch.Tensor]:
    """The weights of a plain engine after DeepSpeed's own universal loading."""
    torch.manual_seed(99)
    model = GPT(load(config).model)
    plain = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "checkpoint": {"load_universal": True},
        "steps_per_print": 2**31,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=plain)
    path, _ = engine.load_checkpoint(str(out / "checkpoints"), tag=finding.list_tags(out / "checkpoints")[0])
    assert path is not None and engine.global_steps == 12
    return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_reads_it(tmp_path, stage):
    argv = whole_runs.arguments(tmp_path, "out", zero_optimization={"stage": stage}, **whole_runs.COMPACT)
    assert pool.run(whole_runs.attempt, 2, argv) == [(0, "")] * 2
    expected = dict(open_source(tmp_path / "out").model().named_parameters())
    for found in pool.run(loaded_by_deepspeed, 2, Path(argv[1]), tmp_path / "out", stage):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
