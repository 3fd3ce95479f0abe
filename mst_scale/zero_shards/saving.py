"""DeepSpeed's saves and loads: what fails is told on every rank, what rides along is carried, every stage loads."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from mst_scale.zero_shards import safe_load
from mst_scale.zero_shards.slices import Replicated
from mst_scale.zero_shards.step import base_optimizer


@contextlib.contextmanager
def errors_after_saving(engine: Any) -> Iterator[None]:
    """Let a save run to its end on every rank, then raise what went wrong on this one.

    DeepSpeed meets at barriers while it saves: a rank that raises in between (its disk is full) would leave the others
    waiting there.
    """
    inner, recovery = engine.checkpoint_engine, engine._copy_recovery_script
    errors: list[Exception] = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def save(self, state_dict: Any, path: str) -> None:
            attempt(lambda: inner.save(state_dict, path))

    def attempt(what: Any) -> None:
        try:
            what()
        except (OSError, RuntimeError) as error:  # torch's writers report a full disk as RuntimeError
            errors.append(error)

    engine.checkpoint_engine = Recorder()
    engine._copy_recovery_script = lambda path: attempt(lambda: recovery(path))
    try:
        yield
    finally:
        engine.checkpoint_engine, engine._copy_recovery_script = inner, recovery
    if errors:
        raise errors[0]


def saved_classes() -> list[Any]:
    """What DeepSpeed's checkpoints hold beside data."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


def load_checkpoint(engine: Any, checkpoint: Path, universal: bool = False) -> dict[str, Any]:
    """Weights, optimizer and our own state; a checkpoint that does not fit is a ValueError that says so."""
    before = engine._config.load_universal_checkpoint
    engine._config.load_universal_checkpoint = universal
    try:
        with safe_load.data_only(saved_classes()):
            path, state = engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
    finally:
        engine._config.load_universal_checkpoint = before
    if path is None:
        raise ValueError(f"{checkpoint} does not hold a checkpoint for this model, ZeRO stage and number of ranks")
    return dict(state)


def after_loading(engine: Any, hook: Callable[[Path], None]) -> None:
    """Call `hook` with a checkpoint's folder after each `engine.load_checkpoint` that has found one."""
    load = engine.load_checkpoint

    @functools.wraps(load)
    def load_checkpoint(*args: Any, **named: Any) -> Any:
        path, state = load(*args, **named)
        if path is not None:
            hook(Path(path).parent)
        return path, state

    engine.load_checkpoint = load_checkpoint


def carry_along(engine: Any, follower: Any) -> None:
    """From now on `engine.save_checkpoint` and `engine.load_checkpoint` carry the follower's masks; their arguments
    stay."""
    save, load = engine.save_checkpoint, engine.load_checkpoint
    of_save, of_load = inspect.signature(save), inspect.signature(load)

    @functools.wraps(save)
    def save_checkpoint(*args: Any, **named: Any) -> Any:
        given = of_save.bind(*args, **named).arguments
        tag = f"global_step{engine.global_steps}" if given.get("tag") is None else str(given["tag"])
        # before DeepSpeed's own files, so that its `latest` never names a checkpoint without masks
        head = follower.saving(Path(given["save_dir"]) / tag)
        state = {**(given.get("client_state") or {}), "mst": head}
        return save(**{**given, "tag": tag, "client_state": state})

    @functools.wraps(load)
    def load_checkpoint(*args: Any, **named: Any) -> Any:
        given = of_load.bind(*args, **named).arguments
        if given.get("load_module_only"):  # at ZeRO-3 DeepSpeed's own loads nothing, and masks have to fit
            folder, tag = Path(given["load_dir"]), given.get("tag")
            if tag is None and (folder / "latest").is_file():
                tag = (folder / "latest").read_text().strip()
            if tag is not None:
                return str(folder / tag), follower.load_weights(folder / tag)
        path, state = load(*args, **named)
        if path is not None:
            follower.loaded(Path(path).parent, (state or {}).get("mst"))
        return path, state

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


def carry_state(
    engine: Any, name: str, saved: Callable[[], dict[str, Any]], loaded: Callable[[dict[str, Any] | None], None]
) -> None:
    """From now on checkpoints hold `saved()` under a name of its own in their client_state; a load gives it to
    `loaded`, or None where there is none. Both are called on every rank, after the masks' own part."""
    save, load = engine.save_checkpoint, engine.load_checkpoint
    of_save = inspect.signature(save)

    @functools.wraps(save)
    def save_checkpoint(*args: Any, **named: Any) -> Any:
        given = of_save.bind(*args, **named).arguments
        return save(**{**given, "client_state": {**(given.get("client_state") or {}), name: saved()}})

    @functools.wraps(load)
    def load_checkpoint(*args: Any, **named: Any) -> Any:
        path, state = load(*args, **named)
        if path is not None:
            loaded((state or {}).get(name))
        return path, state

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


def fit_universal_checkpoints(engine: Any) -> None:
    """Let every stage load what `mst reshape` writes, and stage 0 write what it can convert.

    Beyond DeepSpeed's own loading ({"checkpoint": {"load_universal": true}}): at stage 0, which it has no loader for,
    everything is loaded here; at stage 3 each parameter group gets its own hyperparameters back, where DeepSpeed gives
    all groups those of the first (decaying norms and biases), and each sub-group a step count of its own; buffers are
    put back at every stage.
    """
    stage, load = engine.zero_optimization_stage(), engine.load_checkpoint
    if stage == 0:
        _name_parameters(engine)

    order = inspect.signature(load)

    @functools.wraps(load)
    def load_checkpoint(*args: Any, **named: Any) -> Any:
        if not engine.load_universal_checkpoint():
            return load(*args, **named)
        others = order.bind(*args, **named).arguments
        load_dir, tag = others.pop("load_dir"), others.pop("tag", None)
        if tag is None:
            tag = (Path(load_dir) / "latest_universal").read_text().strip()
        zero = Path(load_dir) / tag / "zero"
        common = safe_load.load(zero / "optimizer_state.pt", saved_classes())
        optimizer = base_optimizer(engine)
        if len(common["param_groups"]) != len(optimizer.param_groups):
            raise ValueError(
                f"{zero.parent} has {len(common['param_groups'])} parameter groups, this optimizer "
                f"{len(optimizer.param_groups)}: give it the same groups"
            )
        if stage == 0:
            path, state = engine._load_checkpoint(load_dir, tag, **{**others, "load_optimizer_states": False})
            _load_replicated(engine, zero)
        else:
            path, state = load(load_dir, tag=tag, **others)
        if path is None:
            return path, state
        for group, saved in zip(optimizer.param_groups, common["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for kept in optimizer.state.values():
            if torch.is_tensor(kept.get("step")):
                kept["step"] = kept["step"].clone()
        buffers = dict(engine.module.named_buffers())
        for name, value in state.pop("mst_buffers", {}).items():
            buffers[name].copy_(value)
        return path, state

    engine.load_checkpoint = load_checkpoint


def _name_parameters(engine: Any) -> None:
    """Stage 0 saves optimizer states by number: say whose they are, as torch does for `Optimizer(named_parameters)`."""
    names = {id(p): name for name, p in engine.module.named_parameters()}
    groups = base_optimizer(engine).param_groups
    parameters = getattr(engine.optimizer, "fp16_groups", None) or [group["params"] for group in groups]
    for group, mine in zip(groups, parameters, strict=True):
        group["param_names"] = [names[id(p)] for p in mine]


def _load_replicated(engine: Any, zero: Path) -> None:
    """Stage 0: every rank reads every parameter whole."""
    parameters = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    shards = Replicated(engine, parameters)
    for i, (name, parameter) in enumerate(parameters.items()):
        owner = shards.owner(i)
        state = shards.optimizer.state[owner]
        for path in sorted((zero / name).glob("*.pt")):
            key, saved = path.stem, safe_load.load(path, saved_classes())
            if key == "step":
                state[key] = saved
            elif key == "fp32":
                shards.weight(i).copy_(saved["param"].view(-1))
                parameter.data.copy_(saved["param"])
            else:
                if key not in state:
                    state[key] = torch.zeros_like(owner)
                shards.states(i)[key].copy_(saved["param"].view(-1))
