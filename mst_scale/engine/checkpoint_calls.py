"""Changes what `engine.save_checkpoint` and `engine.load_checkpoint` do in your own training loop.

`training.async_save`: a save returns after a copy, and the files are written in the background. The folder has the
files that DeepSpeed would write, under a name that ends in `.partial` until all ranks have written theirs; then it is
renamed, and `latest` names it. A save or load that comes before that waits, and so does the end of the program. A save
that fails is logged, and the next one blocks: it raises if it fails too. Otherwise a loop might remove the last
complete checkpoint to make room for ones that do not exist.

`training.checkpoint_form` "dense": a checkpoint of compact storage is turned into the dense form before `latest` names
it, which DeepSpeed loads without mst_scale ({"checkpoint": {"load_universal": true}}).

`training.reshape_on_load`: a load of a checkpoint of a different number of ranks needs the copy that `mst reshape`
makes. The first rank makes it, inside the checkpoint, while the others wait. `mst_scale.pretrain` does the same without
this key.
"""

from __future__ import annotations

import os
import re
import shutil
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing import util
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mst_scale import zero_shards
from mst_scale.checkpoint_folders import name_latest
from mst_scale.checkpoints.background import WITHOUT_COPY, BackgroundSaves
from mst_scale.checkpoints.reshape import make_dense, reshape
from mst_scale.comm import FailedElsewhere, Ranks, logger, new_group
from mst_scale.comm.own_loops import BEFORE_OTHERS
from mst_scale.errors import UserError
from mst_scale.files import PARTIAL
from mst_scale.snapshot import Snapshot

_swept: set[Path] = set()  # by any engine of this program: another one's save may be under way


def save_in_background(engine: Any, dense: bool) -> BackgroundSaves | None:
    """Change `engine.save_checkpoint` so that files are written in the background.

    Args:
        engine: The engine.
        dense: Whether compact storage is turned into the dense form.

    Returns:
        The background saves; None if this engine's saves must block.
    """
    if (why := zero_shards.blocking_reason(engine)) is not None:
        logger.info("engine.save_checkpoint waits until a checkpoint is written: %s", why)
        return None
    saves = BackgroundSaves(_all_ranks("saves"))
    blocking = partial(_save_dense, engine, saves.ranks) if dense else _save

    def save_checkpoint(save: Callable[..., Any], given: dict[str, Any]) -> Any:
        saves.finish()
        before, saves.failed = saves.failed, None
        if (folder := Path(given["save_dir"])) not in _swept:
            saves.ranks.on_first(lambda: _sweep(folder))
            _swept.add(folder)
        if before is not None:
            if saves.ranks.first:
                logger.error("step %d was not saved (%s): this save blocks", before.step, before.error)
            return blocking(save, given)
        tag = f"global_step{engine.global_steps}" if given.get("tag") is None else str(given["tag"])

        rejected: list[UserError] = []

        def take(snapshot: Snapshot, draft: Path) -> None:
            try:
                with zero_shards.errors_after_saving(engine, snapshot):
                    save(**{**given, "save_dir": str(draft.parent), "tag": draft.name, "save_latest": False})
            except RuntimeError as error:  # torch reports so that the host has no memory for a copy
                raise OSError(str(error)) from error
            except UserError as error:  # on all ranks
                rejected.append(error)
                raise

        final, latest = folder / tag, bool(given.get("save_latest", True))
        try:
            saves.start(take, final, step=engine.global_steps, about=None, dense=dense, latest=latest)
        except (OSError, FailedElsewhere) as error:
            if rejected:
                raise rejected[0] from None
            if isinstance(error, OSError):
                logger.error("%s %s", error, WITHOUT_COPY)  # warnings of other ranks than the first are not shown
            return blocking(save, given)
        return True

    def load_checkpoint(load: Callable[..., Any], given: dict[str, Any]) -> Any:
        saves.finish()
        return load(**given)

    zero_shards.replace_method(engine, "save_checkpoint", save_checkpoint)
    zero_shards.replace_method(engine, "load_checkpoint", load_checkpoint)
    finish = weakref.finalize(engine, _at_exit, saves)  # when the engine is freed, or at the end of the program
    util.Finalize(None, finish, exitpriority=BEFORE_OTHERS)  # the end of a forked process runs only these
    return saves


def save_dense_form(engine: Any) -> None:
    """Let `engine.save_checkpoint` turn compact storage into the dense form, on the first rank."""
    zero_shards.replace_method(engine, "save_checkpoint", partial(_save_dense, engine, _all_ranks("dense form")))


def _save(save: Callable[..., Any], given: dict[str, Any]) -> Any:
    return save(**given)


def _save_dense(engine: Any, ranks: Ranks, save: Callable[..., Any], given: dict[str, Any]) -> bool:
    folder, latest = Path(given["save_dir"]), bool(given.get("save_latest", True))
    tag = f"global_step{engine.global_steps}" if given.get("tag") is None else str(given["tag"])

    def write() -> None:
        with zero_shards.errors_after_saving(engine):
            save(**{**given, "tag": tag, "save_latest": False})

    def convert() -> None:
        made = make_dense(folder / tag, trusted=True)
        if latest:
            name_latest(folder / tag, universal=bool(made))

    ranks.agree(write)
    ranks.on_first(convert, long=True)
    return True


def _sweep(folder: Path) -> None:
    """Remove what saves of killed programs have left behind."""
    for path in folder.glob(f"*{PARTIAL}"):
        if re.search(r"\.[0-9a-f]{8}$", path.name.removesuffix(PARTIAL)):
            shutil.rmtree(path, ignore_errors=True)


def _at_exit(saves: BackgroundSaves) -> None:
    saves.wait_here()
    saves.close()


def reshape_on_load(engine: Any) -> None:
    """Let `engine.load_checkpoint` make the copy that a different number of ranks needs."""
    ranks = _all_ranks("reshape")

    def load_checkpoint(load: Callable[..., Any], given: dict[str, Any]) -> Any:
        def make_copy() -> None:
            found = zero_shards.checkpoint_to_reshape(engine, Path(given["load_dir"]), given.get("tag"))
            if found is not None:
                folder, why = found
                logger.info("%s: creating a copy that can be loaded", why)
                logger.info("created %s in %.1f s", folder, reshape(folder).seconds)

        # weights alone are loaded from any layout
        if not engine.load_universal_checkpoint() and not given.get("load_module_only"):
            ranks.on_first(make_copy, long=True)
        return load(**given)

    zero_shards.replace_method(engine, "load_checkpoint", load_checkpoint)


def _all_ranks(group: str) -> Ranks:
    """Return all ranks with a control group of this name (collective)."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return Ranks(dist.get_rank(), local, dist.get_world_size(), new_group(group, backend="gloo"))
