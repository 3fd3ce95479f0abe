"""Runs the training loop: optimizer steps, logging, evaluation and checkpoints.

Each step is a pure function of (weights, optimizer state, seed, step): batches, learning rate, dropout and topology
depend on the number of the step, never on the state of a generator. This is why a killed run resumes bit for bit.
"""

from __future__ import annotations

import signal
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from mst_scale import comm, zero_shards
from mst_scale.checkpoints import finding, store
from mst_scale.comm import Verdict, logger
from mst_scale.config import TrainingConfig
from mst_scale.config.deepspeed import peak_learning_rate
from mst_scale.dead_units import format_counts
from mst_scale.engine.targets import choose_targets
from mst_scale.errors import CorruptedError, DivergedError
from mst_scale.pretrain import elastic, resume, storage
from mst_scale.pretrain.batches import MicroBatches
from mst_scale.pretrain.learning_rate import learning_rate, set_groups
from mst_scale.pretrain.prepare import Prepared, load_checkpoint
from mst_scale.pretrain.saving import Saves
from mst_scale.pretrain.spikes import Spikes, batch_number
from mst_scale.run_logging.observer import Observer
from mst_scale.run_logging.operations import Operations
from mst_scale.run_logging.progress import kind_of
from mst_scale.run_logging.record import Record, state_of
from mst_scale.run_logging.run_file import CORRUPTED, DIVERGED, PAUSED, STOPPED, STORAGE
from mst_scale.verification import Verification

MARGIN = 0.05  # deviation from the target sparsity that rounding to whole weights, or blocks, cannot explain


class StopRequest:
    """Records whether this process has received SIGTERM, SIGUSR1 or SIGINT, which ask the run to save and stop.

    A second SIGINT (Ctrl-C) ends it at once.
    """

    def __init__(self) -> None:
        self.asked = False
        for name in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(name, self._ask)

    def _ask(self, signum: int, frame: Any) -> None:
        if signum == signal.SIGINT and self.asked:
            raise KeyboardInterrupt
        self.asked = True


class StorageChanges(Exception):
    """Raised on all ranks where another engine continues the run."""


@dataclass(frozen=True)
class Due:
    """What is to be done after a step. All of it is after the last one."""

    last: bool
    logs: bool
    evaluates: bool
    saves: bool
    copies: bool
    """Whether a copy stays in memory, unless a checkpoint is saved."""

    @classmethod
    def after(cls, step: int, training: TrainingConfig) -> Due:
        """Return what is due after this many steps."""
        last = step == training.steps
        intervals = (training.log_every, training.eval_every, training.save_every, training.memory_every)
        return cls(last, *(last or (every > 0 and step % every == 0) for every in intervals))

    @property
    def anything(self) -> bool:
        """Whether anything is due."""
        return self.logs or self.evaluates or self.saves or self.copies


@dataclass(frozen=True)
class Left:
    """The state that an engine hands to the next one."""

    module: weakref.ref[Any]
    """The model, which is to be freed."""
    handover: zero_shards.Handover
    newest_copy: str | None
    """The newest copy in memory."""
    verified: int
    """The last step that was verified."""
    began: float
    """When the record began, so that times in the metrics include changes of storage."""


class Run:
    """One experiment on all ranks, from its first step or a checkpoint to its last step.

    Args:
        prepared: the run as `prepare` returns it.
        stop: asks the run to save and stop; None if nothing does.
        stop_at: the step after which the run saves and stops before its end, or None.
        health: the file of the option --health.
        command: the words of the option --on-event.
        left: what the previous engine of this process has left; None if this is the first one.
    """

    def __init__(
        self, prepared: Prepared, stop: StopRequest | None = None, *, stop_at: int | None = None,
        health: Path | None = None, command: list[str] | None = None, left: Left | None = None,
    ):  # fmt: skip
        self.experiment, self.out, self.ranks = prepared.experiment, prepared.out, prepared.ranks
        self.batch, self.tasks = prepared.batch, prepared.tasks
        self.engine, self.ledger, self.run_file = prepared.engine, prepared.ledger, prepared.run_file
        self.rollbacks = prepared.rollbacks
        self.stretches, self.stretch = prepared.stretches, prepared.stretch
        self.training = self.experiment.training
        self.peak = peak_learning_rate(self.experiment.deepspeed)
        self.micro_batches = MicroBatches(prepared)
        self.stop, self.stop_at = stop, stop_at
        self.nonfinite = 0
        self.step = prepared.progress.step
        self.spikes = Spikes(self.training.spike, prepared.progress.losses, prepared.progress.in_spike)
        self.skipped = list(prepared.progress.skipped)  # batches left out by rollbacks
        self.votes = comm.Votes(self.ranks)
        self.observer = Observer(
            self.engine, self.experiment, self.out, self.ranks, self.step,
            choose_targets=lambda: choose_targets(self.engine.module, self.experiment.mst.targets),
        )  # fmt: skip
        self.record = Record(
            self.out, self.training.steps, batch=self.batch, step=self.step, tokens=self.tokens,
            monitor=self.engine.monitor, first=self.ranks.first, layers=prepared.progress.layers,
            began=None if left is None else left.began,
        )  # fmt: skip
        self.operations: Operations | None = None
        if self.run_file is not None:
            file = self.run_file
            self.operations = Operations(
                self.out, self.training.steps, restarts=file.restarts, events=file.events, health=health,
                command=command,
            )  # fmt: skip
            self.operations.event("started", step=self.step)
        newest_copy, verified = (None, None) if left is None else (left.newest_copy, left.verified)
        self.saves = Saves(
            prepared, self._saved, lambda step, why: self.record_event("failed save", step=step, why=why), newest_copy
        )
        self.verification = Verification(self.engine, self.ranks, self.training.verify_every, verified)

    def record_event(self, what: str, **more: Any) -> None:
        """Add an event to run.json, and tell operators of it."""
        if self.run_file is not None and self.operations is not None:
            self.run_file.happened(what, **more)
            self.operations.event(what, **more)

    def _saved(self, step: int) -> None:
        if self.operations is not None:
            self.operations.saved(step)

    def record_end(self, how: str) -> None:
        """Record in run.json how this start ends, and tell operators of it."""
        if self.run_file is not None and self.operations is not None:
            self.run_file.ended(how, self.step)
            self.operations.event(how, how, step=self.step)
            if how != STORAGE:
                self.operations.finish()

    # --- the loop ---

    def to_the_end(self) -> None:
        """Train all remaining steps."""
        while self.step < self.training.steps:
            self.advance()
        self.verification.finish()
        self.record.close()
        self._warn_if_sparser()

    def _warn_if_sparser(self) -> None:
        """Warn if masks remain because updates were skipped: a topology step waits for an update that is not."""
        mst = self.engine.mst
        found, target = mst.sparsity, mst.point.sparsity
        if self.ranks.first and found > target + MARGIN:
            logger.warning(
                "the run ends with a sparsity of %.0f %% instead of the scheduled %.0f %%, because %d of %d updates "
                "were skipped because of non-finite gradients: lower the learning rate, or clip gradients",
                100 * found, 100 * target, self.engine.skipped_steps, self.step,
            )  # fmt: skip

    def advance(self) -> None:
        """Take one optimizer step, and log metrics, evaluate or save a checkpoint if that is due.

        Raises:
            SystemExit: if the run was asked to stop; its checkpoint is saved.
            DivergedError: if the loss has not been finite for too many steps.
            CorruptedError: if a verification has found that a rank computed or kept a wrong value.
        """
        loss = self._update()
        due = Due.after(self.step, self.training)
        verdicts = self._vote(loss, due)
        self._name_straggler()
        for verdict in verdicts:
            if (bad := self._find_step_to_undo(verdict)) is not None and self._roll_back(bad):
                return
        if due.logs or due.evaluates:
            self._log(loss, due.evaluates)
        self.observer.after(self.step, self.step * self.batch)
        # asked to stop, a run whose loss is not finite waits for a step that it can save
        stops = any(verdict.stop for verdict in verdicts) and (due.last or not self.nonfinite)
        changes = not due.last and self._storage_changes(finite=not self.nonfinite)
        pauses = not due.last and self.pauses and not self.nonfinite
        if self.nonfinite:
            if due.last or changes:
                self._raise_if_nonfinite()
        elif stops or pauses or (due.saves and not changes):
            self.record.close()
            self.saves.save(self.step, self._state(), final=stops or due.last or pauses)
        elif due.copies:
            self.saves.copy(self.step, self._state())
        if stops and not due.last:
            self._end_stopped()
        if pauses:
            self.pause()
        if changes:
            self.verification.finish()
            raise StorageChanges

    def _update(self) -> torch.Tensor:
        """Take one optimizer step, and return its loss on the device."""
        mst = self.engine.mst
        densities = mst.densities()  # of the masks of this step
        self.ledger.add(mst.pattern, densities, mst.gradient_densities())
        kind, began = kind_of(mst, densities), time.monotonic()
        set_groups(self.engine.optimizer.param_groups, self.step, self.peak, self.experiment)
        loss = self.micro_batches.update(self.step, batch_number(self.step, self.skipped))
        self.step += 1
        self.record.gather(mst)
        self.record.times.add(kind, time.monotonic() - began, moved=mst.changed_at == mst.step)
        if revived := mst.revived:
            self.record_event("revived dead units", step=self.step, units=format_counts(revived))
        return loss

    def _vote(self, loss: torch.Tensor, due: Due) -> list[Verdict]:
        """Tell the other ranks this step's loss and whether this one was asked to stop; return what is known by now."""
        ends = not due.last and (self.pauses or self._storage_changes(finite=True))
        asked = self.stop is not None and self.stop.asked
        # reading the loss waits for the device, but DeepSpeed's gradient norm has already done so
        verdicts = self.votes.cast(self.step, asked, float(loss), wait=due.anything or ends)
        if any(verdict.stop for verdict in verdicts):
            verdicts += self.votes.drain()  # what is saved includes this step's loss
        return verdicts

    def _end_stopped(self) -> NoReturn:
        """End this start, which was asked to stop and whose last step is saved."""
        self.record_end(STOPPED)
        if self.ranks.first:
            comm.notify_launcher("MST_STOPPED")
        self.record.print_message(f"asked to stop: step {self.step} is saved; run the same command again to continue")
        elastic.end_after_save(lambda: self.stop is None or self.stop.asked)

    def _name_straggler(self) -> None:
        """Report a rank that is much slower than the others, if there is one."""
        self.micro_batches.stragglers.stepped()
        slow = self.micro_batches.stragglers.look()
        if slow is None or not self.ranks.first:
            return
        logger.warning(
            "rank %d (%s) is slow: it computes %.2f s per step where the others compute %.2f s and wait for it",
            *slow,
        )  # fmt: skip
        self.record_event("straggler", step=self.step, **slow._asdict())

    @property
    def pauses(self) -> bool:
        """Whether the run has come to the step at which it is to stop."""
        return self.stop_at is not None and self.step >= self.stop_at

    def pause(self) -> NoReturn:
        """End this start, whose last step is saved."""
        self.record_end(PAUSED)
        self.record.print_message(f"step {self.step} is saved, and the run stops here (--stop-at {self.stop_at})")
        elastic.notify_waiting_ranks()
        self.ranks.leave()
        raise SystemExit(0)

    def _storage_changes(self, finite: bool) -> bool:
        """Return whether the next step is trained with another storage than this engine's.

        While the loss is not finite, a dense engine continues, which a compact one cannot.
        """
        found = storage.stretch_after(self.stretches, self.step, self.engine.mst.state.settled)
        return found != self.stretch and (found is None or finite)

    def hand_over(self) -> zero_shards.Handover:
        """Return what the next engine continues from, when the storage of weights changes (collective)."""
        self.record.close()
        self.saves.finish()
        about = store.describe(self.engine, self.ranks, step=self.step, **self.saves.about)
        state = {**self._state(), "step": self.step}
        handover = storage.hand_over(self.engine, self.saves.folder, self.ranks, state, about)
        self.record_end(STORAGE)
        self.record.print_message(f"step {self.step}: the storage of weights changes, and another engine continues")
        return handover

    def save_first(self, wait: bool) -> None:
        """Save the first checkpoint after a change of storage, or of a branch."""
        self.saves.save(self.step, self._state(), final=wait or self.pauses)

    def _find_step_to_undo(self, verdict: Verdict) -> int | None:
        """Return the step that a rollback must undo because of this loss, or None."""
        spike, rolls = self.training.spike, self.training.spike.action == "rollback"
        self.nonfinite = self.nonfinite + 1 if verdict.nonfinite else 0
        if self.nonfinite >= self.training.stop_after_nonfinite:
            if not rolls or self.rollbacks >= spike.max_rollbacks:
                self._raise_if_nonfinite()
            return verdict.step - self.nonfinite + 1
        threshold = self.spikes.threshold()
        if verdict.nonfinite or not self.spikes.begins(verdict.loss):
            return None
        self.record.print_message(
            f"step {verdict.step}: the loss is {verdict.loss:.4f}, a spike (above {threshold:.4f})"
        )
        self.record_event("spike", step=verdict.step, loss=verdict.loss, bound=threshold)
        return verdict.step if rolls and self.rollbacks < spike.max_rollbacks else None

    def _roll_back(self, bad: int) -> bool:
        """Roll back to the latest complete checkpoint before step `bad`, and skip the batch that this step read.

        Returns:
            Whether there was such a checkpoint.
        """
        later = self.votes.drain()  # of steps that are undone, too
        self.saves.finish()
        tag = finding.newest(self.saves.folder, self.ranks, before=bad)
        if tag is not None and not self._stores_alike(self.saves.folder / tag):
            tag = None
        if tag is None:
            if self.nonfinite:
                self._raise_if_nonfinite()
            self.record.print_message(f"there is no checkpoint before step {bad} to roll back to: the run continues")
            for verdict in later:
                self._find_step_to_undo(verdict)
            return False
        self.saves.drop_copies()
        number, here = batch_number(bad - 1, self.skipped), self.step
        compact = zero_shards.is_compact(self.engine.module)
        loadable = resume.find_loadable(self.saves.folder / tag, self.ranks, self.experiment.deepspeed, compact)
        progress = load_checkpoint(self.engine, self.ledger, self.out, self.ranks, loadable)
        self.verification.forget()
        self.step, self.record.layers = progress.step, progress.layers
        self.spikes = Spikes(self.training.spike, progress.losses, progress.in_spike)
        self.skipped = sorted({*self.skipped, *progress.skipped})
        self.ranks.on_first(lambda: store.set_aside(self.saves.folder, self.step))
        first = max(batch_number(self.step, self.skipped), number - self.training.spike.skip + 1)
        left_out = list(range(first, number + 1))
        self.skipped = sorted({*self.skipped, *left_out})
        self.rollbacks += 1
        self.nonfinite = 0
        self.record_event("rolled back", from_step=here, to_step=self.step, skipped=left_out)
        self.record.rewind(self.step, self.tokens)
        self.observer.rewind(self.step)
        self.record.print_message(f"rolled back to step {self.step}; skipped: batch {', '.join(map(str, left_out))}")
        return True

    def _stores_alike(self, checkpoint: Path) -> bool:
        """Return whether the run continues from a checkpoint with the storage of this engine."""
        return self.ranks.on_first(lambda: storage.stretch_of(self.stretches, checkpoint)) == self.stretch

    def _state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the loop."""
        return {
            **self.ledger.state(),
            "losses": list(self.spikes.losses),
            "in_spike": self.spikes.in_spike,
            "skipped": self.skipped,
            "layers": self.record.layers,
        }

    def _log(self, loss: torch.Tensor, evaluates: bool) -> None:
        row = {
            "step": self.step,
            "loss": self._mean(loss),
            "lr": learning_rate(self.step - 1, self.peak, self.training),
            "grad_norm": zero_shards.grad_norm(self.engine),
            **state_of(self.engine.mst),
            **self.ledger.row(),
            **self.record.pace(self.step, self.tokens),
        }
        if (seconds := self.saves.take_seconds()) is not None:
            row["save_s"] = seconds
        if evaluates:
            row["val_loss"] = self.micro_batches.validation_loss()
            row |= {} if self.tasks is None else self.tasks.at(self.engine, self.step)
        self.record.write(row)
        if self.operations is not None:
            self.operations.row(row)

    @property
    def tokens(self) -> int:
        """Tokens that the run has trained on."""
        return self.ledger.seen * self.experiment.model.seq_length

    def _mean(self, loss: torch.Tensor) -> float:
        mean = loss.double().cpu()
        dist.all_reduce(mean, group=self.ranks.control)
        return float(mean) / self.ranks.world_size

    def _raise_if_nonfinite(self) -> None:
        if self.nonfinite:
            rate = learning_rate(self.step - 1, self.peak, self.training)
            message = (
                f"the loss was not finite in {self.nonfinite} consecutive steps up to step {self.step} (learning rate "
                f"{rate:.3g}); the checkpoints in {self.saves.folder} are older: lower the learning rate or check the "
                "data, then resume"
            )
            raise DivergedError(message)

    def end_diverged(self, error: DivergedError) -> NoReturn:
        """End the run on all ranks, each of which has raised the same error.

        If a launcher has restarted the run and it diverges at the same step as the previous start, run.json records
        that, and the launcher does not restart it again.
        """
        self.saves.abandon()
        self.saves.drop_copies()
        if self.run_file is not None:
            before: dict[str, Any] = next(
                (one for one in self.run_file.starts[-2::-1] if one.get("how") != STORAGE), {}
            )
            again = resume.is_restart() and before.get("how") in DIVERGED and before.get("last_step") == self.step
            self.record_end(DIVERGED[again])
            if again:
                error = DivergedError(
                    f"{error}. The previous start diverged at the same step: restarting does not help"
                )
        self.ranks.fail(error)

    def end_corrupted(self, error: CorruptedError) -> NoReturn:
        """End the run on all ranks, each of which has raised the same error, and record what `resume` needs."""
        self.saves.abandon()
        self.record_event("corrupted", **error.details)
        self.record_end(CORRUPTED)
        self.ranks.fail(error)
