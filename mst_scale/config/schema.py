"""Writes the JSON schema of a config file: `python -m mst_scale.config.schema > ds_configs/mst.schema.json`.

Editors complete and check a config that begins with `"$schema": "mst.schema.json"`. Our blocks are described
completely. For DeepSpeed, the schema contains the names of its keys, their status in support.py, and the types that
deepspeed.py validates; its blocks may contain other keys.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import TypeAdapter

from mst_scale.config.deepspeed import DeepSpeedKeys
from mst_scale.config.load import BLOCKS
from mst_scale.config.presets import MODELS, RECIPES
from mst_scale.config.support import format_remark, format_status, keys, known_keys
from mst_scale.methods import METHODS, NoOptions
from mst_scale.mixed_growing.policies import POLICIES

_REF = "#/$defs/{model}"


def schema() -> dict[str, Any]:
    """Return the JSON schema of a config file."""
    options = {name: method.options for name, method in METHODS.items() if method.options is not NoOptions}
    classes = {**BLOCKS, "": DeepSpeedKeys, **{f"mst.options.{name}": cls for name, cls in options.items()}}
    found, shared = TypeAdapter.json_schemas(
        [(key, "validation", TypeAdapter(cls)) for key, cls in classes.items()], ref_template=_REF
    )
    definitions = shared["$defs"]
    block = {key: _resolved(definitions, found[key, "validation"]) for key in classes}
    _choose(block["mst"], "method", METHODS)
    _choose(block["model"], "preset", MODELS)
    _choose(_resolved(definitions, block["mst"]["properties"]["topology"]), "policy", POLICIES)
    block["mst"]["properties"]["options"] = {"type": "object", "description": "Keys of the method itself."}
    block["mst"]["allOf"] = [_options_of(name, found[f"mst.options.{name}", "validation"]) for name in options]
    result = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "An experiment of mst_scale: a DeepSpeed config with the blocks mst, model, data and training",
        "type": "object",
        "properties": {
            "$schema": {"type": "string"},
            "recipe": {"enum": [*RECIPES, None], "description": "A preset of several blocks; other keys override it."},
            **{name: found[name, "validation"] for name in BLOCKS},
            **_deepspeed(definitions, block[""]),
        },
        "additionalProperties": False,
        "$defs": {name: each for name, each in definitions.items() if each is not block[""]},
    }
    return dict(_plain(result))


def _resolved(definitions: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = definitions[value["$ref"].rpartition("/")[2]] if "$ref" in value else value
    return found


def _choose(block: dict[str, Any], key: str, choices: Any) -> None:
    """Restrict a key to the names in a table, and null if the key may be null."""
    old = block["properties"][key]
    null = [None] if {"type": "null"} in old.get("anyOf", []) else []
    kept = {name: value for name, value in old.items() if name in ("default", "description", "changesResult")}
    block["properties"][key] = {"enum": [*choices, *null], **kept}


def _options_of(method: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the rule that applies these keys of `mst.options` to a method."""
    return {
        "if": {"properties": {"method": {"const": method}}, "required": ["method"]},
        "then": {"properties": {"options": options}},
    }


def _deepspeed(definitions: dict[str, Any], typed: dict[str, Any]) -> dict[str, Any]:
    """Return the top-level keys of DeepSpeed, with their status in the support table appended to the description."""
    top: dict[str, Any] = {key: dict(typed["properties"].get(key, {})) for key in known_keys()}
    for key in keys():
        *path, name = key.split(".")
        inside = top
        for part in path:
            inside = _resolved(definitions, inside.setdefault(part, {})).setdefault("properties", {})
        if name != "*":
            own = inside.setdefault(name, {})
            sentences = (own.get("description"), f"Sparse training: {format_status(key)}.", format_remark(key))
            own["description"] = " ".join(filter(None, sentences))
    return top


def _plain(value: Any) -> Any:
    """Remove pydantic's titles, and the links in descriptions."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    plain = {}
    for key, inner in value.items():
        if key == "title" and isinstance(inner, str) and "$defs" not in value:
            continue
        if key == "description" and isinstance(inner, str):
            plain[key] = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", inner)
        else:
            plain[key] = _plain(inner)
    return plain


if __name__ == "__main__":
    print(json.dumps(schema(), indent=1, ensure_ascii=False))
