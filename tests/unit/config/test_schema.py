"""ds_configs/mst.schema.json is what the blocks generate, and it accepts and rejects what the loader does."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from mst_scale.config import RECIPES, load, to_dict
from mst_scale.config.load import BLOCKS
from mst_scale.config.presets import ready_configs
from mst_scale.errors import UserError

sys.path.append(str(Path(__file__).parents[3] / "docs"))

from config_tables import defaults

FOLDER = Path(__file__).parents[3] / "ds_configs"
SHIPPED = json.loads((FOLDER / "mst.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SHIPPED)
RAW = json.loads((FOLDER / "gpt2_small.json").read_text())


def test_the_shipped_schema_is_the_generated_one():
    jsonschema.Draft202012Validator.check_schema(SHIPPED)
    # in a process of its own: tests register further methods
    printed = subprocess.run(
        [sys.executable, "-m", "mst_scale.config.schema"], capture_output=True, text=True, check=True
    )
    assert json.loads(printed.stdout) == SHIPPED, "run python -m mst_scale.config.schema > ds_configs/mst.schema.json"


@pytest.mark.parametrize("path", ready_configs().values(), ids=lambda path: path.stem)
def test_every_ready_config_names_the_schema_and_validates(path):
    raw = json.loads(path.read_text())
    VALIDATOR.validate(raw)
    assert next(iter(raw)) == "$schema" and (path.parent / raw["$schema"]).is_file()
    assert "$schema" not in to_dict(load(path)) and load(raw) == load(path), "DeepSpeed never sees it"


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_recorded_config_is_valid(recipe):
    VALIDATOR.validate(json.loads(json.dumps(to_dict(load("gpt2_small", [f"recipe={recipe}"])))))


def stated(key, value):
    """The config with one more key."""
    raw = copy.deepcopy(RAW)
    *path, last = key.split(".")
    node = raw
    for part in path:
        node = node.setdefault(part, {})
    node[last] = value
    return raw


KEYS = [key for block, cls in BLOCKS.items() for key, _ in defaults(cls, block) if key != "mst.options"]


@pytest.mark.parametrize("key", [*KEYS, *BLOCKS, "recipe", "zero_optimization", "gradient_clipping"])
def test_a_misspelled_key_is_rejected_by_both(key):
    raw = stated(f"{key}x", 1)
    assert not VALIDATOR.is_valid(raw)
    with pytest.raises(UserError, match=f"unknown key '{key}x'"):
        load(raw)


@pytest.mark.parametrize(
    ("key", "value", "valid"),
    [
        ("mst.sparsity.max", 1.5, False), ("mst.sparsity.warmup", 0.5, True), ("mst.sparsity.warmup", 1.5, False),
        ("mst.attention.stride", 0.25, True), ("mst.attention.stride", 0, False), ("model.preset", "gpt5", False),
        ("mst.topology.policy", "rigel", False), ("mst.topology.granularity", {"block": 16}, True),
        ("mst.topology.granularity", {"block": 17}, False), ("zero_optimization.stage", 4, False),
        ("optimizer.params.betas", [0.9], False), ("optimizer.params.betas", [0.9, 0.95], True),
        ("gradient_clipping", 0, True), ("gradient_clipping", 1e-300, False), ("training.sparse_decay", 0, True),
        ("optimizer.params.unheard_of", 1, True), ("bf16.enabled", True, True), ("steps_per_print", "x", False),
    ],
)  # fmt: skip
def test_values(key, value, valid):
    assert VALIDATOR.is_valid(stated(key, value)) == valid


@pytest.mark.parametrize(
    ("method", "options", "valid"),
    [
        ("ligo", {"steps": 3}, True),
        ("ligo", {"n": 2}, False),
        ("sr-ste", {"n": 2}, True),
        ("sr-ste", {"n": "2"}, False),
    ],
)  # fmt: skip
def test_options_are_those_of_the_method(method, options, valid):
    assert VALIDATOR.is_valid({**RAW, "mst": {"method": method, "options": options}}) == valid
