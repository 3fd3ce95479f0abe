"""Converts a checkpoint of DeepSpeed into its universal layout, in a form that every ZeRO stage loads.

DeepSpeed 0.19's converter is run as it is; the rest is done here: stage 3's tensors get their shapes, both flavours of
the common files are written, stage 0, which it cannot convert, is written in the same layout, and buffers, which its
loader leaves at their initial values, are kept aside for `saving` to put back.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from mst_scale.zero_shards import safe_load
from mst_scale.zero_shards.saving import saved_classes
from mst_scale.zero_shards.weight_files import base_state, fp32_masters

STATES = ("fp32", "exp_avg", "exp_avg_sq")
WARM = "mst_scale.warm_start(engine, CHECKPOINT) takes its weights and masks, with a fresh optimizer"
Shapes = dict[str, tuple[int, ...]]
WORKERS = 4  # processes that DeepSpeed converts with; each holds one rank's optimizer states


def convert(source: Path, draft: Path) -> None:
    """Weights and optimizer of `source` into the universal layout, fit for every stage."""
    files = sorted(path for path in source.glob("*_model_states.pt"))
    if not files:
        raise ValueError(f"{source} holds no *_model_states.pt: it is not a checkpoint of DeepSpeed")
    if len({path.name.split("mp_rank_")[1] for path in files}) > 1:
        raise ValueError(f"{source} was saved with model parallelism, which mst reshape does not know")
    state = _load(files[0], mmap=True)
    sharded = any(source.glob("*_optim_states.pt"))
    shapes = _sharded_shapes(state) if sharded else _replicated_shapes(source, state)
    _refuse_paths(source, shapes)
    _refuse_untrained(source, state, shapes)
    if sharded:
        _convert_shards(source, draft)
        common = _common_state(source, draft / "zero")
    else:
        common = _convert_replicated(source, draft / "zero", state)
    _complete(source, draft / "zero", shapes, common["step"])
    _write_common(draft / "zero", common, state["ds_version"])
    # The weights lie in zero/; what else the loader wants is the same on every rank. It looks for one name at stages
    # 0 to 2 and for another at stage 3.
    module = state["module"]
    state["mst_buffers"] = {name: module[name].clone() for name in state.get("buffer_names") or [] if name in module}
    state["module"], state["optimizer"] = {}, None
    torch.save(state, draft / "mp_rank_00_model_states.pt")
    shutil.copyfile(draft / "mp_rank_00_model_states.pt", draft / "zero_pp_rank_0_mp_rank_00_model_states.pt")


def _sharded_shapes(state: dict[str, Any]) -> Shapes:
    return {name: tuple(shape) for group in state["param_shapes"] for name, shape in group.items()}


def _replicated_shapes(source: Path, state: dict[str, Any]) -> Shapes:
    groups = base_state(state["optimizer"]).get("param_groups", [])
    if not groups or any("param_names" not in group for group in groups):
        raise ValueError(f"{source} does not say which optimizer state is whose: save it again with this version")
    return {name: tuple(state["module"][name].shape) for group in groups for name in group["param_names"]}


def _refuse_paths(source: Path, names: Iterable[str]) -> None:
    """A parameter's name becomes a folder's: that of a checkpoint from elsewhere must not lead out of ours."""
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise ValueError(f"{source} has a parameter {name!r}, whose name is a path: it is not converted")


def _refuse_untrained(source: Path, state: dict[str, Any], shapes: Shapes) -> None:
    """What is neither optimized, nor a buffer, nor another name of a tied weight would be lost."""
    module, tied = state["module"], state.get("shared_params")
    if tied is None:  # stage 0 does not list them
        weights = [module[name] for name in shapes]
        tied = {name for name in {*module} - {*shapes} if any(torch.equal(module[name], w) for w in weights)}
    lost = {*module, *(state.get("frozen_param_shapes") or {})} - {*shapes, *state.get("buffer_names", []), *tied}
    if lost:
        raise ValueError(
            f"{source} holds {min(lost)}, which is not trained: a universal checkpoint would lose it; {WARM}"
        )


def _convert_shards(source: Path, draft: Path) -> None:
    """Stages 1 to 3: DeepSpeed's converter, on a folder of links that shows it this checkpoint's own files only."""
    view, work = draft / "source", draft / "work"
    view.mkdir()
    for path in source.glob("*.pt"):
        content = _load(path, mmap=True)  # DeepSpeed opens it as a pickle: refused here if it is more than data
        mappings = (content.get("optimizer_state_dict") or {}).get("param_slice_mappings")
        _refuse_paths(
            source, [name for group in [*(content.get("param_shapes") or []), *(mappings or [])] for name in group]
        )
        (view / path.name).symlink_to(path.resolve())
    workers = str(min(WORKERS, os.cpu_count() or 1))
    command = [
        sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state",
        "--input_folder", str(view), "--output_folder", str(work),
        "--num_extract_workers", workers, "--num_merge_workers", workers,
    ]  # fmt: skip
    child = subprocess.run(
        command, env={**os.environ, "DS_ACCELERATOR": "cpu"}, capture_output=True, text=True, check=False
    )  # fmt: skip
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
        if "KeyError: 'exp_avg" in lines[-1]:
            raise _not_adam(source)
        raise OSError(f"DeepSpeed's ds_to_universal could not convert {source}: {lines[-1]}")
    (work / "zero").rename(draft / "zero")
    shutil.rmtree(work)
    shutil.rmtree(view)
    (draft / "latest_universal").unlink(missing_ok=True)


def _common_state(source: Path, zero: Path) -> dict[str, Any]:
    """Parameter groups, step and loss scale, from stage 3's flavour or that of stages 1 and 2."""
    saved = _load(zero / "optimizer_state.pt")
    common = {key: saved[key] for key in ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad") if key in saved}
    inner = saved.get("optimizer_state_dict", {}).get("state", {})
    steps = [inner[0]["step"]] if inner else [_load(p) for p in zero.rglob("step.pt")][:1]
    if not steps:
        raise _not_adam(source)
    return {**common, "param_groups": saved["param_groups"], "step": steps[0]}


def _not_adam(source: Path) -> ValueError:
    what = "mst reshape knows the optimizer states of Adam and its like, and these are others"
    return ValueError(f"{source}: {what}; {WARM}")


def _convert_replicated(source: Path, zero: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Stage 0: weights and states lie whole in the model file, in the optimizer's order."""
    inner, module = base_state(state["optimizer"]), state["module"]
    groups, steps = inner["param_groups"], []
    masters_of = fp32_masters(state["optimizer"])
    for g, group in enumerate(groups):
        names, masters = group["param_names"], None if masters_of is None else masters_of[g]
        states = [inner["state"].get(index, {}) for index in group["params"]]
        for key in STATES:
            if key == "fp32":
                values = [module[name] for name in names] if masters is None else masters
            else:
                values = [found[key] for found in states if key in found]
            sizes = [module[name].numel() for name in names]
            if sum(value.numel() for value in values) != sum(sizes):
                raise _not_adam(source)
            flat = torch.cat([value.detach().view(-1).float() for value in values])
            for name, piece in zip(names, flat.split(sizes), strict=True):
                _save({"param": piece.view(module[name].shape).clone()}, zero / name / f"{key}.pt")
        steps += [found["step"] for found in states if "step" in found]
    if not steps:
        raise _not_adam(source)
    clean = [{key: value for key, value in group.items() if key != "param_names"} for group in groups]
    return {"param_groups": clean, "step": max(steps)}  # FusedAdam counts in a group's last state alone


def _complete(source: Path, zero: Path, shapes: Shapes, step: Any) -> None:
    """Every parameter has its weights, moments and step, each of the right shape, in the form all stages read.

    Nothing else is there: DeepSpeed also writes buffers, and tied weights under their other names.
    """
    for folder in zero.iterdir():
        if folder.is_dir() and folder.name not in shapes:
            shutil.rmtree(folder)
    for name, shape in shapes.items():
        for key in STATES:
            path = zero / name / f"{key}.pt"
            if not path.is_file():
                raise _not_adam(source)
            found = _load(path)
            value = found["param"] if isinstance(found, dict) else found
            if value.numel() != math.prod(shape):
                raise ValueError(
                    f"{source}: {key} of {name} has {value.numel()} values for shape {shape}: a file is gone"
                )
            if not isinstance(found, dict):
                _save({"param": value.view(shape)}, path)
        _save(step, zero / name / "step.pt")


def _write_common(zero: Path, common: dict[str, Any], version: str) -> None:
    """`optimizer_state.pt` with what the loaders of stages 1 and 2 read, and what that of stage 3 reads."""
    step, groups = common.pop("step"), common["param_groups"]
    stage3 = {"state": {0: {"step": step}}, "param_groups": groups}
    _save({**common, "ds_version": version, "optimizer_state_dict": stage3}, zero / "optimizer_state.pt")


def _load(path: Path, mmap: bool = False) -> Any:
    return safe_load.load(path, saved_classes(), mmap)


def _save(value: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
