"""The whole plan of a config."""

import json
from dataclasses import replace

import pytest

from mst_scale.cli import main
from mst_scale.cli.plan_text import format_plan
from mst_scale.config import load
from mst_scale.errors import UserError
from mst_scale.flops.budgets import shortened
from mst_scale.plan.answer import of_tokens, plan
from mst_scale.plan.gpus import machine
from mst_scale.plan.setting import setting_of
from mst_scale.plan.traffic import tied_ends
from tests.support.plan_configs import A100, ready
from tests.support.tiny_run import ROOT

BLOCKS = ("mst.compute.backend=block", "mst.topology.granularity.block=32")
OFF = "mst.compute.compact=off"


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
    assert format_plan(planned()).count("B of host memory per GPU hold a checkpoint until it is written") == 1


def test_the_copies_of_memory_every_take_host_memory_of_a_node():
    one, several = (plan(ready("gpt2_small", "training.memory_every=50"), gpus, A100) for gpus in (8, 16))
    assert one.kept_copies == 2 * 8 * one.memory.snapshot > 0
    assert several.kept_copies == 4 * 8 * several.memory.snapshot, "and those of a neighbor"
    assert format_plan(several).count("of host memory per node hold copies") == 1
    assert plan(ready("gpt2_small"), 16, A100).kept_copies == 0


CONSTANT = ("mst.compute.compact=auto", "mst.sparsity.max=0.96", "mst.targets.lm_head=true")


def constant(name: str, *overrides: str):
    return load(ROOT / "ds_configs" / f"{name}.json", [*CONSTANT, *overrides], "set")


def test_a_run_with_compact_layers():
    """Memory and bytes of its phases follow the density; a dense step, next to it, is that of a dense run."""
    compact = plan(constant("gpt3_1.3b"), 8, A100)
    dense = plan(constant("gpt3_1.3b", "mst.compute.compact=off"), 8, A100)
    mine, theirs = compact.to_dict(), dense.to_dict()
    assert mine["storage"] == {"compact_phases": [phase.name for phase in compact.phases], "why_dense": None}
    assert compact.memory.optimizer < 0.05 * dense.memory.optimizer
    for one, other in zip(compact.phases, dense.phases, strict=True):
        assert one.compact and not other.compact
        assert one.sent_bytes < 0.05 * other.sent_bytes == 0.05 * sum(dense.sent.values())
        assert one.memory_bytes < other.memory_bytes
    assert (mine["sent"], mine["dense_step"]) == (theirs["sent"], theirs["dense_step"])
    assert mine["topology_step"] is None is not theirs["topology_step"]
    text = format_plan(compact)
    assert "compact storage in" in text and "not planned for compact storage" in text
    assert "compact storage in" not in format_plan(dense) and "mst.compute.compact=auto" in format_plan(dense)


def test_a_run_whose_sparsity_changes_is_compact_in_its_long_phase():
    """The run needs the memory of its dense phases; the ultra-sparse phase by itself less."""
    overrides = ("mst.targets.lm_head=true",)
    answer, dense = plan(ready("gpt3_1.3b", *overrides), 8, A100), plan(ready("gpt3_1.3b", OFF), 8, A100)
    compact = {phase.name: phase.compact for phase in answer.phases}
    assert compact == {phase.name: phase.name == "ultra" for phase in answer.phases}
    assert answer.storage["compact_phases"] == ["ultra"] and "compact storage in the ultra-sparse phase" in format_plan(
        answer
    )
    assert answer.memory == dense.memory
    for one, other in zip(answer.phases, dense.phases, strict=True):
        if one.compact:
            assert one.sent_bytes < 0.05 * other.sent_bytes and one.memory_bytes < other.memory_bytes
        else:  # the first stage of the restoration is long enough to be compact
            assert one.memory_bytes == other.memory_bytes
            assert one.sent_bytes == other.sent_bytes or one.name == "restore"
    alone = plan(constant("gpt3_1.3b", "mst.topology.policy=mst"), 8, A100)
    assert answer.sparsest.sent_bytes == alone.sparsest.sent_bytes


@pytest.mark.parametrize(
    ("overrides", "fixed", "reason"),
    [
        (["mst.topology.policy=snfs"], {}, "momentum"),
        (["mst.sparsity.variation=sv", "mst.sparsity.max=0.4"], {}, "the sparsity changes"),
        ([], {"tensor": 2}, "split over ranks"),
        (["mst.sparsity.variation=sv"], {"tensor": 2}, "split over ranks"),
    ],
)
def test_a_run_whose_layers_stay_dense_says_why(overrides, fixed, reason):
    answer = plan(constant("gpt3_1.3b", *overrides), 8, A100, fixed=fixed)
    assert not answer.storage["compact_phases"] and reason in answer.storage["why_dense"]
    text = " ".join(format_plan(answer).split())
    assert f"dense storage of sparse layers: {answer.storage['why_dense']}" in text
    assert answer.memory.optimizer > 0.9 * 12 * answer.parameters / 8 / fixed.get("tensor", 1)


def test_stages_of_a_pipeline_are_compact():
    """They send and keep what is stored, also of the head that is tied across the first and the last."""
    two = {"pipeline": 2}
    compact, dense = (
        plan(constant("gpt3_1.3b", f"mst.compute.compact={kind}"), 8, A100, fixed=two) for kind in ("auto", "off")
    )
    assert compact.storage["why_dense"] is None and compact.setting.pipeline == 2
    assert compact.memory.optimizer < 0.1 * dense.memory.optimizer
    sent = [sum(call.payload for call in tied_ends(p.experiment.model, p.setting)) for p in (compact, dense)]
    assert 0 < sent[0] < 0.05 * sent[1]


def test_blocks_are_stored_whole():
    answer = plan(constant("gpt3_1.3b"), 8, A100)
    assert answer.best.side and answer.best.setting.compact is None
    assert answer.best.memory.optimizer > 10 * answer.memory.optimizer


def test_phases_without_masks_have_no_topology_steps():
    answer = plan(ready("gpt2_small", OFF), 8, A100)
    assert [phase.name for phase in answer.phases][-1] == "dense"
    assert answer.phases[-1].memory_bytes <= min(phase.memory_bytes for phase in answer.phases)
    assert {phase.sent_bytes for phase in answer.phases} == {sum(answer.sent.values())}


def test_proposals_keep_a_batch_that_is_stated_per_rank():
    changes = ["train_micro_batch_size_per_gpu=16", "gradient_accumulation_steps=4"]
    e = load("gpt3_6.7b", changes)
    e.deepspeed.pop("train_batch_size", None)
    with pytest.raises(UserError) as caught:
        plan(e, 8, machine("a100-80gb", 8))
    stated = [word for word in str(caught.value).split() if "=" in word]
    sizes = {key: int(value) for key, _, value in (word.partition("=") for word in stated) if value.isdigit()}
    assert 8 * sizes["train_micro_batch_size_per_gpu"] * sizes["gradient_accumulation_steps"] == 512


def test_a_size_may_be_fixed_where_the_batch_has_fewer_sequences_than_gpus():
    answer = plan(ready("gpt3_175b"), 1024, machine("a100-80gb", 1024), fixed={"tensor": 8})
    assert answer.setting.tensor == 8 and answer.setting.batch == 1536 and answer.given.sizes.model == 1


@pytest.mark.parametrize("value", ["auto", None])
def test_sizes_that_a_framework_fills_in_have_their_defaults(value):
    e = ready("gpt2_small")
    sizes = dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size", "sub_group_size"), value)
    config = {**e.deepspeed, "zero_optimization": {"stage": 2, **sizes}}
    assert setting_of(replace(e, deepspeed=config), 8).reduce_bucket == 500_000_000
    config["zero_optimization"]["reduce_bucket_size"] = "many"
    with pytest.raises(UserError, match="reduce_bucket_size"):
        setting_of(replace(e, deepspeed=config), 8)


def test_a_smaller_micro_batch_keeps_the_batch_of_a_config_that_states_no_other():
    e = load("gpt2_xl", ["train_micro_batch_size_per_gpu=64"])
    for key in ("train_batch_size", "gradient_accumulation_steps"):
        e.deepspeed.pop(key, None)
    with pytest.raises(UserError) as caught:
        plan(e, 8, machine("a100-40gb", 8))
    stated = (word.partition("=") for word in str(caught.value).split() if "=" in word)
    sizes = {key: int(value) for key, _, value in stated if value.isdigit()}
    assert sizes["train_micro_batch_size_per_gpu"] * sizes["gradient_accumulation_steps"] == 64


def test_phases_that_are_longer_than_the_run_stay_so():
    e = load("gpt2_small", ["mst.attention.dense_from=200000"])
    assert of_tokens(e, 1e10, 512).mst.attention.dense_from == 1.0


def test_a_dense_short_run_has_the_steps_that_pretrain_gives_it(tmp_path, capsys):
    """Its length depends on the number of replicas if the batch is stated per rank: 2 of 4 GPUs share the model."""
    config = {
        "train_micro_batch_size_per_gpu": 4, "tensor_parallel": {"autotp_size": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "training": {"steps": 100},
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 32, "seq_length": 16, "vocab_size": 250},
        "mst": {"method": "dense-short", "like": str(ROOT / "ds_configs" / "demo.json")},
    }  # fmt: skip
    path = tmp_path / "c.json"
    path.write_text(json.dumps(config))
    assert main(["plan", "--config", str(path), "--gpus", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == shortened(load(config), ranks=2).training.steps


def test_tokens_are_rejected_for_a_run_whose_length_follows_from_flops(capsys):
    words = ["plan", "--config", "demo", "--gpus", "1", "--method", "dense-short", "--tokens", "1B"]
    assert main(words) == 2 and "--tokens has no meaning with method dense-short" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "1000000000"])
def test_a_number_of_gpus_that_cannot_be_meant_is_rejected(number, capsys):
    assert main(["plan", "--config", "demo", "--nodes", "1", "--gpus", number]) == 2
    assert "--gpus must be a number from 1 to 1,048,576" in capsys.readouterr().err
