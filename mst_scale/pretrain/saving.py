"""Saves the checkpoints of a run, now or in the background, keeps copies in memory, and decides what failures mean.

A save that fails in the middle of a run is reported and tried again when the next one is due, however often that
happens: what the run has learned since is only in its memory. One without which the run cannot continue ends it.
A copy in memory that fails is logged and has no other effect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from mst_scale import comm, zero_shards
from mst_scale.checkpoints import finding, memory_copies, store
from mst_scale.checkpoints.background import WITHOUT_COPY, BackgroundSaves, KeptCopies
from mst_scale.checkpoints.neighbors import Ring
from mst_scale.checkpoints.reshape import make_dense
from mst_scale.comm import ParallelDims, Ranks, logger
from mst_scale.config import TrainingConfig
from mst_scale.pretrain.from_memory import HostMemory
from mst_scale.pretrain.prepare import Prepared


class Saves:
    """The checkpoints that one start of a run writes.

    Args:
        prepared: the run as `prepare` returns it.
        saved: called with the step of each complete checkpoint.
        failed: called with the step of a save that failed, and the reason.
        newest_copy: the newest copy in memory that the previous engine of this process has left.
    """

    def __init__(
        self, prepared: Prepared, saved: Callable[[int], None], failed: Callable[[int, str], None],
        newest_copy: str | None = None,
    ):  # fmt: skip
        self.engine, self.ranks = prepared.engine, prepared.ranks
        self.folder = prepared.out / "checkpoints"
        self.training = prepared.experiment.training
        self.about: dict[str, Any] = {
            "batch": prepared.batch,
            "micro": prepared.micro,
            "optimizer": zero_shards.adam_of(self.engine),
            "sizes": ParallelDims() if prepared.mesh is None else prepared.mesh.sizes,
        }
        self._saved, self._failed = saved, failed
        self._in_a_row = 0
        self._seconds: float | None = None
        self._skips = False  # a copy was skipped, and this was logged
        self._memory = _Memory(prepared.out, self.ranks)
        if not prepared.continues:
            self._memory.clear()  # of earlier starts
        self._background = _background_saves(self.engine, self.ranks, self.training)
        if self._background is not None and self.training.memory_every:
            file = prepared.run_file  # on the first rank
            start = self.ranks.on_first(
                lambda: (0, "") if file is None else (file.restarts, str(file.starts[0]["time"]))
            )
            self._background.copies = self._memory.begin(*start, self.training.memory_every, newest_copy)
            with contextlib.suppress(OSError, comm.FailedElsewhere):  # the first copy says so
                self._background.prepare()  # it should listen when the first part of another host comes

    def save(self, step: int, state: dict[str, Any], final: bool) -> None:
        """Save a checkpoint.

        Args:
            step: the number of steps that the run has taken.
            state: what the training loop needs to continue from it.
            final: whether the run cannot continue without it. Then it is written here and not in the background,
                because the run would wait for it anyway.
        """
        self.finish()
        dense = self._saves_dense
        about, keep = {"step": step, **self.about}, self.training.keep_checkpoints
        if self._background is not None and not final:
            try:
                self._seconds = self._background.start(
                    lambda snapshot, draft: store.copy(self.engine, snapshot, draft, {**state, "step": step}),
                    self.folder / finding.tag_of(step),
                    step=step, about=store.describe(self.engine, self.ranks, **about), dense=dense, keep=keep,
                )  # fmt: skip
                return
            except (OSError, comm.FailedElsewhere) as error:  # on all ranks
                if isinstance(error, OSError):
                    logger.error("%s %s", error, WITHOUT_COPY)  # warnings of other ranks than the first are not shown
        try:
            self._seconds = store.save(
                self.engine, self.folder, self.ranks,
                keep=keep, state=state, complete=make_dense if dense else None, **about,
            )  # fmt: skip
            self._succeed(step)
        except (OSError, comm.FailedElsewhere) as error:
            if isinstance(error, OSError) and not final:
                logger.error("%s", error)
            self._fail(step, error, final)
        if final:
            self.drop_copies()

    def copy(self, step: int, state: dict[str, Any]) -> None:
        """Keep a copy of a checkpoint in memory, unless the save before is still being written.

        Args:
            step: the number of steps that the run has taken.
            state: what the training loop needs to continue from it.
        """
        self.finish(wait=False)
        background = self._background
        if background is None or background.copies is None:
            return
        if background.pending:
            if not self._skips:
                logger.info(
                    "the copy of step %d in memory is skipped, because the previous save is still being written "
                    "(later skipped copies are not logged)", step,
                )  # fmt: skip
            self._skips = True
            return
        about = store.describe(self.engine, self.ranks, step=step, **self.about)
        try:
            self._seconds = background.keep(
                lambda snapshot, draft: store.copy(self.engine, snapshot, draft, {**state, "step": step}),
                step=step, about=about, dense=self._saves_dense,
            )  # fmt: skip
        except (OSError, comm.FailedElsewhere) as error:  # on all ranks
            if isinstance(error, OSError):
                logger.error("no copy of step %d in memory: %s", step, error)

    @property
    def _saves_dense(self) -> bool:
        """Whether checkpoints of compact storage are turned into the dense form."""
        return self.training.checkpoint_form == "dense" and zero_shards.is_compact(self.engine.module)

    @property
    def newest_copy(self) -> str | None:
        """The tag of the newest copy in memory that all ranks have; None if there is none."""
        return None if self._copies is None else self._copies.newest

    @property
    def _copies(self) -> KeptCopies | None:
        return None if self._background is None else self._background.copies

    def finish(self, wait: bool = True) -> None:
        """Wait for the latest save, if it is still being written and `wait` says so."""
        if self._background is None or (saved := self._background.finish(wait)) is None:
            return
        if saved.error is None:
            self._succeed(saved.step)
        else:
            error = OSError(saved.error) if self.ranks.first else comm.FailedElsewhere(1)
            self._fail(saved.step, error, final=False)

    def take_seconds(self) -> float | None:
        """Return how long training waited for the latest save; None if there was none since the last call."""
        seconds, self._seconds = self._seconds, None
        return seconds

    def drop_copies(self) -> None:
        """Remove all copies in memory, on all ranks together, because the run must or need not continue from them."""
        if self._copies is not None:
            self._copies.newest = None
            self._memory.clear()

    def close(self) -> None:
        """End the process that writes in the background."""
        if self._background is not None:
            self._background.close()

    def abandon(self) -> None:
        """Let a save in progress end; whether it fails no longer matters."""
        if self._background is not None:
            self._background.finish()

    def _succeed(self, step: int) -> None:
        self._in_a_row = 0
        if self._copies is not None:
            self._copies.newest = None  # older than the checkpoint: the next copy replaces it
        self._saved(step)

    def _fail(self, step: int, error: Exception, final: bool) -> None:
        self._in_a_row += 1
        if final:
            raise error
        if self.ranks.first:
            logger.error(
                "step %d was not saved (failed saves in a row: %d): the run continues and will try again",
                step, self._in_a_row,
            )  # fmt: skip
        self._failed(step, str(error) if isinstance(error, OSError) else "elsewhere")


class _Memory(HostMemory):
    """The copies in memory that this host has of a run."""

    def clear(self) -> None:
        """Remove them, on all ranks together."""
        self._ranks.any(False)  # none is being written or read
        if self.is_first_of_host:
            memory_copies.clear(self._folder)
        self._ranks.any(False)

    def begin(self, start: int, began: str, every: int, newest: str | None) -> KeptCopies | None:
        """Prepare for copies of a start, on all ranks together; return None if that fails, which is logged."""
        try:
            self._ranks.agree(lambda: memory_copies.make_folder(self._folder))
            several = len(set(self._hosts)) > 1
            ring = Ring(self._ranks, self._hosts) if several else None
            copies = KeptCopies(self._folder, start, began, ring, newest)
            logger.info(
                "every %d steps, each host keeps a copy of a checkpoint in %s%s", every, self._folder,
                ", and one of the previous host's" if several else "",
            )  # fmt: skip
            return copies
        except (OSError, comm.FailedElsewhere) as error:
            if isinstance(error, OSError):
                logger.error("no copies in memory (training.memory_every): %s", error)
            return None


def _background_saves(engine: Any, ranks: Ranks, training: TrainingConfig) -> BackgroundSaves | None:
    """Return what saves while training continues; None if saves are to block."""
    if not training.async_save:
        return None
    if (why := zero_shards.blocking_reason(engine)) is not None:
        logger.info("training waits for each checkpoint to be written: %s", why)
        if training.memory_every:
            logger.warning("training.memory_every has no effect: copies in memory need saves that do not block")
        return None
    return BackgroundSaves(ranks)
