"""Replaces `deepspeed.initialize` by one that creates sparse engines: `mst_scale.integrate()`.

Trainer, Accelerate, Lightning and Fabric look up `deepspeed.initialize` when they call it, as most scripts do. A config
with an `mst` block or a recipe then gets an engine that trains sparsely; one without them, or an engine that does not
train, is created by DeepSpeed, unchanged.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import io
import math
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import deepspeed
import hjson

from mst_scale.comm import SharedMistake, exits, logger, speak
from mst_scale.config import BLOCKS
from mst_scale.engine import api
from mst_scale.errors import UserError
from mst_scale.integrations.on_import import when_imported
from mst_scale.integrations.recording import Recording


class Integration:
    """Takes the place of `deepspeed.initialize` in this process."""

    def __init__(self, mst: dict[str, Any] | None, steps: int | None):
        self.mst, self.steps = mst, steps
        self.plain = deepspeed.initialize
        self.trainer: Any = None  # settings of integrations.trainer for the next engine
        self.made: weakref.ref[Any] | None = None  # the latest sparse engine
        self.recorded: weakref.ref[Recording] | None = None  # its recording, if Trainer made it
        self.warned_dense = False
        self.failed = False  # the program ends with an error

    def initialize(
        self,
        args: Any = None,
        model: Any = None,
        optimizer: Any = None,
        model_parameters: Any = None,
        *,
        config: Any = None,
        config_params: Any = None,
        **others: Any,
    ) -> Any:
        """Create an engine; the arguments, here by name, and the results are those of `deepspeed.initialize`."""
        stated = config if config is not None else config_params
        raw = _read(stated if stated is not None else getattr(args, "deepspeed_config", None))
        trains = optimizer is not None or raw is None or "optimizer" in raw
        if raw is not None and self.mst is not None and "recipe" not in raw:
            raw = {"mst": self.mst, **raw}
        if raw is None or raw.keys().isdisjoint(("mst", "recipe")) or not trains:
            if trains and not self.warned_dense:
                why = "is neither a dict nor a JSON file" if raw is None else "has no mst block and no recipe"
                logger.warning("deepspeed.initialize: the config %s, so this engine trains dense", why)
                self.warned_dense = True
            if trains:  # what follows belongs to this engine and not to an earlier, sparse one
                self.trainer = self.recorded = None
            if raw is not None and stated is not None and not trains:  # for example, an engine for evaluation
                config, config_params = _without_ours(raw), None
            return self.plain(
                args, model, optimizer, model_parameters, config=config, config_params=config_params, **others
            )
        self._validate_single_model(model)
        trainer, self.trainer = self.trainer, None
        raw = _with_length(raw, model, self.steps, trainer.steps if trainer else None)
        if trainer and trainer.seed is not None:
            raw["training"] = {"seed": trainer.seed, **raw["training"]}
        if getattr(args, "deepspeed_config", None) is not None:
            args = None
        made = api.initialize(args, model, optimizer, model_parameters, config=raw, **others)
        _look_like_an_optimizer(made[0])
        _keep_until_written(model, made[0])
        self.made = weakref.ref(made[0])
        self.recorded = None
        if trainer:
            recording = Recording(made[0], trainer.out, every=0, tensorboard=False, shows=trainer.shows)
            self.recorded = weakref.ref(recording)  # the engine's hooks hold it
        return made

    def _validate_single_model(self, model: Any) -> None:
        """Reject a second model before the first has taken a step, as one of them is probably a reference or teacher.

        Training several models one after the other is supported (a hyperparameter search). DeepSpeed never frees an
        engine, so only its steps show whether it is used.
        """
        engine = self.made() if self.made is not None else None
        if engine is None or engine.module is model:
            return
        if engine.mst.step == 0:
            raise SharedMistake(
                "deepspeed.initialize was called for a second model with an mst block before the first one has taken a "
                "step. integrate() supports one sparse model: use a config without mst for the other one (such as a "
                "reference or teacher), or call mst_scale.initialize for both"
            )
        logger.warning(
            "a second model is trained sparsely in this process, after %d steps of the first", engine.mst.step
        )

    def warn_if_unused(self) -> None:
        """Warn at the end of the program if no engine was created."""
        if self.made is None and not self.warned_dense and not self.failed:
            logger.warning(
                "integrate() was called, but no engine was created through it: deepspeed.initialize was not called, or "
                "it was imported before (from deepspeed import initialize)"
            )


_installed: Integration | None = None


def integrate(mst: dict[str, Any] | None = None, steps: int | None = None) -> None:
    """Make `deepspeed.initialize` return engines that train sparsely if their config has an `mst` block or a recipe.

    Args:
        mst: The `mst` block for configs that have neither, such as those written by `accelerate config`.
        steps: The number of optimizer steps of the run, if neither the config nor the framework sets it.

    Raises:
        UserError: if `integrate` was called before with other arguments, or `mst` is not a dict.
    """
    global _installed  # noqa: PLW0603  (deepspeed.initialize is shared by the whole process)
    speak()
    if _installed is not None:
        if (mst, steps) != (_installed.mst, _installed.steps):
            raise SharedMistake("integrate() was called before, with other arguments: call it once")
        logger.warning("integrate() was called twice with the same arguments: one call is enough")
        return
    integration = Integration(mst, steps)
    _print_usage_errors_in_one_line(integration)
    if mst is not None and not isinstance(mst, dict):
        raise SharedMistake(f'integrate(mst=…) is the mst block, such as {{"method": "mst"}}, not {mst!r}')
    _installed = integration
    order = inspect.signature(integration.plain)

    @functools.wraps(integration.plain)
    def initialize(*given: Any, **named: Any) -> Any:
        return integration.initialize(**order.bind_partial(*given).arguments, **named)

    deepspeed.initialize = initialize
    when_imported("accelerate.state", _reject_cpu_processes)
    when_imported("accelerate.utils.dataclasses", _leave_our_blocks)
    when_imported("accelerate.accelerator", _return_weights)
    when_imported("transformers.trainer", lambda module: _install_trainer(module, integration))
    atexit.register(integration.warn_if_unused)


def _install_trainer(module: Any, integration: Integration) -> None:
    from mst_scale.integrations import trainer  # imports transformers

    trainer.install(module, integration)


def _read(given: Any) -> dict[str, Any] | None:
    """Return a copy of the config as a dict, a file as DeepSpeed reads it; None if it cannot contain our blocks."""
    if isinstance(given, dict):
        return dict(given)
    if isinstance(given, str | Path) and Path(given).is_file():
        try:
            found = hjson.loads(Path(given).read_text(encoding="utf-8-sig"), object_pairs_hook=dict)
        except ValueError:  # DeepSpeed reports what is wrong with it
            return None
        return found if isinstance(found, dict) else None
    return None


def _with_length(config: dict[str, Any], model: Any, given: int | None, of_trainer: int | None) -> dict[str, Any]:
    """Return the config with the number of optimizer steps of the run, if it can be determined.

    `"training": {"steps": N}` sets it. If it is missing or "auto", the following are used, in this order:

        integrate(steps=N)
        Trainer's max_steps, or the number of steps of its epochs
        DeepSpeed's scheduler, "scheduler": {"params": {"total_num_steps": N}}, which Accelerate also fills in
        Lightning's max_steps, or the number of steps of its epochs

    Args:
        config: The config.
        model: The model, to which Lightning may have attached its trainer.
        given: The argument of integrate().
        of_trainer: The number of steps of transformers' Trainer.
    """
    training = config.get("training") or {}
    if not isinstance(training, dict):  # which is rejected when the config is read
        return config
    training = dict(training)
    stated = training.pop("steps", None)
    sources = (given, of_trainer or None, _of_scheduler(config) or None, _of_lightning(model))
    known = next((steps for steps in sources if steps is not None), None)
    if stated not in (None, "auto"):
        if known is not None and known != stated:
            logger.warning(
                "training.steps is %s but the loop takes %d optimizer steps: phases are scheduled for a run of %s; set "
                'it to "auto" to follow the loop',
                stated,
                known,
                stated,
            )
        known = stated
    if known is not None:
        training["steps"] = known
    return {**config, "training": training}


def _of_scheduler(config: dict[str, Any]) -> int | None:
    scheduler = config.get("scheduler")
    params = scheduler.get("params") if isinstance(scheduler, dict) else None
    steps = params.get("total_num_steps") if isinstance(params, dict) else None
    return steps if isinstance(steps, int) else None


def _of_lightning(model: Any) -> int | None:
    trainer: Any = getattr(model, "_trainer", None)
    steps = getattr(trainer, "estimated_stepping_batches", None)
    if not isinstance(steps, int) or steps <= 0:
        return None
    return steps if trainer.accumulate_grad_batches == 1 else _of_accumulating_lightning(trainer, steps)


def _of_accumulating_lightning(trainer: Any, estimated: int) -> int | None:
    """Return how many steps DeepSpeed takes in the micro-batches of a run.

    At the end of an epoch, Lightning estimates a step of the remaining micro-batches, and then counts none; DeepSpeed
    keeps them for its next step.
    """
    of_step = trainer.accumulate_grad_batches
    if trainer.train_dataloader is None:  # the estimate for a run without a number of epochs does not need it
        trainer.fit_loop.setup_data()
    of_epoch = trainer.num_training_batches
    if math.isinf(of_epoch):
        return estimated
    limits = [] if trainer.max_epochs == -1 else [trainer.max_epochs * of_epoch]
    counted = of_epoch // of_step
    if trainer.max_steps != -1 and counted:
        epochs = (trainer.max_steps - 1) // counted
        limits.append(epochs * of_epoch + (trainer.max_steps - epochs * counted) * of_step)
    return min(limits) // of_step if limits else None


def _keep_until_written(model: Any, engine: Any) -> None:
    """Let Lightning remove an older checkpoint only when the newer one is complete (training.async_save)."""
    strategy = getattr(getattr(model, "_trainer", None), "strategy", None)
    if strategy is None or engine.mst.saves is None:
        return
    remove, mst = strategy.remove_checkpoint, engine.mst

    def remove_checkpoint(path: Any) -> None:
        try:
            mst.finish_save()
        except OSError as error:
            logger.error("%s: %s is kept", error, path)
        else:
            remove(path)

    strategy.remove_checkpoint = remove_checkpoint


def _look_like_an_optimizer(engine: Any) -> None:
    """Add the attributes without which Fabric's optimizer.step() would bypass engine.step()."""
    for name in ("param_groups", "defaults", "state"):
        if not hasattr(engine, name):
            setattr(engine, name, getattr(engine.optimizer, name, {}))


def _without_ours(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in (*BLOCKS, "recipe")}


def _print_usage_errors_in_one_line(integration: Integration) -> None:
    """Make a UserError end all ranks of the program with one line on one of them."""

    def end(error: BaseException) -> None:
        integration.failed = True
        if isinstance(error, UserError) and not hasattr(sys, "ps1"):
            if isinstance(sys.stderr, io.StringIO):  # torch's hook captures stderr until this one returns
                sys.stderr = sys.__stderr__
            exits.end(error, on_all_ranks=True)

    exits.on_uncaught(end)


# --- Accelerate ---


def _reject_cpu_processes(module: Any) -> None:
    """Wrap `PartialState.__init__` of `module`, which is accelerate.state, to reject several CPU processes.

    With DeepSpeed, Accelerate (and Trainer, which uses it) looks for the backend of an accelerator. On CPUs there is
    none, so each process assumes that it is the only one, and they all train on all of the data or deadlock.
    """
    state = module.PartialState
    begin = state.__init__
    if getattr(begin, "rejects_cpu_processes", False):
        return

    @functools.wraps(begin)
    def with_check(self: Any, cpu: bool = False, **more: Any) -> None:
        _validate_processes(state, cpu)
        begin(self, cpu, **more)

    with_check.rejects_cpu_processes = True  # type: ignore[attr-defined]
    state.__init__ = with_check


def _leave_our_blocks(module: Any) -> None:
    """Wrap `DeepSpeedPlugin.fill_match` of `module`, which is accelerate.utils.dataclasses, to leave our blocks alone.

    Accelerate fills in each value "auto", and rejects those that it does not know.
    """
    plugin = module.DeepSpeedPlugin
    fill = plugin.fill_match
    if getattr(fill, "leaves_our_blocks", False):
        return

    @functools.wraps(fill)
    def fill_match(self: Any, ds_key_long: str, *given: Any, **named: Any) -> None:
        if ds_key_long.partition(".")[0] not in BLOCKS:
            fill(self, ds_key_long, *given, **named)

    fill_match.leaves_our_blocks = True  # type: ignore[attr-defined]
    plugin.fill_match = fill_match


def _return_weights(module: Any) -> None:
    """Wrap `Accelerator.get_state_dict` of `module`, which is accelerate.accelerator, to return multiplied weights."""
    inner = module.Accelerator.get_state_dict
    if getattr(inner, "returns_weights", False):
        return

    @functools.wraps(inner)
    def get_state_dict(self: Any, model: Any, *given: Any, **named: Any) -> Any:
        state, mst = inner(self, model, *given, **named), getattr(model, "mst", None)
        return state if mst is None or not state else mst.weights(state)

    get_state_dict.returns_weights = True  # type: ignore[attr-defined]
    module.Accelerator.get_state_dict = get_state_dict


def _validate_processes(state: Any, cpu: bool) -> None:
    """Raise SharedMistake for several CPU processes; called before Accelerate would wait for a process group."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    of_launcher = int(os.environ.get("LOCAL_RANK", "-1")) != -1
    with_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if processes == 1 or not of_launcher or not with_deepspeed or state._shared_state:
        return
    if cpu or state._prepare_backend(state, cpu)[0] is None:
        raise SharedMistake(
            f"{processes} processes were started on CPUs, where Accelerate and Trainer with DeepSpeed support only "
            "one: start one (python SCRIPT), or call mst_scale.initialize in a custom loop, which supports several"
        )
