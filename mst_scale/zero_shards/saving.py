"""Extends DeepSpeed's saves and loads: errors on every rank, masks in checkpoints, universal copies at every stage."""

from __future__ import annotations

import contextlib
import functools
import inspect
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from mst_scale.checkpoint_folders import is_universal, remove_outdated, tag_in
from mst_scale.comm import logger
from mst_scale.errors import Damaged, UserError
from mst_scale.snapshot import SUPPORTED as snapshot_supported
from mst_scale.snapshot import Snapshot, taking
from mst_scale.zero_shards import safe_load
from mst_scale.zero_shards.compact_marks import index_of, indexes_of, is_compact, values_stored
from mst_scale.zero_shards.logical import named_parameters, shape_of
from mst_scale.zero_shards.other_layout import copy_of, explained, missing
from mst_scale.zero_shards.put_weights import put_states
from mst_scale.zero_shards.step import base_optimizer
from mst_scale.zero_shards.supported import offload_device
from mst_scale.zero_shards.universal import UniversalCheckpoint

Given = dict[str, Any]
"""Arguments of a call, by name."""


def replace_method(engine: Any, name: str, replacement: Callable[[Callable[..., Any], Given], Any]) -> None:
    """Replace a method of a live engine by `replacement(inner, given)`; `inner` is the method until now.

    `given` are the arguments by name: the method must not have `*args` or `**kwargs`.
    """
    inner = getattr(engine, name)
    signature = inspect.signature(inner)

    @functools.wraps(inner)
    def method(*args: Any, **named: Any) -> Any:
        return replacement(inner, signature.bind(*args, **named).arguments)

    setattr(engine, name, method)


def _start_afresh(engine: Any, given: dict[str, Any]) -> str:
    """Remove what an earlier save under the same tag has left; return the tag (collective)."""
    tag = f"global_step{engine.global_steps}" if given.get("tag") is None else str(given["tag"])
    if torch.distributed.get_rank() == 0:
        remove_outdated(Path(given["save_dir"]) / tag)
    torch.distributed.barrier()
    return tag


def replace_earlier_saves(engine: Any) -> None:
    """Make `engine.save_checkpoint` remove masks that a sparse run has saved under the same tag."""

    def save_checkpoint(save: Callable[..., Any], given: Given) -> Any:
        _start_afresh(engine, given)
        return save(**given)

    replace_method(engine, "save_checkpoint", save_checkpoint)


@contextlib.contextmanager
def errors_after_saving(engine: Any, snapshot: Snapshot | None = None) -> Iterator[None]:
    """Let a save run to its end on every rank, then raise the error of this one.

    DeepSpeed's saves contain barriers: a rank that raises an error between them (its disk is full) would leave the
    others waiting. With a snapshot, the files go there and nothing is written to disk.
    """
    inner, recovery = engine.checkpoint_engine, engine._copy_recovery_script
    errors: list[Exception] = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def save(self, state_dict: Any, path: str) -> None:
            attempt(lambda: (inner if snapshot is None else snapshot).save(state_dict, path))

        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            if snapshot is None:
                inner.makedirs(path, exist_ok=exist_ok)

    def attempt(what: Any) -> None:
        try:
            what()
        except (OSError, RuntimeError) as error:  # torch's writers report a full disk as RuntimeError
            errors.append(error)

    def scripts(path: str) -> None:
        if snapshot is None:
            recovery(path)
            return
        with tempfile.TemporaryDirectory() as copies:
            recovery(copies)
            for script in sorted(Path(copies).iterdir()):
                snapshot.put(Path(path) / script.name, script.read_bytes(), script.stat().st_mode & 0o777)

    engine.checkpoint_engine = Recorder()
    engine._copy_recovery_script = lambda path: attempt(lambda: scripts(path))
    try:
        with taking(snapshot):
            yield
    finally:
        engine.checkpoint_engine, engine._copy_recovery_script = inner, recovery
    if errors:
        raise errors[0]


def blocking_reason(engine: Any) -> str | None:
    """Return why checkpoints of this engine cannot be copied and written in the background; None if they can."""
    if not snapshot_supported:
        return "this system has no memfd_create"
    writer = engine.checkpoint_engine
    if type(writer).__name__ != "TorchCheckpointEngine" or not writer.zipfile_serialization:
        return "the DeepSpeed config chooses another checkpoint writer"
    zero = engine._config.zero_config
    for name in ("offload_optimizer", "offload_param"):
        if offload_device(getattr(zero, name)) != "none":
            return f"zero_optimization.{name} already fills the host's memory, which a copy would need too"
    return None


@contextlib.contextmanager
def layout_read(engine: Any, universal: bool) -> Iterator[None]:
    """Let `engine.load_checkpoint` read the universal layout, or that of ranks, whatever the config says."""
    config = engine._config
    stated, config.load_universal_checkpoint = config.load_universal_checkpoint, universal
    try:
        yield
    finally:
        config.load_universal_checkpoint = stated


def load_checkpoint(engine: Any, checkpoint: Path, universal: bool = False) -> dict[str, Any]:
    """Load weights, optimizer states and our own state; raise a UserError if the checkpoint does not fit."""
    with layout_read(engine, universal), safe_load.data_only(safe_load.saved_classes()):
        path, state = engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
    if path is None:
        raise UserError(
            f"{checkpoint} has no checkpoint for this model, ZeRO stage and number of ranks: run mst reshape on it"
        )
    return dict(state)


def after_loading(engine: Any, hook: Callable[[Path], None]) -> None:
    """Call `hook` with a checkpoint's folder after each `engine.load_checkpoint` that has found one."""

    def load_checkpoint(load: Callable[..., Any], given: Given) -> Any:
        path, state = load(**given)
        if path is not None:
            hook(Path(path).parent)
        return path, state

    replace_method(engine, "load_checkpoint", load_checkpoint)


SCRIPT = """#!/usr/bin/env python

import sys

sys.exit(
    "checkpoints here may store active weights alone, which DeepSpeed's script would take for whole matrices: run "
    "`mst export CHECKPOINT OUT` for a Hugging Face folder, or `mst reshape CHECKPOINT OUT` for a copy with matrices"
)
"""


def _write_scripts(folder: str) -> None:
    """Write scripts that name our commands, in place of DeepSpeed's, which would export vectors and not matrices."""
    for name in ("zero_to_fp32.py", "zero_to_torch.py"):
        (Path(folder) / name).write_text(SCRIPT)
        (Path(folder) / name).chmod(0o755)


def carry_along(engine: Any, mst: Any) -> None:
    """Make `engine.save_checkpoint` and `engine.load_checkpoint` carry the masks."""
    indexes = indexes_of(engine.module)
    if is_compact(engine.module):
        engine._copy_recovery_script = _write_scripts

    def save_checkpoint(save: Callable[..., Any], given: Given) -> Any:
        mst.check_save()
        tag = _start_afresh(engine, given)
        # before DeepSpeed's own files, so that its `latest` never names a checkpoint without masks
        head = mst.saving(Path(given["save_dir"]) / tag)
        state = {**(given.get("client_state") or {}), "mst": head}
        with values_stored(indexes):
            return save(**{**given, "tag": tag, "client_state": state})

    def load_checkpoint(load: Callable[..., Any], given: Given) -> Any:
        folder, tag = Path(given["load_dir"]), _tag_of(engine, given)
        if indexes and given.get("load_optimizer_states") is False and engine.global_steps:
            raise UserError(
                "load_checkpoint(load_optimizer_states=False) cannot keep this engine's optimizer states, because "
                "compact layers store those of active weights alone, and the checkpoint has other active weights: load "
                "the states too, load into a new engine, or set mst.compute.compact to off"
            )
        undo = (lambda: None) if tag is None else mst.loading(folder / str(tag))
        path = None
        try:
            with values_stored(indexes):
                path, state = load(**given)
        finally:
            if path is None:
                undo()
        if path is not None:
            mst.loaded(Path(path).parent, (state or {}).get("mst"))
        return path, state

    replace_method(engine, "save_checkpoint", save_checkpoint)
    replace_method(engine, "load_checkpoint", load_checkpoint)


def load_weights_alone(engine: Any, mst: Any) -> None:
    """Make `engine.load_checkpoint(load_module_only=True)` load the weights of any stage and number of ranks."""

    def load_checkpoint(load: Callable[..., Any], given: Given) -> Any:
        tag = _tag_of(engine, given) if given.get("load_module_only") else None
        path = None if tag is None else Path(given["load_dir"]) / tag
        if path is None or not mst.reads_weights(path):
            return load(**given)
        return str(path), mst.load_weights(path)

    replace_method(engine, "load_checkpoint", load_checkpoint)


def _tag_of(engine: Any, given: Given) -> str | None:
    """Return the tag that a load reads: the one it was given, or the latest; None if there is none."""
    latest = Path(given["load_dir"]) / ("latest_universal" if engine.load_universal_checkpoint() else "latest")
    return str(given["tag"]) if given.get("tag") is not None else tag_in(latest) if latest.is_file() else None


def consolidate_matrices(engine: Any) -> None:
    """Make DeepSpeed's consolidated 16-bit weights of stage 3 contain matrices instead of compact values."""
    named = engine.module.named_parameters(remove_duplicate=False)
    indexes = {name: index for name, p in named if (index := index_of(p)) is not None}

    def consolidated(inner: Callable[..., Any], given: Given) -> Any:
        state = inner(**given)
        for name, index in indexes.items():
            if state and name in state:
                state[name] = index.expand(state[name])
        return state

    replace_method(engine, "_zero3_consolidated_16bit_state_dict", consolidated)


def carry_state(
    engine: Any,
    name: str,
    saved: Callable[[], dict[str, Any]] | None,
    loaded: Callable[[dict[str, Any] | None], None],
) -> None:
    """Make checkpoints hold `saved()` under a name of its own in their client_state, unless it is None.

    A load passes it to `loaded`, or None where there is none. Both are called on every rank, after the masks' own
    part. A load of weights alone does not call `loaded`: it does not continue the run that saved them.
    """

    def save_checkpoint(save: Callable[..., Any], given: Given) -> Any:
        assert saved is not None
        return save(**{**given, "client_state": {**(given.get("client_state") or {}), name: saved()}})

    def load_checkpoint(load: Callable[..., Any], given: Given) -> Any:
        path, state = load(**given)
        if path is not None and not given.get("load_module_only"):
            loaded((state or {}).get(name))
        return path, state

    if saved is not None:
        replace_method(engine, "save_checkpoint", save_checkpoint)
    replace_method(engine, "load_checkpoint", load_checkpoint)


def fit_universal_checkpoints(engine: Any) -> None:
    """Make every layout of ranks load what `mst reshape` writes, and stage 0 save checkpoints that it can convert.

    DeepSpeed's own loading ({"checkpoint": {"load_universal": true}}) does not support stage 0, our tensor parallelism
    or pipelines; at stage 3 it gives all parameter groups the hyperparameters of the first (so that norms and biases
    decay), and it does not load buffers.
    """
    stage = engine.zero_optimization_stage()
    if stage == 0:
        _name_parameters(engine)

    def load_checkpoint(load: Callable[..., Any], given: Given) -> Any:
        keeps_states = given.get("load_optimizer_states", True)
        if not engine.load_universal_checkpoint():
            wanted = _tag_of(engine, given)
            if wanted is not None and is_universal(Path(given["load_dir"]) / wanted):
                with layout_read(engine, universal=True):
                    return load_checkpoint(load, {**given, "tag": wanted})
            copy = copy_of(engine, Path(given["load_dir"]), given.get("tag"))
            if copy is not None:
                with layout_read(engine, universal=True):
                    return load_checkpoint(load, {**given, "tag": copy})
            with explained(engine, Path(given["load_dir"]), _tag_of(engine, given)), _weights_of(given.get("tag")):
                path, state = load(**given)
            refreshes = stage == 0 and hasattr(engine.optimizer, "refresh_fp32_params")
            if path is not None and refreshes and not keeps_states:
                engine.optimizer.refresh_fp32_params()  # DeepSpeed does so with load_module_only
            return path, state
        others = dict(given)
        load_dir, tag = others.pop("load_dir"), others.pop("tag", None)
        if tag is None:
            latest = Path(load_dir) / "latest_universal"
            if not latest.is_file():
                raise UserError(f"{latest} does not exist: pass the tag of a checkpoint that mst reshape has written")
            tag = tag_in(latest)
            _warn_of_a_later_save(latest)
        if (none := missing(Path(load_dir), tag)) is not None:
            raise UserError(none)
        if not is_universal(folder := Path(load_dir) / tag):
            raise UserError(
                f"{folder} does not have the universal layout: run `mst reshape {folder}`, whose copy this program "
                'finds, and remove "checkpoint": {"load_universal": true} from the DeepSpeed config'
            )
        # states come later, and from elsewhere; at stage 3 DeepSpeed would read `latest` for weights without states
        of_weights = {"load_optimizer_states": stage != 0}
        path, state = engine._load_checkpoint(load_dir, tag, **{**others, **of_weights})
        if path is not None:
            source = UniversalCheckpoint(Path(load_dir) / tag, state.pop("mst_buffers", {}))
            source.check_shapes({name: shape_of(p) for name, p in named_parameters(engine.module) if p.requires_grad})
            put_states(engine, source, only_weights=not keeps_states or bool(given.get("load_module_only")))
        return path, state

    replace_method(engine, "load_checkpoint", load_checkpoint)


def _warn_of_a_later_save(universal: Path) -> None:
    """Warn if the file `latest` was written after the one that a load of the universal layout follows."""
    latest = universal.with_name("latest")
    with contextlib.suppress(OSError, Damaged):  # that file is not loaded
        here, later = tag_in(universal), tag_in(latest)
        if latest.stat().st_mtime > universal.stat().st_mtime and here != later:
            logger.warning(
                "loading %s, the latest checkpoint of the universal layout; %s was saved later: to load it, pass its "
                'tag and remove "checkpoint": {"load_universal": true}', here, later,
            )  # fmt: skip


@contextlib.contextmanager
def _weights_of(tag: str | None) -> Iterator[None]:
    """Let DeepSpeed load weights without states at stage 3 from the checkpoint that was asked for, not the latest."""
    from deepspeed.runtime import engine as module

    inner = module.get_fp32_state_dict_from_zero_checkpoint
    module.get_fp32_state_dict_from_zero_checkpoint = lambda folder: inner(folder, tag)
    try:
        yield
    finally:
        module.get_fp32_state_dict_from_zero_checkpoint = inner


def _name_parameters(engine: Any) -> None:
    """Add parameter names to stage 0's optimizer states, as torch does for `Optimizer(named_parameters)`."""
    names = {id(p): name for name, p in engine.module.named_parameters()}
    groups = base_optimizer(engine).param_groups
    parameters = getattr(engine.optimizer, "fp16_groups", None) or [group["params"] for group in groups]
    for group, mine in zip(groups, parameters, strict=True):
        if any(id(p) not in names for p in mine):
            raise UserError(
                "the optimizer trains a tensor that is not a parameter of the model, such as a learned weight of the "
                "loss: make it a parameter of the model, because checkpoints are read by the names of parameters"
            )
        group["param_names"] = [names[id(p)] for p in mine]
