"""Logs what is being compiled at first use and for how long, and lets one process per machine compile.

DeepSpeed compiles an operator (above all its Adam) with `torch.utils.cpp_extension.load` when it is first used: for
minutes, silently, in every process that starts meanwhile. Inside `announced()` this happens under one lock per
operator, which the kernel releases even if the compiling process is killed.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from mst_scale.compiled import build_locks
from mst_scale.files import locked

SAY_EVERY = 30.0  # seconds
TITLES = {
    "fused_adam": "DeepSpeed's fused Adam",
    "cpu_adam": "DeepSpeed's CPU Adam",
    "deepspeed_shm_comm": "DeepSpeed's communication through shared memory",
}
HINTS = {"fused_adam": "; optimizer.params.torch_adam = true uses torch's Adam, which needs no compilation"}
logger = logging.getLogger("mst_scale")


@contextmanager
def elapsed(what: str, about: str = "") -> Iterator[None]:
    """Log the start of `what` (with `about`), its time so far every `SAY_EVERY` seconds, and how long it took."""
    logger.info("%s%s", what, about)
    ended, began = threading.Event(), time.monotonic()

    def repeat() -> None:
        while not ended.wait(SAY_EVERY):
            logger.info("%s: %.0f s so far", what, time.monotonic() - began)

    speaker = threading.Thread(target=repeat, daemon=True)
    speaker.start()
    try:
        yield
    finally:
        ended.set()
        speaker.join()
    logger.info("%s: done in %.1f s", what, time.monotonic() - began)


def lock(path: Path, what: str) -> AbstractContextManager[None]:
    """Hold the lock file `path` inside the block; log it if another process is compiling `what`."""
    waiting = f"waiting for another process, which is compiling {what}"
    return locked(path, functools.partial(elapsed, waiting))


@contextmanager
def announced() -> Iterator[None]:
    """Announce what torch compiles inside this block, and compile it in one process of this machine at a time."""
    from torch.utils import cpp_extension

    load = cpp_extension.load

    @functools.wraps(load)
    def load_announced(name: str, *args: Any, **named: Any) -> Any:
        folder = Path(named.get("build_directory") or cpp_extension._get_build_directory(name, verbose=False))
        title = TITLES.get(name, name)
        if _is_built(folder, name) and not (folder / "lock").exists():  # torch still checks it against its sources
            return load(name, *args, **named)
        with lock(folder.parent / f"{name}.mst_lock", title):
            build_locks.clear(folder.parent)  # of killed processes: torch would wait for its own lock forever
            if _is_built(folder, name):
                return load(name, *args, **named)
            hint = HINTS.get(name, "")
            with elapsed(f"compiling {title}", f" into {folder} (once on this machine; a minute or more{hint})"):
                return load(name, *args, **named)

    cpp_extension.load = load_announced
    try:
        yield
    finally:
        cpp_extension.load = load


def _is_built(folder: Path, name: str) -> bool:
    return (folder / f"{name}.so").is_file()
