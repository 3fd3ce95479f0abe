"""docs/config.md names every key with its default, and no other."""

import dataclasses
import json
import re
from fractions import Fraction
from pathlib import Path

import pytest

from mst_scale.config.load import BLOCKS

ROWS = re.findall(
    r"^\| `([\w.]+)` \| `([^`]+)` \|", (Path(__file__).parents[2] / "docs" / "config.md").read_text(), re.MULTILINE
)


def defaults(cls, path):
    for field in dataclasses.fields(cls):
        factory = field.default_factory
        value = field.default if factory is dataclasses.MISSING else factory()
        if dataclasses.is_dataclass(value):
            yield from defaults(type(value), f"{path}.{field.name}")
        else:
            yield f"{path}.{field.name}", value


def test_every_key_is_documented_once():
    there = [key for block, cls in BLOCKS.items() for key, _ in defaults(cls, block)]
    assert sorted(key for key, _ in ROWS) == sorted(there)


@pytest.mark.parametrize(("key", "written"), ROWS)
def test_the_default_is_the_one_in_the_code(key, written):
    (expected,) = [value for block, cls in BLOCKS.items() for name, value in defaults(cls, block) if name == key]
    assert (float(Fraction(written)) if re.fullmatch(r"\d+/\d+", written) else json.loads(written)) == expected
