"""Rejects optimizer states of another optimizer, and of parameters that were in other groups or in another order.

DeepSpeed and torch assign states by position. If what they belong to has changed, a load fails with an exception that
does not say so, parameters get states of others, or a kernel reads beyond the end of a state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mst_scale.comm import SharedMistake
from mst_scale.zero_shards import safe_load
from mst_scale.zero_shards.logical import named_parameters
from mst_scale.zero_shards.other_layout import fitting
from mst_scale.zero_shards.saving import Given, replace_method
from mst_scale.zero_shards.step import adam_of, base_optimizer, groups_of_parameters

KEY = "mst_optimizer"  # in a checkpoint's client_state
ALIKE = {"torch.Adam": "torch.AdamW", "deepspeed.DeepSpeedCPUAdam": "deepspeed.FusedAdam"}  # their states are the same
FLAGS = ("amsgrad", "centered")  # with which there is one state more
FIX = (
    "continue with the optimizer, precision and parameter groups (training.sparse_rate and sparse_decay) of the "
    "checkpoint, or take only weights and masks (mst_scale.warm_start; in a new run of mst_scale.pretrain --init)"
)


def check_states_belong(engine: Any) -> None:
    """Record in checkpoints what optimizer states belong to, and compare it in each load of them."""
    here = _described(engine)

    def save_checkpoint(save: Callable[..., Any], given: Given) -> Any:
        return save(**{**given, "client_state": {**(given.get("client_state") or {}), KEY: here}})

    def load_checkpoint(load: Callable[..., Any], given: Given) -> Any:
        if given.get("load_module_only") or given.get("load_optimizer_states") is False:
            return load(**given)
        folder = None
        if not engine.load_universal_checkpoint():
            folder = fitting(engine, Path(given["load_dir"]), given.get("tag"))
        if folder is not None:
            _compare(folder, _saved(engine, folder), here, in_order=True)
        path, state = load(**given)
        if path is not None:
            _compare(Path(path).parent, (state or {}).get(KEY), here, in_order=False)
        return path, state

    replace_method(engine, "save_checkpoint", save_checkpoint)
    replace_method(engine, "load_checkpoint", load_checkpoint)


def _described(engine: Any) -> dict[str, Any]:
    """Return the class of the optimizer, its precision, and the names of the parameters of each group."""
    kind = adam_of(engine).partition(",")[0]
    flags = [flag for flag in FLAGS if any(group.get(flag) for group in base_optimizer(engine).param_groups)]
    precision = "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"
    names = {id(p): name for name, p in named_parameters(engine.module)}
    groups = [[names[id(p)] for p in group if id(p) in names] for group in groups_of_parameters(engine)]
    return {"kind": " with ".join([kind, *flags]), "precision": precision, "groups": groups}


def _saved(engine: Any, folder: Path) -> dict[str, Any] | None:
    """Return what this rank's file says; None if it says nothing, or a loop's own objects keep it from being read."""
    path = Path(engine._get_ckpt_name(str(folder.parent), folder.name))
    with contextlib.suppress(Exception):  # whatever is wrong with it, the load says so
        found: dict[str, Any] | None = safe_load.load(path, safe_load.saved_classes(), mmap=True).get(KEY)
        return found
    return None


def _compare(folder: Path, saved: dict[str, Any] | None, here: dict[str, Any], *, in_order: bool) -> None:
    """Raise an error if the states of a checkpoint do not belong to this optimizer.

    Args:
        folder: the checkpoint.
        saved: what it says of its states.
        here: what they have to belong to.
        in_order: whether they are read by position, not by name, and in the precision of their files.
    """
    if saved is None:
        return
    kinds = [ALIKE.get(each["kind"], each["kind"]) for each in (saved, here)]
    why = None
    if kinds[0] != kinds[1]:
        why = f"the states of {saved['kind']}, and this run trains with {here['kind']}"
    elif in_order and saved["precision"] != here["precision"]:
        why = f"states of a run in {saved['precision']}, and this run trains in {here['precision']}"
    elif (name := _elsewhere(saved["groups"], here["groups"])) is not None:
        why = f"states of other parameter groups: {name} is in another one here"
    elif in_order and saved["groups"] != here["groups"]:
        why = "states of parameters in another order than those of this run's parameter groups"
    if why is not None:
        raise SharedMistake(f"{folder} has {why}: {FIX}")


def _elsewhere(saved: list[list[str]], here: list[list[str]]) -> str | None:
    """Return a parameter that is in another group here; None if there is none."""
    before = {name: i for i, group in enumerate(saved) for name in group}
    return next((name for i, group in enumerate(here) for name in group if before.get(name, i) != i), None)
