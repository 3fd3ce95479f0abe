"""What docs/compatibility.md calls exact is exact, what it rejects is rejected, and every key has a status."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime import config as deepspeed_configs
from deepspeed.runtime.zero import config as zero_configs
from deepspeed.runtime.zero import offload_config

import mst_scale
from mst_scale.config import MSTConfig, load
from mst_scale.config.check import check
from mst_scale.config.support import TABLE, check_supported, known_keys, row_of, rows
from mst_scale.errors import UserError
from tests.support import pool
from tests.support.toy_engine import mst_config, watched
from tests.support.toys import Toy, allow_fp16, toy

ROOT = Path(__file__).parents[3]
STEPS, LENGTH = 8, 16  # topology steps at 3 and 6, among others


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


@dataclass(frozen=True)
class Feature:
    config: dict[str, Any]
    stages: tuple[int, ...] = (3,)
    precision: str = "fp32"
    same: bool = True  # the arithmetic is that of the plain run, and so are the masks


ON_CPU = {"device": "cpu"}
UNSCATTERED = {"reduce_scatter": False}
FEATURES = {
    "plain": Feature({}, (0, 1, 2, 3)),
    "every step a boundary": Feature({"managed_gradient_accumulation": False}, (2, 3)),
    "gradients prescaled": Feature({"prescale_gradients": True, **zero(**UNSCATTERED)}, (0, 2, 3)),
    "gradients predivided": Feature({"gradient_predivide_factor": 2.0, **zero(**UNSCATTERED)}, (0, 2)),
    "gradients summed": Feature({"gradient_allreduce_op": "sum"}, (0, 2), same=False),
    "gradients sent in bf16": Feature({"communication_data_type": "bf16"}, (0, 2, 3), same=False),
    "fixed loss scale": Feature({"fp16": {"enabled": True, "loss_scale": 128}}, (2, 3), "fp16", same=False),
    "gradients added up in bf16": Feature({"data_types": {"grad_accum_dtype": "bf16"}}, (2, 3), same=False),
    "torch's Adam": Feature({"optimizer": {"params": {"lr": 1e-2, "torch_adam": True}}}, (0, 2), same=False),
    "weight decay in the gradient": Feature(
        {"optimizer": {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False}}},
        (0, 3),
        same=False,
    ),
    "tiny buckets": Feature(zero(reduce_bucket_size=50, allgather_bucket_size=64), (1, 2, 3)),
    "no allgather": Feature(zero(allgather_partitions=False), (1, 2)),
    "no reduce-scatter": Feature(zero(**UNSCATTERED), (1, 2, 3)),
    "gradients not contiguous": Feature(zero(contiguous_gradients=False), (2, 3)),
    "overlapped": Feature(zero(overlap_comm=True), (1, 2)),
    "one reduce a rank": Feature(zero(use_multi_rank_bucket_allreduce=False), (1, 2)),
    "aligned": Feature(zero(parameter_alignment=True), (1, 2)),
    "no unused parameters": Feature(zero(ignore_unused_parameters=False), (2,)),
    "no norm": Feature({**zero(compute_grad_norm=False), "gradient_clipping": 0.0}, (2,), "bf16", same=False),
    "small sub-groups": Feature(zero(sub_group_size=100)),
    "small parameters stay whole": Feature(zero(stage3_param_persistence_threshold=1000)),
    "gathered late": Feature(
        zero(
            stage3_prefetch_bucket_size=10,
            stage3_max_live_parameters=100,
            stage3_max_reuse_distance=10,
            stage3_model_persistence_threshold=100,
        )
    ),
    "gathered by all-reduce": Feature(zero(stage3_use_all_reduce_for_fetch_params=True)),
    "gathered one by one": Feature(zero(stage3_allgather_sequential=True)),
    "torch's linear": Feature(zero(memory_efficient_linear=False)),
    "leaf modules": Feature(zero(leaf_module={"names": ["norm"]})),
    "optimizer on the CPU": Feature(zero(offload_optimizer=ON_CPU), (1, 2, 3), same=False),
    "optimizer on the CPU, not pinned": Feature(
        zero(offload_optimizer={**ON_CPU, "pin_memory": False}), (2, 3), same=False
    ),
    "parameters on the CPU": Feature(zero(offload_param=ON_CPU)),
    "parameters and optimizer on the CPU": Feature(
        zero(offload_param={**ON_CPU, "pin_memory": False}, offload_optimizer=ON_CPU), same=False
    ),
    "FLOPs profiled": Feature(
        {"flops_profiler": {"enabled": True, "profile_step": 4, "output_file": "/dev/null"}}, (2, 3)
    ),
}


def trained(rank: int, world: int, stage: int, precision: str, extra: dict) -> tuple:
    allow_fp16()
    config = mst_config(stage, world, precision, steps=LENGTH, **extra)
    engine, *_ = mst_scale.initialize(model=toy(), config=config)
    return watched(engine, rank, world, STEPS)


@functools.cache
def plain(stage: int, precision: str) -> list[list[str]]:
    """The masks of the run without the feature."""
    ((faults, history), *_) = pool.run(trained, 2, stage, precision, {})
    assert faults == [] and len(history) >= 3 and history[-1] != history[0]
    return list(history)


def check_feature(feature: Feature, stages: tuple[int, ...]) -> None:
    for stage in stages:
        results = pool.run(trained, 2, stage, feature.precision, feature.config)
        for faults, history in results:
            assert faults == [], f"stage {stage}"
            assert history == results[0][1] and len(history) >= 3
            if feature.same:
                assert history == plain(stage, feature.precision), f"stage {stage}"


@pytest.mark.full
@pytest.mark.parametrize("name", FEATURES)
def test_feature(name):
    """At the last of its stages; the others are slow together."""
    check_feature(FEATURES[name], FEATURES[name].stages[-1:])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, feature in FEATURES.items() if len(feature.stages) > 1])
def test_feature_at_the_other_stages(name):
    check_feature(FEATURES[name], FEATURES[name].stages[:-1])


OPTIMIZERS = {
    "SGD": ("SGD", {}),
    "SGD with momentum": ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adam with amsgrad": ("AdamW", {"amsgrad": True}),
    "RMSprop": ("RMSprop", {}),
    "RMSprop centered": ("RMSprop", {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    "Adagrad": ("Adagrad", {"weight_decay": 0.1, "lr_decay": 0.01}),
    "Adadelta": ("Adadelta", {"weight_decay": 0.1}),
    "NAdam": ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": ("RAdam", {"weight_decay": 0.1}),
    "ASGD": ("ASGD", {"weight_decay": 0.1}),
    "Adafactor": ("Adafactor", {"weight_decay": 0.1}),
    "Adamax": ("Adamax", {"weight_decay": 0.1}),
    "Rprop": ("Rprop", {}),
}
WEIGHTS_ALONE = ("Adamax", "Rprop")


def trained_by(rank: int, world: int, stage: int, name: str) -> list[str]:
    config, model = mst_config(stage, world, steps=LENGTH), toy()
    config["zero_allow_untested_optimizer"] = True
    given, (kind, arguments) = {}, OPTIMIZERS[name]
    if stage != 0 or kind == "AdamW":  # by that name a config means DeepSpeed's own
        del config["optimizer"]
        given["optimizer"] = getattr(torch.optim, kind)(model.parameters(), lr=1e-2, **arguments)
    else:
        config["optimizer"] = {"type": kind, "params": {"lr": 1e-2, **arguments}}
    engine, *_ = mst_scale.initialize(model=model, config=config, **given)
    before = engine.mst.store.weight(0).clone()
    faults, _ = watched(engine, rank, world, STEPS)
    assert not before.numel() or not torch.equal(before, engine.mst.store.weight(0)), "it trains"
    return faults


def check_optimizer(name: str, stages: tuple[int, ...]) -> None:
    for stage in stages:
        for faults in pool.run(trained_by, 2, stage, name):
            of_weights = [fault for fault in faults if "moment" not in fault]
            assert (of_weights if name in WEIGHTS_ALONE else faults) == [], f"stage {stage}"


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name):
    check_optimizer(name, (3,))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_at_the_other_stages(name):
    check_optimizer(name, (0, 1, 2))


def compiled(rank: int, world: int, stage: int) -> tuple:
    engine, *_ = mst_scale.initialize(model=toy(), config=mst_config(stage, world, steps=LENGTH))
    engine.compile(backend="eager")
    assert engine.is_compiled
    return watched(engine, rank, world, STEPS)


def check_compiled(stages: tuple[int, ...]) -> None:
    for stage in stages:
        for faults, history in pool.run(compiled, 2, stage):
            assert faults == [] and history == plain(stage, "fp32")


@pytest.mark.full
def test_masks_survive_compile():
    check_compiled((3,))


@pytest.mark.slow
def test_masks_survive_compile_at_the_other_stages():
    check_compiled((0, 1, 2))


RECOMPUTE = {"number_checkpoints": 1, "synchronize_checkpoint_boundary": True}


class Recomputing(Toy):
    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        block = lambda x: self.down(self.norm(torch.relu(self.up(x))))  # noqa: E731
        x = x + deepspeed.checkpointing.checkpoint(block, x)
        return torch.nn.functional.cross_entropy(self.out(x).float(), targets)


def recomputed(rank: int, world: int, stage: int) -> tuple:
    model = Recomputing()
    model.load_state_dict(toy().state_dict())
    config = mst_config(stage, world, steps=LENGTH, activation_checkpointing=RECOMPUTE)
    engine, *_ = mst_scale.initialize(model=model, config=config)
    deepspeed.checkpointing.configure(None, deepspeed_config=engine.config)
    return watched(engine, rank, world, STEPS)


def test_recomputed_activations_change_no_mask():
    for faults, history in pool.run(recomputed, 2, 3):
        assert faults == [] and history == plain(3, "fp32")


# --- what is refused ---

SPARSE = MSTConfig(method="mst")
REFUSED = [
    (zero(stage=3, offload_optimizer={"device": "cpu", "super_offload": True}), "before they can be masked: set it to"),
    (zero(stage=3, offload_optimizer={"device": "nvme"}), 'set offload_optimizer.device to "cpu"'),
    (zero(stage=3, offload_optimizer={"device": "cpu", "ratio": 0.5}), "ratio = 0.5 .* set it to 1.0"),
    (zero(stage=3, offload_param={"device": "nvme"}), 'set offload_param.device to "cpu"'),
    (zero(stage=2, zenflow={"topk_ratio": 0.1}), "zenflow"),
    (zero(stage=3, zero_hpz_partition_size=2), "set it to 1"),
    (zero(stage=3, zero_quantized_gradients=True), 'CUDA only.*"allow_untested": \\["zero_optimization.zero_quant'),
    (zero(stage=3, mics_shard_size=2), "removed from DeepSpeed"),
    (zero(stage=1, round_robin_gradients=True), "round_robin_gradients = true .* set it to false"),
    (zero(stage=1, compute_grad_norm=False), "compute_grad_norm = false .* set it to true"),
    (zero(stage=2, cpu_offload=True), "write offload_optimizer"),
    (zero(stage=2, reduce_scater=True), "did you mean 'zero_optimization.reduce_scatter'"),
    (
        zero(stage=2, new_key=1),
        'new_key = 1 has not been tested.*"allow_untested": \\["zero_optimization.new_key"\\]',
    ),
    ({"zero_optimization": True}, "zero_optimization must be an object, not true"),
    ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, **zero(stage=1)}, "use ZeRO-2"),
    ({"bf16": {"enabled": True, "check_grad_overflow": False}, **zero(stage=2)}, "check_grad_overflow"),
    ({"data_types": {"grad_accum_dtype": "int8"}}, "has not been tested"),
    ({"gradient_predivide_factor": 2.0, **zero(stage=3)}, "leave it out"),
    ({"data_parallel_size": 1}, "data_parallel_size = 1 .* leave it out"),
    ({"pipeline": {"stages": 2}, **zero(stage=2)}, "pipeline.stages = 2 .* set zero_optimization.stage to 1"),
    ({"expert_parallel": {"enabled": True}}, "experts"),
    ({"hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled"),
    ({"compile": {"deepcompile": True}}, "engine.compile"),
    ({"torch_autocast": {"enabled": True}}, "use bf16"),
    ({"optimizer": {"type": "Muon", "params": {"per_head_muon": True}}}, "set it to false"),
    ({"optimizer": {"type": "lion"}}, "CUDA only"),
    ({"optimizer": {"type": "Sophia"}}, "has not been tested"),
    ({"optimizer": {"type": "AdamW", "legacy_fusion": True}}, "hooks"),
    ({"data_efficiency": {"data_routing": {"random_ltd": {"enabled": True}}}}, "tokens"),
    ({"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}}, "data loader"),
    ({"curriculum_learning": {"enabled": True}}, "removed from DeepSpeed"),
    ({"activation_checkpointing": {"partition_activations": True}}, "recomputes"),
    ({"checkpoint": {"writer": {"type": "fast"}}}, "checkpoint.writer"),
    ({"checkpoint": {"use_node_local_storage": True}}, "one folder"),
    ({"datastates_ckpt": {}}, "sealed"),
    ({"load_universal_checkpoint": True}, "write it in the checkpoint block"),
    ({"amp": {"enabled": True}}, "use bf16 or fp16"),
    ({"autotuning": {"enabled": True}}, "run it with method dense"),
    ({"bfloat16": {"enabled": True}}, "write bf16"),
    ({"my_note": "ours"}, "has not been tested"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_inexact_keys_are_rejected_in_one_line_unless_the_run_stays_dense(config, message):
    with pytest.raises(UserError, match=message) as caught:
        check_supported(config, SPARSE)
    assert len(str(caught.value).splitlines()) == 1
    assert check_supported(config, load({"mst": {"method": "dense"}}).mst) == []


@pytest.mark.parametrize("stage", [4, -1, True, "2", 2.5, None])
@pytest.mark.parametrize("method", ["mst", "dense"])
def test_a_stage_that_does_not_exist_is_named_before_any_other_key(stage, method):
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    with pytest.raises(UserError, match=r"^zero_optimization\.stage"):
        check_supported(config, load({"mst": {"method": method}}).mst)


def test_disabled_and_missing_keys_are_accepted():
    off = zero(stage=3, zero_hpz_partition_size=1, zenflow=None, round_robin_gradients="auto", offload_param=None)
    off |= {"hybrid_engine": {"enabled": False}, "tensor_parallel": {"autotp_size": 0}, "fp16": {"enabled": "auto"}}
    assert check_supported(off, SPARSE) == []


def test_a_user_may_allow_untested_keys_but_not_rejected_ones():
    allowed = MSTConfig(method="mst", allow_untested=["zero_optimization.new_key", "zero_optimization.zenflow"])
    (note,) = check_supported(zero(new_key=1), allowed)
    assert note.startswith("zero_optimization.new_key = 1 has not been tested")
    with pytest.raises(UserError, match="zenflow"):
        check_supported(zero(new_key=1, zenflow={}), allowed)


def test_the_flops_profilers_count_is_explained_once():
    (note,) = check_supported({"flops_profiler": {"enabled": True}}, SPARSE)
    assert "masked products as dense ones" in note and "say so" not in note


def nothing_is_built(*_: Any, **__: Any) -> None:
    raise AssertionError("DeepSpeed was asked to build an engine")


ARGUMENTS = [
    ({"mpu": SimpleNamespace()}, {}, "this mpu "),
    ({"mesh_param": (1, 2)}, {}, "mesh_param "),
    ({}, {"sequence_parallel_size": 2}, "sequence_parallel_size"),
]


@pytest.mark.parametrize(("given", "extra", "message"), ARGUMENTS)
def test_arguments_are_rejected_before_deepspeed_builds_anything(monkeypatch, given, extra, message):
    monkeypatch.setattr("mst_scale.engine.api._deepspeeds_own", with_signature_of(deepspeed.initialize))
    with pytest.raises(UserError, match=message):
        mst_scale.initialize(model=toy(), config=mst_config(2, 2, **extra), **given)
    with pytest.raises(AssertionError, match="asked to build"):
        mst_scale.initialize(model=toy(), config=mst_config(2, 2))


def with_signature_of(function: Any) -> Any:
    return functools.wraps(function)(nothing_is_built)


def test_a_pipeline_is_rejected_before_deepspeed_builds_anything(monkeypatch):
    monkeypatch.setattr("mst_scale.engine.api._deepspeeds_own", with_signature_of(deepspeed.initialize))
    stage = object.__new__(deepspeed.PipelineModule)
    torch.nn.Module.__init__(stage)
    stage._layer_specs = []
    with pytest.raises(UserError, match=r"zero_optimization\.stage = 2"):
        mst_scale.initialize(model=stage, model_parameters=[], config=mst_config(2, 2))


def test_pretrain_and_plan_reject_the_same(tmp_path):
    base = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    check(load({**base, "mst": {"method": "mst"}}))
    with pytest.raises(UserError, match="data_parallel_size"):
        check(load({**base, "data_parallel_size": 1, "mst": {"method": "mst"}}))
    check(load({**base, "data_parallel_size": 1, "mst": {"method": "dense"}}))


# --- the table knows every key, and the page is the table's ---


class Spy(dict):
    """A config that notes what DeepSpeed asks of it."""

    def __init__(self, content: dict[str, Any], asked: set[str]):
        super().__init__(content)
        self.asked = asked

    def __copy__(self) -> Spy:
        return Spy(dict(self), self.asked)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:  # DeepSpeed asks `key in config.keys()`
        return self


def test_every_top_level_key_that_deepspeed_asks_for_has_a_line():
    asked: set[str] = set()
    deepspeed_configs.DeepSpeedConfig(Spy({"train_batch_size": 8}, asked))
    asked |= set(deepspeed_configs._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    assert len(asked) > 50 and asked <= set(known_keys())


MODELS = {
    "zero_optimization": zero_configs.DeepSpeedZeroConfig,
    "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
    "bf16": deepspeed_configs.get_bfloat16_config({}).__class__,
    "fp16": deepspeed_configs.get_float16_config({}).__class__,
    "compile": deepspeed_configs.CompileConfig,
    "hybrid_engine": deepspeed_configs.HybridEngineConfig,
    "tensor_parallel": deepspeed_configs.get_tensor_parallel_config({}).__class__,
}


@pytest.mark.parametrize("block", MODELS)
def test_every_key_of_a_block_has_a_line(block):
    known = {row.key for row in rows()}
    for name, described in MODELS[block].model_fields.items():
        for spelling in filter(None, (name, described.alias)):
            key = f"{block}.{spelling}"
            inner = any(other.startswith(f"{key}.") for other in known)
            assert inner or key in known or f"{block}.*" in known, key


def test_every_default_of_deepspeed_is_let_in():
    """So that a config may say what DeepSpeed would do anyway."""
    for block in ("bf16", "fp16", "compile", "hybrid_engine", "zero_optimization"):
        for name, described in MODELS[block].model_fields.items():
            default = described.get_default(call_default_factory=True)
            key, plain = f"{block}.{name}", isinstance(default, bool | int | float | str)
            if plain and not any(row.remark.startswith("Renamed") for row in rows() if row.key == key):
                found = row_of(key, default, 2, "fp32")
                assert found is not None and found.status in ("exact", "harmless"), key


def test_every_row_has_a_reason_or_an_existing_test():
    functions: dict[str, set[str]] = {}
    for row in rows():
        assert row.status in ("exact", "harmless", "rejected", "untested"), row
        assert bool(row.fix) == (row.status == "rejected"), row
        assert bool(row.test) == (row.status == "exact") and (row.remark or row.test), row
        if row.status == "exact":
            path, _, name = row.test_id.partition("::")
            name, _, case = name.partition("[")
            if path not in functions:
                tree = ast.parse((ROOT / path).read_text())
                functions[path] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert name in functions[path], row.test_id
            cases = {"test_feature": FEATURES, "test_optimizer": OPTIMIZERS}.get(name)
            assert cases is None or case.removesuffix("]") in cases, row.test_id
    named = {row.test_id for row in rows()}
    unnamed = [name for name in FEATURES if f"tests/ranks/config/test_support.py::test_feature[{name}]" not in named]
    assert unnamed == ["parameters and optimizer on the CPU"]


def test_the_tables_file_is_installed():
    assert '"**/*.json"' in (ROOT / "setup.py").read_text() and TABLE.suffix == ".json"
