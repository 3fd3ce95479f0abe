"""Every key of the config is compared on resume, or is marked as one that cannot change the result of a run."""

import dataclasses

import pytest

from mst_scale.config import load
from mst_scale.config.changes import differences, result_keys
from mst_scale.config.load import BLOCKS
from mst_scale.hybrid_sparse_attention.config import PhaseStrides
from mst_scale.mixed_growing.config import BlockGranularity

RAW = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "mst": {"method": "mst"}}
# Paths, intervals of logging and evaluation, checks, memory for time, and what runs are set beside.
WITHOUT_EFFECT = {
    "model.preset", "model.activation_checkpointing", "data.dir", "training.log_every", "training.eval_every",
    "training.eval_tasks", "training.eval_data", "training.histogram_every", "training.baseline",
    "training.async_save", "training.checkpoint_form", "training.reshape_on_load", "training.verify_every",
    "training.memory_every",
    "mst.topology.check_every", "mst.topology.track_coverage", "mst.allow_untested",
}  # fmt: skip


def all_keys(block, path):
    for field in dataclasses.fields(block):
        value, key = getattr(block, field.name), f"{path}.{field.name}"
        if key in WITHOUT_EFFECT or not dataclasses.is_dataclass(value):
            yield key
        else:
            yield from all_keys(value, key)


KEYS = [key for name in BLOCKS for key in all_keys(getattr(load(RAW), name), name)]


def with_another(block, path):
    """The block with another value of one key, of whatever type."""
    name, _, rest = path.partition(".")
    value = getattr(block, name)
    new = with_another(value, rest) if rest else ("something else" if value is None else None)
    made = object.__new__(type(block))
    made.__dict__.update({**vars(block), name: new})
    return made


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_compared_unless_it_is_marked(key):
    experiment = load(RAW)
    name, _, rest = key.partition(".")
    other = dataclasses.replace(experiment, **{name: with_another(getattr(experiment, name), rest)})
    found = differences(result_keys(experiment), result_keys(other))
    assert (found == []) if key in WITHOUT_EFFECT else (len(found) == 1 and found[0].startswith(f"{key} ")), found


def test_setting_a_default_is_not_a_change():
    found = [result_keys(load(RAW, more)) for more in ([], ["optimizer.params.torch_adam=false"])]
    assert differences(*found) == []


def test_differences_are_described():
    found = [result_keys(load(RAW, more)) for more in ([], ["mst.topology.policy=set", "gradient_clipping=1.0"])]
    assert differences(*found) == ["mst.topology.policy 'mst' → 'set'", "gradient_clipping unset → 1.0"]
    assert differences(*reversed(found)) == ["mst.topology.policy 'set' → 'mst'", "gradient_clipping 1.0 → unset"]
    assert differences(found[0], found[0]) == []


@pytest.mark.parametrize(
    ("key", "compared"),
    [
        ("optimizer.params.lr", True), ("optimizer.params.eps", True), ("bf16.enabled", True), ("unheard_of.key", True),
        ("zero_optimization.stage", True), ("steps_per_print", False), ("tensorboard.output_path", False),
        ("wandb.project", False), ("flops_profiler.profile_step", False), ("wall_clock_breakdown", False),
        ("checkpoint.tag_validation", False), ("train_micro_batch_size_per_gpu", False),
    ],
)  # fmt: skip
def test_deepspeeds_keys_that_watch_a_run_are_left_out(key, compared):
    block = 7
    for part in reversed(key.split(".")):
        block = {part: block}
    found = differences({}, result_keys(dataclasses.replace(load(RAW), deepspeed=block)))
    assert (f"{key} unset → 7" in found) == compared


def test_a_custom_loop_needs_only_the_keys_that_it_reads():
    keys = result_keys(load(RAW), own_loop=True)
    blocks = {key.partition(".")[0] for key in keys}
    assert {"training.steps", "training.seed", "mst.topology.policy", "optimizer.params.lr"} <= keys.keys()
    assert "model" not in blocks and "data" not in blocks and "training.warmup" not in keys


def test_keys_that_another_version_has_not_are_not_compared():
    now = result_keys(load(RAW))
    before = {key: value for key, value in now.items() if key != "mst.topology.regrow"}
    assert differences(before, now) == [] and differences(now, before) == []


def test_blocks_inside_blocks_are_walked():
    keys = result_keys(load({**RAW, "mst": {"method": "mst", "topology": {"granularity": {"block": 16}}}}))
    for cls, path in ((PhaseStrides, "mst.attention.phase_strides"), (BlockGranularity, "mst.topology.granularity")):
        assert {f"{path}.{field.name}" for field in dataclasses.fields(cls)} <= keys.keys()
