"""Saves the checkpoints of a run, now or in the background, and decides what a failed save means.

A save that fails in the middle of a run is reported and tried again when the next one is due, however often that
happens: what the run has learned since is only in its memory. One without which the run cannot continue ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mst_scale import comm, zero_shards
from mst_scale.checkpoints import store
from mst_scale.checkpoints.background import WITHOUT_COPY, BackgroundSaves
from mst_scale.checkpoints.dense_form import make_dense
from mst_scale.comm import ParallelDims, Ranks, logger
from mst_scale.config import TrainingConfig
from mst_scale.pretrain.prepare import Prepared


class Saves:
    """The checkpoints that one start of a run writes.

    Args:
        prepared: the run as `prepare` returns it.
        saved: called with the step of each complete checkpoint.
        failed: called with the step of a save that failed, and the reason.
    """

    def __init__(self, prepared: Prepared, saved: Callable[[int], None], failed: Callable[[int, str], None]):
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
        self._background = _background_saves(self.engine, self.ranks, self.training)

    def save(self, step: int, state: dict[str, Any], final: bool, universal: bool = False) -> None:
        """Save a checkpoint.

        Args:
            step: the number of steps that the run has taken.
            state: what the training loop needs to continue from it.
            final: whether the run cannot continue without it. Then it is written here and not in the background,
                because the run would wait for it anyway.
            universal: whether an engine with the other storage loads it next.
        """
        self.finish()
        compact = zero_shards.is_compact(self.engine.module)
        dense = universal or (compact and self.training.checkpoint_form == "dense")
        about, keep = {"step": step, **self.about}, self.training.keep_checkpoints
        if self._background is not None and not final:
            try:
                self._seconds = self._background.start(
                    lambda snapshot, draft: store.copy(self.engine, snapshot, draft, {**state, "step": step}),
                    self.folder / store.tag_of(step),
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

    def finish(self) -> None:
        """Wait for the latest save, if it is still being written."""
        if self._background is None or (saved := self._background.finish()) is None:
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


def _background_saves(engine: Any, ranks: Ranks, training: TrainingConfig) -> BackgroundSaves | None:
    """Return what saves while training continues; None if saves are to block."""
    if not training.async_save:
        return None
    if (why := zero_shards.why_blocking(engine)) is not None:
        logger.info("training waits for each checkpoint to be written: %s", why)
        return None
    return BackgroundSaves(ranks)
