"""Opens checkpoints as data, so that a checkpoint from elsewhere cannot run code on the machine that reads it.

A `.pt` file is a pickle, and a pickle can call any function when it is opened. torch's `weights_only` opens tensors,
numbers, strings and containers of them, and rejects the rest by name; of DeepSpeed's own classes the few that its
checkpoints hold are allowed. DeepSpeed itself opens them without that protection, so while it loads for us, its
`torch.load` is this one. Not covered: your own training loop, if it calls `engine.load_checkpoint`, because its
`client_state` may hold your own objects.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mst_scale.comm import Damaged, one_line
from mst_scale.errors import UserError

_trusting = [False]  # whether `load` opens files that this program has written, for all threads that read one


@contextlib.contextmanager
def trusted() -> Iterator[None]:
    """Return a context in which `load` opens any object: for files that this program has just written."""
    before, _trusting[0] = _trusting[0], True
    try:
        yield
    finally:
        _trusting[0] = before


def saved_classes() -> list[Any]:
    """Return the classes whose objects DeepSpeed's checkpoints contain in addition to data."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


def load(path: Path, classes: Sequence[Any] = (), mmap: bool = False) -> Any:
    """Return what the file holds, on the CPU.

    Raises UserError if it holds more than data, and Damaged if it cannot be parsed.
    """
    try:
        with _refusing(), _allowing(classes):
            return torch.load(path, map_location="cpu", weights_only=not _trusting[0], mmap=mmap)
    except (OSError, MemoryError):
        raise
    except UserError as error:
        raise UserError(f"{path}: {one_line(error)}") from None
    except Exception as error:  # whatever a reader of pickles and archives may trip over
        if _trusting[0] and isinstance(error, TypeError | AttributeError | ImportError):  # an object
            raise UserError(f"{path} has an object that cannot be loaded again ({one_line(error)})") from None
        raise Damaged(f"{path} is damaged or cut short ({one_line(error)})") from None


@contextlib.contextmanager
def data_only(classes: Sequence[Any]) -> Iterator[None]:
    """Return a context in which every `torch.load` of this process opens only data, whatever its caller asks for."""
    inner = torch.load

    @functools.wraps(inner)
    def guarded(*arguments: Any, **options: Any) -> Any:
        return inner(*arguments, **{**options, "weights_only": True})

    torch.load = guarded
    try:
        with _refusing(), _allowing(classes):
            yield
    finally:
        torch.load = inner


def _allowing(classes: Sequence[Any]) -> Any:
    """Allow the classes that are not allowed yet: torch would also forbid those of an outer call at the end."""
    allowed = torch.serialization.get_safe_globals()
    wanted = [*classes, (_member, "builtins.getattr")]
    return torch.serialization.safe_globals([found for found in wanted if found not in allowed])


def _member(owner: Any, name: Any) -> Any:
    """In place of `getattr`, by which early Pythons 3.11 (Debian 12 has one) write an Enum's member: that alone."""
    if isinstance(owner, enum.EnumMeta) and name in owner.__members__:
        return owner[name]
    raise pickle.UnpicklingError(f"Unsupported global: getattr of {owner!r:.80}")


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line or "global" in line), str(error))
        raise UserError(f"the checkpoint holds more than data and is not opened: {reason.strip()}") from None
