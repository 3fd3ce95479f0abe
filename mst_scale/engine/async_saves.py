"""Makes `engine.save_checkpoint` return after a copy, and writes the files in the background (`training.async_save`).

The folder has the files that DeepSpeed would write, under a name that ends in `.partial` until all ranks have written
theirs; then it is renamed, and `latest` names it. A save or load that comes before that waits, and so does the end of
the program. A save that fails is logged, and the next one blocks: it raises if it fails too. Otherwise a loop might
remove the last complete checkpoint to make room for ones that do not exist.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import shutil
import weakref
from multiprocessing import util
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mst_scale import zero_shards
from mst_scale.checkpoints.background import WITHOUT_COPY, BackgroundSaves
from mst_scale.checkpoints.store import PARTIAL
from mst_scale.comm import FailedElsewhere, Ranks, logger, new_group
from mst_scale.comm.own_loops import BEFORE_OTHERS
from mst_scale.snapshot import Snapshot


def save_in_background(engine: Any) -> BackgroundSaves | None:
    """Change `engine.save_checkpoint`; return the background saves, or None if this engine's saves must block."""
    if (why := zero_shards.why_blocking(engine)) is not None:
        logger.info("engine.save_checkpoint waits until a checkpoint is written: %s", why)
        return None
    local = int(os.environ.get("LOCAL_RANK", "0"))
    saves = BackgroundSaves(Ranks(dist.get_rank(), local, dist.get_world_size(), new_group("saves", backend="gloo")))
    save, load = engine.save_checkpoint, engine.load_checkpoint
    order = inspect.signature(save)
    swept: set[Path] = set()

    @functools.wraps(save)
    def save_checkpoint(*args: Any, **named: Any) -> Any:
        before = saves.finish()
        given = order.bind(*args, **named).arguments
        if (folder := Path(given["save_dir"])) not in swept:
            saves.ranks.on_first(lambda: _sweep(folder))
            swept.add(folder)
        if before is not None and before.error is not None:
            if dist.get_rank() == 0:
                logger.error("step %d was not saved (%s): this save blocks", before.step, before.error)
            return save(**given)
        tag = f"global_step{engine.global_steps}" if given.get("tag") is None else str(given["tag"])

        def take(snapshot: Snapshot, draft: Path) -> None:
            with zero_shards.errors_after_saving(engine, snapshot):
                save(**{**given, "save_dir": str(draft.parent), "tag": draft.name, "save_latest": False})

        final, latest = folder / tag, bool(given.get("save_latest", True))
        try:
            saves.start(take, final, step=engine.global_steps, about=None, latest=latest)
        except (OSError, FailedElsewhere) as error:
            if isinstance(error, OSError):
                logger.error("%s %s", error, WITHOUT_COPY)  # warnings of other ranks than the first are not shown
            return save(**given)
        return True

    @functools.wraps(load)
    def load_checkpoint(*args: Any, **named: Any) -> Any:
        saves.finish()
        return load(*args, **named)

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint
    finish = weakref.finalize(engine, _at_exit, saves)  # when the engine is freed, or at the end of the program
    util.Finalize(None, finish, exitpriority=BEFORE_OTHERS)  # the end of a forked process runs only these
    return saves


def _sweep(folder: Path) -> None:
    """Remove what saves of killed programs have left behind."""
    for path in folder.glob(f"*{PARTIAL}"):
        if re.search(r"\.[0-9a-f]{8}$", path.name.removesuffix(PARTIAL)):
            shutil.rmtree(path, ignore_errors=True)


def _at_exit(saves: BackgroundSaves) -> None:
    saves.wait_here()
    saves.close()
