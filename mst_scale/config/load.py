"""Loads an experiment from a JSON file.

A file, or the name of a ready-made config, is read as a dict, changed by `--set` overrides, and completed from recipe
and method presets, over which the user's keys take precedence. The resulting blocks are frozen and strictly validated:
an unknown key or a wrong type is an error that names the key, the file and the nearest valid name. The other keys
belong to DeepSpeed: some are validated (deepspeed.py), and all are passed on unchanged.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mst_scale.comm.parser import validate_printable
from mst_scale.config.blocks import DataConfig, Experiment, ModelConfig, TrainingConfig
from mst_scale.config.deepspeed import DeepSpeedKeys, without_nulls
from mst_scale.config.method import MSTConfig
from mst_scale.config.presets import MODELS, RECIPES, config_file, describe_missing
from mst_scale.config.renamed import current_key, current_value, with_current_names
from mst_scale.config.support import known_keys
from mst_scale.errors import Damaged, UserError, format_value, suggestion
from mst_scale.methods import METHODS
from mst_scale.sparsity_variation import DURATIONS
from mst_scale.validation import MAX_SEED, keys_of, parse

SCHEMA_KEY = "$schema"  # for editors alone
MAX_DEPTH = 32  # levels of nested objects and lists
BLOCKS = {"model": ModelConfig, "data": DataConfig, "training": TrainingConfig, "mst": MSTConfig}


def load(config: str | Path | dict[str, Any], overrides: Iterable[str] = (), method: str | None = None) -> Experiment:
    """Load an experiment.

    In increasing precedence: presets of the config's recipe and method, the config itself, a recipe among `overrides`,
    `method`, and the other overrides.

    Args:
        config: a file, the name of a ready-made config, or a dict.
        overrides: changes of the form "mst.sparsity.max=0.9", as `--set` takes them.
        method: overrides mst.method.

    Raises:
        UserError: if the config cannot be read or is invalid.
    """
    overrides = list(overrides)
    where, raw = _composed(config, overrides, method)
    found = resolve(raw, where)
    if found.mst.method == "dense-short" and found.mst.like is None:
        others = [one for one in overrides if one.partition("=")[0] != "mst.method"]
        found = replace(found, with_mst=resolve(_composed(config, others, "mst")[1], where).mst)
    return found


def overridden_in_recipe(
    config: str | Path | dict[str, Any], overrides: Iterable[str] = (), method: str | None = None
) -> str | None:
    """Describe the keys that override values of the config's recipe in one line; None if there are none.

    The arguments are those of `load`, which accepts such a config.
    """
    _, raw = _composed(config, overrides, method)
    name = raw.get("recipe")
    if not isinstance(name, str) or name not in RECIPES:
        return None
    changed = list(_replaced(_recipe(name, raw, ""), raw, ""))
    return f"these keys override the recipe {name!r}: {'; '.join(changed)}" if changed else None


def _replaced(recipe: Mapping[str, Any], user: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield each value of a recipe that the user's block overrides, as `key = value (recipe: value)`."""
    for key, value in recipe.items():
        if key not in user or user[key] == value:
            continue
        if isinstance(value, Mapping) and isinstance(user[key], Mapping):
            yield from _replaced(value, user[key], f"{path}{key}.")
        else:
            yield f"{path}{key} = {json.dumps(user[key], default=str)} (recipe: {json.dumps(value)})"


def _composed(
    config: str | Path | dict[str, Any], overrides: Iterable[str], method: str | None
) -> tuple[str, dict[str, Any]]:
    """Return the name for messages and the config with the command line's changes, before presets are filled in."""
    where, raw = read(config)
    overrides = list(overrides)
    asked: dict[str, Any] = {"mst": {"method": method}}
    for override in overrides:
        if override.partition("=")[0] in ("recipe", "mst.method"):
            apply_override(asked, override)
    if asked.get("recipe") is not None and all(isinstance(raw.get(block, {}), dict) for block in BLOCKS):
        wanted = asked["mst"]["method"]
        recipe = _recipe(asked["recipe"], {} if wanted is None else asked, where, overrides)
        sparsity = recipe["mst"].get("sparsity", {})
        if "sparse_tokens" in sparsity:  # replaces durations that the file states
            raw["mst"] = _without(DURATIONS["sv"], raw.get("mst", {}))
        if any(name in sparsity for name in DURATIONS["sv"]):  # replace a limit that it states
            raw["mst"] = _without(["sparse_tokens"], raw.get("mst", {}))
        if wanted in (None, recipe["mst"]["method"]):
            _take_method(raw, recipe["mst"]["method"], where)
        raw |= {name: _under(raw.get(name, {}), block) for name, block in recipe.items()}
        method = wanted
    if method is not None and isinstance(raw.get("mst", {}), dict):
        _take_method(raw, method, where)
    for override in overrides:
        apply_override(raw, override)
    return where, raw


def _recipe(name: Any, raw: Mapping[str, Any], where: str, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Return a recipe for a config.

    It lacks `sparse_tokens` if the config states durations of the sparse phase, and the block `topology`, which is
    meant for the recipe's own method, if the config has another method.
    """
    recipe = RECIPES[_known(name, RECIPES, "recipe", where)]
    mst = raw.get("mst", {})
    if isinstance(mst, dict) and mst.get("method", recipe["mst"]["method"]) != recipe["mst"]["method"]:
        recipe = {**recipe, "mst": {key: block for key, block in recipe["mst"].items() if key != "topology"}}
    sparsity = mst.get("sparsity", {}) if isinstance(mst, dict) else {}
    stated = {override.partition("=")[0].removeprefix("mst.sparsity.") for override in overrides}
    stated |= set(sparsity) if isinstance(sparsity, dict) else set()
    limited = not stated.intersection(DURATIONS["sv"])
    return recipe if limited else {**recipe, "mst": _without(["sparse_tokens"], recipe["mst"])}


def _without(names: Iterable[str], block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a block `mst` without some keys of its block `sparsity`."""
    sparsity = block.get("sparsity")
    if not isinstance(sparsity, Mapping):
        return dict(block)
    return {**block, "sparsity": {key: value for key, value in sparsity.items() if key not in names}}


def _take_method(raw: dict[str, Any], method: str, where: str) -> None:
    """Apply the preset of a method over the config, unless the config or its recipe already uses the method."""
    mst, recipe = raw.get("mst", {}), raw.get("recipe")
    of_recipe = RECIPES.get(recipe, {}).get("mst", {}) if isinstance(recipe, str) else {}
    if method != {**of_recipe, **mst}.get("method"):
        mst.pop("options", None)  # they belong to the other method
        preset = METHODS[_known(method, METHODS, "method", where)].preset
        if any(name in preset.get("sparsity", {}) for name in DURATIONS["sv"]):
            mst = _without(["sparse_tokens"], mst)  # the phases of the method replace those of the other one
        raw["mst"] = {**_under(mst, preset), "method": method}


def read(config: str | Path | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Read a config.

    Returns:
        Its name for messages, and a new dict.

    Raises:
        UserError: if the file does not exist, cannot be read or is not valid JSON.
        OSError: if the machine fails.
    """
    if isinstance(config, dict):
        own = copy.deepcopy({key: value for key, value in config.items() if key != SCHEMA_KEY})
        return "config", with_current_names(own, "config")
    path = config_file(config)
    try:
        raw = json.loads(path.read_text("utf-8-sig"), object_pairs_hook=_without_repeats)
    except FileNotFoundError:
        raise UserError(describe_missing(config)) from None
    except (PermissionError, IsADirectoryError, NotADirectoryError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', error)}") from None
    except OSError as error:  # the machine failed (EIO, ESTALE); the message alone would not name the file
        raise OSError(error.errno, f"cannot be read: {error.strerror}", str(path)) from None
    except json.JSONDecodeError as error:
        where = f"{error.msg} at line {error.lineno}, column {error.colno}"
        trailing = error.doc[: error.pos].rstrip().endswith(",") and error.doc[error.pos :].startswith(("}", "]"))
        fix = ": remove the comma before it" if trailing else ""
        raise UserError(f"{path}: not valid JSON: {where}{fix}") from None
    except KeyError as error:
        raise UserError(f"{path}: the key {error} occurs twice in one object") from None
    except RecursionError:
        raise UserError(f"{path}: not valid JSON: nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: a config must be a JSON object, not {type(raw).__name__}")
    raw.pop(SCHEMA_KEY, None)
    return str(Path(config)), with_current_names(raw, str(Path(config)))


def read_saved(path: Path) -> dict[str, Any]:
    """Return the resolved config that a run has written.

    Raises:
        Damaged: if the file cannot be parsed.
    """
    try:
        return read(path)[1]
    except UserError as error:
        raise Damaged(f"{error}; the run wrote this file, and run.json next to it has a copy under 'config'") from None


def read_of_run(path: Path) -> dict[str, Any]:
    """Return the contents of a config.json; next to checkpoints, a run has written it: if broken, Damaged."""
    return read_saved(path) if path.is_file() and (path.parent / "checkpoints").is_dir() else read(path)[1]


def load_of_run(path: Path) -> Experiment:
    """Return the experiment of a config.json, which is read as `read_of_run` does."""
    return resolve(read_of_run(path), str(path))


def states(config: Experiment | str | Path | dict[str, Any], block: str, key: str) -> bool:
    """Return whether a config sets a key of one of our blocks; a resolved experiment sets all of them."""
    return isinstance(config, Experiment) or read(config)[1].get(block, {}).get(key) is not None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; reject repeated keys, of which Python's reader would silently keep the last one."""
    for i, (key, _) in enumerate(pairs):
        if any(key == other for other, _ in pairs[:i]):
            raise KeyError(key)
    return dict(pairs)


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Apply an override such as `mst.sparsity.max=0.9` in place; a value that is not JSON is a string.

    Raises:
        UserError: if the override has another form.
    """
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise UserError(f"--set {format_value(override)}: write KEY=VALUE, for example mst.sparsity.max=0.9")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        value = text
    key = current_key(key)
    value = current_value(key, value)
    *path, last = key.split(".")
    node = raw
    for part in path:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise UserError(f"--set {format_value(override)}: {part} is {format_value(node)}, which has no keys")
    node[last] = value


def resolve(raw: dict[str, Any], where: str = "config") -> Experiment:
    """Fill in presets under the user's keys, and validate every block.

    Args:
        raw: the config as a dict.
        where: its name, for messages.

    Raises:
        UserError: if a key or value is invalid.
    """
    deepspeed = {key: value for key, value in raw.items() if key not in BLOCKS and key != "recipe"}
    _check_printable(raw, where)
    # Accelerate sets infinity so that DeepSpeed never prints, the only valid value that is not an integer
    never_prints = deepspeed.get("steps_per_print") == math.inf
    keys = {key: value for key, value in deepspeed.items() if not (key == "steps_per_print" and never_prints)}
    parse(DeepSpeedKeys, keys, "", where)
    deepspeed = without_nulls(deepspeed)
    ours_at_top = [*BLOCKS, "recipe"]
    for key in deepspeed:
        if key in known_keys():
            continue
        near = [path for path in _paths() if path.rpartition(".")[2] == key]  # the key of a nested block
        near = near or difflib.get_close_matches(key, [*known_keys(), *ours_at_top], n=1, cutoff=0.8)
        near = near or [name for name in ours_at_top if sorted(name) == sorted(key.lower())]  # "mts", "MST"
        if near:
            raise UserError(f"{where}: unknown key {format_value(key)}: did you mean {near[0]!r}?")
    ours: dict[str, Any] = {name: raw.get(name, {}) for name in BLOCKS}
    for name, block in ours.items():
        if not isinstance(block, dict):
            raise UserError(f"{where}: {name} must be an object, not {format_value(block)}")
    named = raw.get("recipe")
    if named is not None:
        recipe = _recipe(named, raw, where)
        ours = {name: _under(recipe.get(name, {}), block) for name, block in ours.items()}
    if "mst" not in raw and named is None:
        ours["mst"] = {"method": "dense"}
    method = ours["mst"].get("method")  # a block without a method is rejected when a schedule is needed
    of = METHODS[_known("dense" if method is None else method, METHODS, "mst.method", where)]
    ours["mst"] = _under(of.preset, ours["mst"])
    ours["mst"]["options"] = parse(of.options, ours["mst"].get("options", {}), "mst.options", where)
    preset = ours["model"].get("preset")
    if preset is not None:
        ours["model"] = _under(MODELS[_known(preset, MODELS, "model.preset", where)], ours["model"])
    ours["model"] = {**ours["model"], **of.model}
    blocks: dict[str, Any] = {"model": parse(ModelConfig, ours["model"], "model", where)}
    ours["mst"] = _stride_in_tokens(ours["mst"], blocks["model"].seq_length, where)
    blocks |= {name: parse(cls, ours[name], name, where) for name, cls in BLOCKS.items() if name not in blocks}
    return Experiment(**blocks, deepspeed=deepspeed)


@functools.cache
def _paths() -> tuple[str, ...]:
    """Return all dotted keys of our blocks and that of the learning rate, the least nested first."""
    ours = [key for name, cls in BLOCKS.items() for key, _ in keys_of(cls, name)]
    return tuple(sorted([*ours, "optimizer.params.lr"], key=lambda key: key.count(".")))


def _check_printable(raw: dict[str, Any], where: str) -> None:
    """Reject values that messages and files cannot contain (iteratively, because a config may be deeply nested)."""
    left: list[tuple[Any, str, int]] = [(raw, "", 0)]
    try:
        while left:
            value, path, depth = left.pop()
            if depth > MAX_DEPTH:
                raise UserError(f"{format_value(path)}: nested more than {MAX_DEPTH} levels deep")
            if isinstance(value, dict):
                for key in value:
                    if not isinstance(key, str):
                        raise UserError(f"{format_value(key)}: keys must be strings")
                    validate_printable("the key", key)
                left += [(inner, f"{path}.{key}".lstrip("."), depth + 1) for key, inner in value.items()]
            elif isinstance(value, list | tuple):
                left += [(inner, path, depth + 1) for inner in value]
            elif isinstance(value, str):
                validate_printable(path, value)
            elif isinstance(value, int) and abs(value) > MAX_SEED:
                raise UserError(f"{path} must be a number below 2^63, not {format_value(value)}")
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _stride_in_tokens(mst: dict[str, Any], context: int, where: str) -> dict[str, Any]:
    """Convert a stride that is given as a fraction of the context to tokens."""
    attention = mst.get("attention")
    stride = attention.get("stride") if isinstance(attention, dict) else None
    if not isinstance(stride, float):
        return mst
    if not 0 < stride <= 1:
        raise UserError(
            f"{where}: mst.attention.stride = {stride} must be tokens (an integer) or a fraction of the context "
            "in (0, 1]"
        )
    return _under(mst, {"attention": {"stride": max(1, round(stride * context))}})


def to_dict(experiment: Experiment) -> dict[str, Any]:
    """Return the resolved experiment in the form that `load` reads: `load(to_dict(e)) == e`."""
    return {
        **experiment.deepspeed,
        **{name: dataclasses.asdict(getattr(experiment, name)) for name in BLOCKS},
    }


def _under(preset: Mapping[str, Any], user: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the user's keys into a copy of the preset, recursively; the user's keys take precedence."""
    merged = copy.deepcopy(dict(preset))
    for key, value in user.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _under(merged[key], value)
        else:
            merged[key] = copy.deepcopy(value)  # so that overrides do not change the presets
    return merged


def _known(name: Any, table: Mapping[str, Any], key: str, where: str) -> str:
    if isinstance(name, str) and name in table:
        return name
    if table is METHODS and name in list(RECIPES):
        raise UserError(f'{where}: {name!r} is a recipe, not a method: --set recipe={name}, or "recipe": "{name}"')
    near = suggestion(str(name).lower(), table)
    raise UserError(f"{where}: unknown {key} {format_value(name)}{near} (there are {', '.join(table)})")
