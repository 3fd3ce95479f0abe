"""docs/config.md and docs/compatibility.md are what the code generates, and every key is described."""

import sys
from pathlib import Path

import pytest

from mst_scale.config import METHODS
from mst_scale.config.deepspeed import DeepSpeedKeys
from mst_scale.config.load import BLOCKS
from mst_scale.config.presets import RECIPES
from mst_scale.validation import keys_of

DOCS = Path(__file__).parents[3] / "docs"
sys.path.append(str(DOCS))

from config_tables import config_page, defaults, support_page  # noqa: E402

PAGE = (DOCS / "config.md").read_text()
KEYS = [key for block, cls in BLOCKS.items() for key, _ in defaults(cls, block)]


def test_the_tables_are_generated():
    assert config_page(PAGE) == PAGE, "run python docs/config_tables.py"
    assert (DOCS / "compatibility.md").read_text() == support_page(), "run python docs/config_tables.py"


def test_a_table_that_is_not_up_to_date_is_seen():
    assert config_page(PAGE.replace("`model.n_layer` | `12`", "`model.n_layer` | `13`")) == PAGE


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_in_one_table(key):
    assert PAGE.count(f"\n| `{key}` | ") == 1


def test_defaults_are_written_as_people_state_them():
    for row in ("`model.seq_length` | `1024`", "`mst.sparsity.ultra` | `10/14`", "`training.warmup` | `1/70`"):
        assert f"| {row} |" in PAGE
    assert '| `mst.targets.include` | `["*"]` |' in PAGE


def test_every_recipe_is_named():
    assert all(f"| `{recipe}` |" in PAGE for recipe in RECIPES)


ALL = [
    *(found for block, cls in BLOCKS.items() for found in keys_of(cls, block)),
    *keys_of(DeepSpeedKeys, ""),
    *(found for method in METHODS.values() for found in keys_of(method.options, "mst.options")),
]


@pytest.mark.parametrize(("key", "field"), ALL, ids=[key for key, _ in ALL])
def test_every_key_has_a_description(key, field):
    assert field.description and field.description[0] != " " and field.description[-1] in ".…"
