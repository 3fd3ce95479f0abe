"""`mst_scale.integrate()`: one line, after which `deepspeed.initialize` makes engines that train sparsely.

Trainer, Accelerate, Lightning and Fabric look `deepspeed.initialize` up when they call it, as most scripts do; so what
stands there then decides. An engine whose config has an `mst` block or a recipe is ours; one without, or one that does
not train, is DeepSpeed's, unchanged.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import io
import json
import sys
import weakref
from pathlib import Path
from typing import Any

import deepspeed

from mst_scale.comm import SharedMistake, exits, logger, speak
from mst_scale.config import BLOCKS
from mst_scale.doors import accelerate
from mst_scale.doors.length import with_length
from mst_scale.doors.on_import import when_imported
from mst_scale.engine import api
from mst_scale.errors import UserError
from mst_scale.runs.recording import Recording


class Door:
    """What stands in the place of `deepspeed.initialize`."""

    def __init__(self, mst: dict[str, Any] | None, steps: int | None):
        self.mst, self.steps = mst, steps
        self.plain = deepspeed.initialize
        self.trainer: Any = None  # a word of doors.trainer about the engine that is made next
        self.made: weakref.ref[Any] | None = None  # the newest sparse engine
        self.recorded: weakref.ref[Recording] | None = None  # the newest, where it is Trainer's
        self.told_dense = False
        self.failed = False  # the program ends with an error

    def initialize(
        self,
        args: Any = None,
        model: Any = None,
        optimizer: Any = None,
        model_parameters: Any = None,
        *more: Any,
        config: Any = None,
        config_params: Any = None,
        **others: Any,
    ) -> Any:
        """`deepspeed.initialize`, its arguments in its order."""
        if more:  # what that order gives a name
            given = inspect.signature(self.plain).bind(args, model, optimizer, model_parameters, *more).arguments
            named = {key: value for key, value in given.items() if key not in api.FIRST}
            stated = {"config": config, "config_params": config_params}
            others |= {key: value for key, value in stated.items() if value is not None}
            return self.initialize(args, model, optimizer, model_parameters, **named, **others)
        stated = config if config is not None else config_params
        raw = _read(stated if stated is not None else getattr(args, "deepspeed_config", None))
        trains = optimizer is not None or raw is None or "optimizer" in raw
        if raw is not None and self.mst is not None and "recipe" not in raw:
            raw = {"mst": self.mst, **raw}
        if raw is None or raw.keys().isdisjoint(("mst", "recipe")) or not trains:
            if trains and not self.told_dense:
                why = "is no dict and no JSON file" if raw is None else "has no mst block and no recipe"
                logger.warning("deepspeed.initialize: the config %s, so this engine trains dense", why)
                self.told_dense = True
            if raw is not None and stated is not None and not trains:  # an engine for evaluation, say
                config, config_params = _without_ours(raw), None
            return self.plain(
                args, model, optimizer, model_parameters, config=config, config_params=config_params, **others
            )
        self._refuse_second(model)
        asked, self.trainer = self.trainer, None
        raw = with_length(raw, model, self.steps, asked.steps if asked else None)
        if asked and asked.seed is not None:
            raw["training"] = {"seed": asked.seed, **raw["training"]}
        if getattr(args, "deepspeed_config", None) is not None:
            args = None
        made = api.initialize(args, model, optimizer, model_parameters, config=raw, **others)
        _look_like_an_optimizer(made[0])
        self.made = weakref.ref(made[0])
        self.recorded = None
        if asked:
            recording = Recording(made[0], asked.out, every=0, tensorboard=False, shows=asked.shows)
            self.recorded = weakref.ref(recording)  # the engine's hooks hold it
        return made

    @property
    def recording(self) -> Recording | None:
        return None if self.recorded is None else self.recorded()

    def _refuse_second(self, model: Any) -> None:
        """One model after the other is fine (a search over hyperparameters); two side by side are a mistake, for one
        of them is a reference or a teacher. DeepSpeed never lets go of an engine, so its steps tell."""
        engine = self.made() if self.made is not None else None
        if engine is None or engine.module is model:
            return
        if engine.mst.step == 0:
            raise SharedMistake(
                "a second model comes to deepspeed.initialize with an mst block before the first has taken a step, and "
                "integrate() makes one sparse: give the other (a reference, a teacher) a config without mst, or call "
                "mst_scale.initialize for both"
            )
        logger.warning("another model becomes sparse in this process, after %d steps of the first", engine.mst.step)

    def tell_if_unused(self) -> None:
        """At the end of the program."""
        if self.made is None and not self.told_dense and not self.failed:
            logger.warning(
                "integrate() was called and no engine came of it: deepspeed.initialize was not called, or under a name "
                "that was imported before (from deepspeed import initialize)"
            )


_door: Door | None = None


def integrate(mst: dict[str, Any] | None = None, steps: int | None = None) -> None:
    """Make `deepspeed.initialize` return engines that train sparsely if their config has an `mst` block or a recipe.

    Args:
        mst: The `mst` block for configs that have neither, for example those written by `accelerate config`.
        steps: The number of optimizer steps of the run, if neither the config nor the framework states it.

    Raises:
        UserError: `integrate` was called before with other arguments, or `mst` is not a dict.
    """
    global _door  # noqa: PLW0603  (deepspeed.initialize is one for the whole process, and so is what stands there)
    speak()
    if _door is not None:
        if (mst, steps) != (_door.mst, _door.steps):
            raise SharedMistake("integrate() was called before, with other arguments: call it once")
        logger.warning("integrate() was called before: once is enough")
        return
    if mst is not None and not isinstance(mst, dict):
        raise SharedMistake(f'integrate(mst=…) is the mst block, such as {{"method": "mst"}}, not {mst!r}')
    door = Door(mst, steps)
    _door = door

    @functools.wraps(door.plain)
    def initialize(*given: Any, **named: Any) -> Any:
        return door.initialize(*given, **named)

    deepspeed.initialize = initialize
    when_imported("accelerate.state", accelerate.open_door)
    when_imported("transformers.trainer", lambda module: _open_trainer(module, door))
    atexit.register(door.tell_if_unused)
    _say_mistakes_in_one_line(door)


def _open_trainer(module: Any, door: Door) -> None:
    from mst_scale.doors import trainer  # imports transformers

    trainer.open_door(module, door)


def _read(given: Any) -> dict[str, Any] | None:
    """A config as a dict of our own; None where it is not one that could hold our blocks."""
    if isinstance(given, dict):
        return dict(given)
    if isinstance(given, str | Path) and Path(given).is_file():
        try:
            found = json.loads(Path(given).read_text())
        except ValueError:  # DeepSpeed says what is wrong with it
            return None
        return found if isinstance(found, dict) else None
    return None


def _look_like_an_optimizer(engine: Any) -> None:
    """Fabric's optimizer.step() calls engine.step() only where the engine has these, and goes past it otherwise."""
    for name in ("param_groups", "defaults", "state"):
        if not hasattr(engine, name):
            setattr(engine, name, getattr(engine.optimizer, name, {}))


def _without_ours(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in (*BLOCKS, "recipe")}


def _say_mistakes_in_one_line(door: Door) -> None:
    """A mistake that we refuse ends the program with one line on one rank, and all of its ranks."""
    before = sys.excepthook

    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        door.failed = True
        if isinstance(error, UserError) and not hasattr(sys, "ps1"):
            if isinstance(sys.stderr, io.StringIO):  # torch's hook collects what ours says, to say it once we return
                sys.stderr = sys.__stderr__
            exits.end(error, alike=True)
        before(kind, error, trace)

    sys.excepthook = hook
