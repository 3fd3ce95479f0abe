"""Keeps what a loop saves in its client_state, and its learning-rate scheduler, apart from DeepSpeed's own values.

DeepSpeed writes both into one dictionary, and returns a client_state that has values of its own. A loop that adds to
it and saves it again, as in DeepSpeed's guide, would overwrite the new values with those of the earlier checkpoint.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mst_scale.comm import SharedMistake, one_line
from mst_scale.comm.exchange import Exchange
from mst_scale.zero_shards.saving import Given, replace_method

OF_DEEPSPEED = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps",
    "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version", "checkpoint_parallel_dimensions",
})  # fmt: skip
"""The entries that DeepSpeed writes into every checkpoint."""


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return len(data)


class _Probe(pickle.Pickler):
    """Pickles all but the values of tensors, and keeps nothing."""

    def __init__(self) -> None:
        super().__init__(_Nowhere())

    def persistent_id(self, given: Any) -> str | None:
        return "" if isinstance(given, torch.Tensor | torch.UntypedStorage) else None


def _check(client_state: dict[str, Any], stray: list[str]) -> None:
    """Reject names of DeepSpeed, and values that cannot be pickled."""
    if stray:
        raise SharedMistake(
            f"client_state has {', '.join(stray)}, where DeepSpeed saves values of its own: choose other names"
        )
    for key, value in client_state.items():
        try:
            _Probe().dump(value)
        except Exception as error:  # whatever an object's own code raises
            raise SharedMistake(
                f"client_state[{key!r}] cannot be pickled ({one_line(error)}): leave it out, or save the "
                "values from which your program can create it"
            ) from error


def keep_own_entries(engine: Any) -> None:
    """Make `engine.save_checkpoint` save DeepSpeed's values of now, whatever a client_state has under their names."""
    returned: set[str] = set()

    def save_checkpoint(save: Callable[..., Any], given: Given) -> Any:
        state = given.get("client_state") or {}
        own = {key: value for key, value in state.items() if key not in OF_DEEPSPEED}
        stray = sorted(OF_DEEPSPEED & state.keys() - returned)
        # one rank writes it, and would leave the others waiting; what it has may differ from theirs
        Exchange(dist.group.WORLD, engine.device).agree(lambda: _check(own, stray))
        return save(**{**given, "client_state": own})

    def load_checkpoint(load: Callable[..., Any], given: Given) -> Any:
        path, state = load(**given)
        returned.update(OF_DEEPSPEED & (state or {}).keys())
        return path, state

    replace_method(engine, "save_checkpoint", save_checkpoint)
    replace_method(engine, "load_checkpoint", load_checkpoint)


def explain_scheduler(engine: Any) -> None:
    """Make `engine.load_checkpoint` say in one line that a checkpoint has no state for this run's scheduler."""

    def load_checkpoint(load: Callable[..., Any], given: Given) -> Any:
        scheduler = engine.lr_scheduler
        inner = getattr(scheduler, "load_state_dict", None)
        if inner is None:
            return load(**given)

        def load_state_dict(state: Any) -> None:
            try:
                inner(state)
            except (AttributeError, KeyError, TypeError) as error:
                saved = "no learning-rate scheduler" if state is None else "another learning-rate scheduler"
                raise SharedMistake(
                    f"the checkpoint was saved with {saved}, and this run has a {type(scheduler).__name__}: continue "
                    "with the scheduler of the checkpoint, or pass load_lr_scheduler_states=False, with which this one "
                    "begins at its first step"
                ) from error

        scheduler.load_state_dict = load_state_dict
        try:
            return load(**given)
        finally:
            del scheduler.load_state_dict

    replace_method(engine, "load_checkpoint", load_checkpoint)
