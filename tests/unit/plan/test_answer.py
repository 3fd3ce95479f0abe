"""The whole plan of a config."""

import pytest

from mst_scale.cli.plan_text import format_plan
from mst_scale.config import load
from mst_scale.errors import UserError
from mst_scale.plan.answer import of_tokens, plan
from mst_scale.plan.gpus import machine
from tests.support.plan_configs import A100, ready
from tests.support.tiny_run import ROOT

BLOCKS = ("mst.compute.backend=block", "mst.topology.granularity.block=32")


def test_steps_of_tokens():
    e = of_tokens(ready("gpt3_1.3b"), 3e9, 512)
    assert e.training.steps == round(3e9 / (512 * 2048))
    assert e.mst.sparsity.ultra == pytest.approx(10 / 14)


def test_a_batch_of_fewer_sequences_than_gpus_is_shared_by_groups():
    answer = plan(ready("gpt3_175b"), 1024, machine("a100-80gb", 1024))
    assert answer.setting == answer.recommended.setting and answer.setting.batch == 1536
    assert answer.setting.sizes.model > 1 and "1,536 sequences" in answer.why[-1]
    with pytest.raises(UserError, match="--set train_batch_size="):
        plan(ready("gpt3_13b"), 7, machine("a100-80gb", 7))


def test_a_size_that_is_fixed_is_planned_with_the_best_beside_it():
    e, target = ready("gpt3_13b"), machine("a100-80gb", 64)
    answer = plan(e, 64, target, fixed={"tensor": 4, "pipeline": 2})
    assert (answer.setting.tensor, answer.setting.pipeline, answer.setting.stage) == (4, 2, 1)
    assert answer.setting == answer.recommended.setting and answer.given.sizes.model == 1
    assert all((row.setting.tensor, row.setting.pipeline) == (4, 2) for row in answer.layouts)
    with pytest.raises(UserError, match="tensor 16"):
        plan(e, 64, target, fixed={"tensor": 16})


def test_methods_that_store_dense_matrices_skip_nothing():
    answer = plan(load(ROOT / "ds_configs" / "gpt2_small.json", ["mst.compute.backend=block"], "top-kast"), 8, A100)
    assert {phase.expected_seconds for phase in answer.phases} == {answer.seconds.total} and not answer.sides


def test_expected_times_of_blocks():
    answer = plan(ready("gpt2_small", *BLOCKS), 8, A100)
    expected, ultra = answer.to_dict()["expected"], answer.sparsest
    assert expected["ultra_speedup"] == ultra.dense_seconds / ultra.expected_seconds > 2
    assert ultra.expected_seconds == pytest.approx(answer.sides[2].seconds), "its own side"
    assert expected["run_speedup"] == answer.dense_hours / answer.expected_hours > 1


def test_the_copy_of_a_checkpoint_takes_host_memory():
    def planned(*sets):
        return plan(ready("gpt2_small", *sets), 8, A100)

    one = planned("zero_optimization.stage=2").memory
    assert one.snapshot == one.weights + one.optimizer + one.masks > 0
    three = planned("zero_optimization.stage=3").memory
    assert three.snapshot == three.optimizer + three.masks
    offloaded = planned("zero_optimization.stage=2", "zero_optimization.offload_optimizer.device=cpu")
    for answer in (offloaded, planned("training.async_save=false")):
        assert answer.memory.snapshot == 0 and "hold a checkpoint" not in format_plan(answer)
    assert format_plan(planned()).count("GB of host memory per GPU hold a checkpoint until it is written") == 1
