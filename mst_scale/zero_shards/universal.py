"""Converts a checkpoint of DeepSpeed into its universal layout, every parameter whole in files of its own; reads it.

    zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt     what each rank slices as it needs
    mst/compact.safetensors                                          in the compact form: the active weights, whose
                                                                     values alone these files then hold
    zero/optimizer_state.pt                                          parameter groups, step, loss scale
    mp_rank_00_model_states.pt                                       what else a checkpoint holds

Read through `weight_files`, from any ZeRO stage, number of ranks, tensor slices and pipeline stages; DeepSpeed's own
loader reads the result, too, unless its form is compact. Buffers are kept for our loader; DeepSpeed's leaves them at
their initial values.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from mst_scale.checkpoint_folders import is_universal
from mst_scale.errors import UserError
from mst_scale.sparse_linear.compact_index import CompactIndex
from mst_scale.zero_shards import safe_load
from mst_scale.zero_shards.logical import LAYOUT
from mst_scale.zero_shards.put_weights import FP32, OF_WRAPPER, SCALE_NUMBERS, ReadRange, read_stored
from mst_scale.zero_shards.weight_files import Weights, base_state, maps_kept, model_files, opened, states_of

WORKERS = 4  # parameters that are read and written at once; each is in memory whole
STATES = (FP32, "exp_avg", "exp_avg_sq")
WARM = "use mst_scale.warm_start(engine, CHECKPOINT), which loads weights and masks but no optimizer states"
GLOBAL = (*OF_WRAPPER, "clip_grad")  # what an optimizer keeps in addition to its groups


def convert(source: Path, draft: Path, compact: Mapping[str, CompactIndex] | None = None) -> int:
    """Convert weights and optimizer of a checkpoint to the universal layout, for every layout of ranks.

    Args:
        source: The checkpoint; it may have the universal layout already.
        draft: The folder that is filled.
        compact: Parameters of which only the values at these positions are stored.

    Returns:
        The number of finished steps.
    """
    compact = compact or {}
    if is_universal(source):
        return _convert_universal(source, draft, compact)
    files = [some[0] for some in model_files(source)]
    states = [opened(path) for path in files]
    common = _common_state(source, states[0])
    _reject_untrained(source, states)
    index = states_of(source, STATES)
    shapes = index[FP32].shapes if common.pop("sharded") else _optimized(source, states, index[FP32].shapes)
    _reject_paths(source, shapes)

    _write_parameters(source, draft, shapes, index, compact)
    for name in shapes:
        _save(common["step"], draft / "zero" / name / "step.pt")
    # the loaders of stages 1 and 2 read the groups, and that of stage 3 the optimizer's state
    stage3 = {"state": {0: {"step": common.pop("step")}}, "param_groups": common["param_groups"]}
    common |= {"ds_version": states[0]["ds_version"], "optimizer_state_dict": stage3}
    _save(common, draft / "zero" / "optimizer_state.pt")
    # DeepSpeed looks for one name at stages 0 to 2 and for another at stage 3
    rest, module = dict(states[0]), states[0]["module"] or {}
    rest["mst_buffers"] = {name: module[name].clone() for name in rest.get("buffer_names") or [] if name in module}
    rest["module"], rest["optimizer"] = {}, None
    rest["mp_world_size"] = 1  # files that there are
    rest.pop(LAYOUT, None)
    _save(rest, draft / "mp_rank_00_model_states.pt")
    shutil.copyfile(draft / "mp_rank_00_model_states.pt", draft / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    return int(rest["global_steps"])


def _convert_universal(source: Path, draft: Path, compact: Mapping[str, CompactIndex]) -> int:
    """Write the parameters of a universal checkpoint in another form, and copy everything else."""
    index = states_of(source, STATES)
    _write_parameters(source, draft, index[FP32].shapes, index, compact)
    others = [*source.glob("*_states.pt"), source / "zero" / "optimizer_state.pt", *source.glob("zero/*/step.pt")]
    for path in others:
        shutil.copyfile(path, draft / path.relative_to(source))
    return int(opened(model_files(source)[0][0])["global_steps"])


def _write_parameters(
    source: Path, draft: Path, names: Iterable[str], states: Mapping[str, Weights], compact: Mapping[str, CompactIndex]
) -> None:
    def write(name: str) -> None:
        for key, weights in states.items():
            try:
                value = weights.read(name)
            except (KeyError, IndexError):
                raise _not_adam(source) from None
            if (positions := compact.get(name)) is not None:
                stored = positions.to_store(value.flatten())
                if stored.count_nonzero() != value.count_nonzero():
                    raise UserError(
                        f"{source} has values of inactive weights of {name} ({key}), which the compact form would "
                        "lose: use --form dense"
                    )
                value = stored
            _save({"param": value}, draft / "zero" / name / f"{key}.pt")

    with maps_kept(), ThreadPoolExecutor(WORKERS) as pool:
        for _ in pool.map(write, names):
            pass


def _common_state(source: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Return parameter groups, step and loss scale, and whether ZeRO has partitioned the saved states."""
    shards = sorted(source.glob("*_optim_states.pt"))
    if shards:
        optimizer = opened(shards[0])["optimizer_state_dict"]
        inner = optimizer.get("base_optimizer_state") or optimizer.get("optimizer_state_dict") or {}
        common = {key: optimizer[key] for key in GLOBAL if key in optimizer}
    else:
        wrapper = state["optimizer"] or {}
        inner, dynamic = base_state(wrapper), wrapper.get("dynamic_loss_scale")
        common = {key: wrapper[key] for key in SCALE_NUMBERS} if dynamic else {}
    kept = inner.get("state", {}) if isinstance(inner, dict) else {}
    steps = [found["step"] for found in kept.values() if "step" in found]
    if not steps or any(found.keys() - {"step", *STATES} for found in kept.values()):
        raise _not_adam(source)
    groups = [{k: v for k, v in group.items() if k != "param_names"} for group in inner["param_groups"]]
    # FusedAdam counts a group's updates in the state of its last parameter alone
    return {**common, "param_groups": groups, "step": max(steps), "sharded": bool(shards)}


def _optimized(
    source: Path, states: list[dict[str, Any]], shapes: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Stage 0: the parameters that the optimizer's groups name, in their order."""
    found: dict[str, tuple[int, ...]] = {}
    for state in states:
        names = {name: entry["name"] for name, entry in state.get(LAYOUT, {}).items()}
        for group in base_state(state["optimizer"])["param_groups"]:
            if "param_names" not in group:
                raise UserError(f"{source} does not say which parameter each optimizer state belongs to: save it again")
            own = [names.get(name, name) for name in group["param_names"]]
            found |= {name: shapes[name] for name in own}
    return found


def _reject_paths(source: Path, names: Iterable[str]) -> None:
    """Reject parameter names, which become names of folders, that would lead out of the copy's folder."""
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise UserError(
                f"{source} has a parameter {name!r}, whose name is a path, so it cannot be converted: rename it"
            )


def _reject_untrained(source: Path, states: list[dict[str, Any]]) -> None:
    """Reject tensors that are not optimized, a buffer or another name of a tied weight: they would be lost."""
    tied = {name for state in states for name in state.get("shared_params") or ()}
    for state in states:
        if state["module"] is None and state.get("buffer_names"):  # of a pipeline
            raise UserError(
                f"{source} has the buffer {state['buffer_names'][0]}, which a pipeline keeps in its layers' files: "
                f"a universal checkpoint would lose it; {WARM}"
            )
        module = state["module"] or {}
        if state.get("param_shapes") is not None:
            trained = {name for group in state["param_shapes"] for name in group}
            others = tied
        else:  # stage 0 lists neither
            groups = base_state(state["optimizer"]).get("param_groups", [])
            trained = {name for group in groups for name in group.get("param_names", module)}
            weights = [module[name] for name in trained if name in module]
            others = {name for name in {*module} - trained if any(torch.equal(module[name], w) for w in weights)}
        known = {*trained, *(state.get("buffer_names") or []), *others}
        lost = {*module, *(state.get("frozen_param_shapes") or {})} - known
        if lost:
            raise UserError(
                f"{source} holds {min(lost)}, which is not trained: a universal checkpoint would lose it; {WARM}"
            )


def _not_adam(source: Path) -> ValueError:
    what = "mst reshape supports the optimizer states of Adam and similar optimizers, and these are different"
    return UserError(f"{source}: {what}; {WARM}")


def _save(value: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        torch.save(value, path)
    except RuntimeError as error:  # torch's writers report a full disk so
        raise OSError(f"cannot write {path}: {error}") from error


class UniversalCheckpoint:
    """A checkpoint in the universal layout, from which `put_weights.put_states` reads.

    Args:
        folder: the checkpoint.
        buffers: what the file of the model's state has of buffers.
    """

    def __init__(self, folder: Path, buffers: Mapping[str, torch.Tensor]):
        self.folder, self.buffers = folder, buffers
        common = safe_load.load(folder / "zero" / "optimizer_state.pt", safe_load.saved_classes())
        groups = common["param_groups"] if "param_groups" in common else common["optimizer_state_dict"]["param_groups"]
        self.groups = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self.wrapper = {key: common[key] for key in (*OF_WRAPPER, *SCALE_NUMBERS) if key in common}
        scaler = self.wrapper.get("loss_scaler")  # of stages 1 to 3
        if getattr(scaler, "dynamic", False):
            self.wrapper |= {key: getattr(scaler, key) for key in SCALE_NUMBERS}
        self._step = _step(folder / "zero", common)
        self._states = states_of(folder, STATES)

    def __str__(self) -> str:
        return str(self.folder)

    def step(self, name: str) -> Any:
        """Return how many updates Adam has counted."""
        return self._step

    def ranges(self, name: str, parameter: Any) -> dict[str, ReadRange]:
        """Return the master weights and the optimizer states of a parameter."""
        return {key: read_stored(name, parameter, weights.shard) for key, weights in self._states.items()}

    def check_shapes(self, here: Mapping[str, tuple[int, ...]]) -> None:
        """Check that a model with these shapes of parameters has saved it.

        Raises:
            UserError: if one of them differs.
        """
        there = self._states[FP32].shapes
        for name, shape in here.items():
            flat = (math.prod(shape),)  # as DeepSpeed's own converter leaves what stage 3 has cut
            if there.get(name) not in (tuple(shape), flat):
                raise UserError(
                    f"{self.folder}: {name} has shape {there.get(name)} in the checkpoint, but {tuple(shape)} in this "
                    "model"
                )


def _step(zero: Path, common: dict[str, Any]) -> Any:
    """How many updates Adam has counted: DeepSpeed's own converter says it in one of two places."""
    kept = common.get("optimizer_state_dict", {}).get("state", {})
    return kept[0]["step"] if kept else safe_load.load(next(zero.glob("*/step.pt")), safe_load.saved_classes())
