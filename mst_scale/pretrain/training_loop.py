"""Runs the training loop: optimizer steps, logging, evaluation and checkpoints.

Each step is a pure function of (weights, optimizer state, seed, step): batches, learning rate, dropout and topology
depend on the number of the step, never on the state of a generator. This is why a killed run resumes bit for bit.
"""

from __future__ import annotations

import argparse
import functools
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from mst_scale import comm, zero_shards
from mst_scale.checkpoints import store
from mst_scale.checkpoints.background import WITHOUT_COPY, BackgroundSaves
from mst_scale.checkpoints.dense_form import make_dense
from mst_scale.comm import ParallelDims, Ranks, Verdict, logger
from mst_scale.comm.launch import free_port
from mst_scale.comm.start_again import StartAgain
from mst_scale.comm.stragglers import Stragglers
from mst_scale.config import Experiment
from mst_scale.config.check import peak_learning_rate
from mst_scale.config.parallel import sizes_of
from mst_scale.data.sampler import Sampler
from mst_scale.dead_units import format_counts
from mst_scale.engine.targets import choose_targets
from mst_scale.errors import DivergedError
from mst_scale.flops.budgets import shortened
from mst_scale.flops.ledger import uncounted_flops
from mst_scale.pretrain import resume, storage
from mst_scale.pretrain.batches import Share, Spikes, batch_number, functions_for
from mst_scale.pretrain.prepare import Prepared, load_checkpoint, prepare
from mst_scale.pretrain.schedules import describe_extension, learning_rate, set_groups
from mst_scale.randomness import counter_hash
from mst_scale.run_logging.observer import Observer
from mst_scale.run_logging.operations import Operations, command_of
from mst_scale.run_logging.progress import Starting, kind_of
from mst_scale.run_logging.record import Record, compare_with_baseline, state_of
from mst_scale.run_logging.run_file import DIVERGED, FINISHED, PAUSED, STOPPED, STORAGE

MARGIN = 0.05  # deviation from the target sparsity that rounding to whole weights, or blocks, cannot explain


class StopRequest:
    """Records whether this process has received SIGTERM or SIGUSR1, which ask the run to save and stop."""

    def __init__(self) -> None:
        self.asked = False
        for name in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(name, self._ask)

    def _ask(self, signum: int, frame: Any) -> None:
        self.asked = True


class Run:
    """One experiment on all ranks, from its first step or a checkpoint to its last step.

    Args:
        prepared: the run as `prepare` returns it.
        stop: asks the run to save and stop; None if nothing does.
        stop_at: the step after which the run saves and stops before its end, or None.
        health: the file of the option --health.
        command: the words of the option --on-event.
    """

    def __init__(
        self, prepared: Prepared, stop: StopRequest | None = None, stop_at: int | None = None,
        health: Path | None = None, command: list[str] | None = None,
    ):  # fmt: skip
        self.experiment, self.out, self.ranks = prepared.experiment, prepared.out, prepared.ranks
        self.batch, self.micro, self.accumulation = prepared.batch, prepared.micro, prepared.accumulation
        self.train, self.val, self.tasks = prepared.train, prepared.val, prepared.tasks
        self.engine, self.ledger, self.run_file = prepared.engine, prepared.ledger, prepared.run_file
        self.rollbacks, self.mesh = prepared.rollbacks, prepared.mesh
        self.stretches, self.stretch = prepared.stretches, prepared.stretch
        self.share = Share.of(self.ranks, self.mesh)
        self.update, self.losses = functions_for(self.engine)
        self.training = self.experiment.training
        self.peak = peak_learning_rate(self.experiment.deepspeed)
        self.checkpoints = self.out / "checkpoints"
        self.device = next(self.engine.module.parameters()).device
        self.stop, self.stop_at = stop, stop_at
        self.nonfinite = self.failed_saves = 0
        self.saves = self._background_saves()
        self.save_seconds: float | None = None  # of a save since the last row of the metrics
        self.step = prepared.progress.step
        self.spikes = Spikes(self.training.spike, prepared.progress.losses)
        self.skipped = list(prepared.progress.skipped)  # batches left out by rollbacks
        self.votes = comm.Votes(self.ranks)
        self.stragglers = Stragglers(self.ranks, self.engine.module)
        self.observer = Observer(
            self.engine, self.experiment, self.out, self.ranks, self.step,
            choose_targets=lambda: choose_targets(self.engine.module, self.experiment.mst.targets),
        )  # fmt: skip
        self.record = Record(
            self.out,
            self.training.steps,
            batch=self.batch,
            step=self.step,
            tokens=self._tokens(),
            monitor=self.engine.monitor,
            first=self.ranks.first,
            layers=prepared.progress.layers,
        )

        self.operations: Operations | None = None
        if self.run_file is not None:
            file = self.run_file
            self.operations = Operations(
                self.out, self.training.steps, restarts=len(file.starts) - 1, events=file.events, health=health,
                command=command,
            )  # fmt: skip
            self.operations.event("started", step=self.step)

    def _background_saves(self) -> BackgroundSaves | None:
        """Return what saves while training continues; None if saves are to block."""
        if not self.training.async_save:
            return None
        if (why := zero_shards.why_blocking(self.engine)) is not None:
            logger.info("training waits for each checkpoint to be written: %s", why)
            return None
        return BackgroundSaves(self.ranks)

    def _record_event(self, what: str, **more: Any) -> None:
        """Add an event to run.json, and tell operators of it."""
        if self.run_file is not None and self.operations is not None:
            self.run_file.happened(what, **more)
            self.operations.event(what, **more)

    def record_end(self, how: str) -> None:
        """Record in run.json how this start ends, and tell operators of it."""
        if self.run_file is not None and self.operations is not None:
            self.run_file.ended(how, self.step)
            self.operations.event(how, how, step=self.step)

    # --- the loop ---

    def to_the_end(self) -> None:
        """Train all remaining steps."""
        while self.step < self.training.steps:
            self.advance()
        self.record.close()
        self._warn_if_sparser()

    def _warn_if_sparser(self) -> None:
        """Warn if masks remain because updates were skipped: a topology step waits for an update that is not."""
        mst = self.engine.mst
        found, target = mst.sparsity, mst.point.sparsity
        if self.ranks.first and found > target + MARGIN:
            logger.warning(
                "the run ends with a sparsity of %.0f %% instead of the scheduled %.0f %%, because %d of %d updates "
                "were skipped for gradients that were not finite: lower the learning rate, or clip gradients",
                100 * found, 100 * target, self.engine.skipped_steps, self.step,
            )  # fmt: skip

    def advance(self) -> None:
        """Take one optimizer step, and log metrics, evaluate or save a checkpoint if that is due.

        Raises:
            SystemExit: if the run was asked to stop; its checkpoint is saved.
            DivergedError: if the loss has not been finite for too many steps.
        """
        t = self.training
        mst = self.engine.mst
        densities = mst.densities()  # of the masks of this step
        self.ledger.add(mst.pattern, densities, mst.gradient_densities())
        kind, began = kind_of(mst, densities), time.monotonic()
        loss = self._update()
        self.step += 1
        self.record.gather(mst)
        self.record.times.add(kind, time.monotonic() - began, moved=mst.changed_at == mst.step)
        if revived := mst.revived:
            self._record_event("woke dead units", step=self.step, units=format_counts(revived))
        last = self.step == t.steps
        logs, evaluates, saves = (
            last or bool(every and self.step % every == 0) for every in (t.log_every, t.eval_every, t.save_every)
        )
        # reading the loss waits for the device, but DeepSpeed's gradient norm has already done so
        asked = self.stop is not None and self.stop.asked
        verdicts = self.votes.cast(self.step, asked, float(loss), wait=logs or evaluates or saves)
        self._name_straggler()
        for verdict in verdicts:
            if (bad := self._find_step_to_undo(verdict)) is not None and self._roll_back(bad):
                return
        stop = any(verdict.stop for verdict in verdicts)
        if logs or evaluates:
            self._log(loss, evaluates)
        self.observer.after(self.step, self.step * self.batch)
        changes = not last and self._storage_changes()
        pauses = not last and self.pauses and not self.nonfinite
        if (saves or stop or changes or pauses) and not self.nonfinite:
            self.record.close()
            self._save(final=stop or last or changes or pauses, universal=changes)
        if self.nonfinite and (stop or last or changes):
            self._raise_if_nonfinite()
        if stop and not last:
            self.record_end(STOPPED)
            if self.ranks.first:
                comm.tell_launcher("MST_STOPPED")
            self.record.say(f"asked to stop: step {self.step} is saved; run the same command again to continue")
            raise SystemExit(0)
        if pauses:
            self.pause()
        if changes:
            self._start_again()

    def _name_straggler(self) -> None:
        """Report a rank that is much slower than the others, if there is one."""
        self.stragglers.stepped()
        if (slow := self.stragglers.look()) is None or not self.ranks.first:
            return
        logger.warning(
            "rank %d (%s) is slow: it computes %.2f s per step where the others compute %.2f s and wait for it",
            *slow,
        )  # fmt: skip
        self._record_event("straggler", step=self.step, **slow._asdict())

    @property
    def pauses(self) -> bool:
        """Whether the run has come to the step at which it is to stop."""
        return self.stop_at is not None and self.step >= self.stop_at

    def pause(self) -> NoReturn:
        """End this start, whose last step is saved."""
        self.record_end(PAUSED)
        self.record.say(f"step {self.step} is saved, and the run stops here (--stop-at {self.stop_at})")
        self.ranks.leave()
        raise SystemExit(0)

    def _storage_changes(self) -> bool:
        """Return whether the next step is trained with another storage than this engine's.

        A dense engine continues while the loss is not finite; a compact one cannot.
        """
        found = storage.stretch_after(self.stretches, self.step, self.engine.mst.state.settled)
        return found != self.stretch and (found is None or not self.nonfinite)

    def _start_again(self) -> NoReturn:
        """Continue in new processes, from the checkpoint that has just been saved."""
        self.record_end(STORAGE)
        self.record.say(f"step {self.step} is saved; the storage of weights changes, and the processes start again")
        port = self.ranks.on_first(free_port)
        self.ranks.leave()
        raise StartAgain(port)

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
        self.record.say(f"step {verdict.step}: the loss is {verdict.loss:.4f}, a spike (above {threshold:.4f})")
        self._record_event("spike", step=verdict.step, loss=verdict.loss, bound=threshold)
        return verdict.step if rolls and self.rollbacks < spike.max_rollbacks else None

    def _roll_back(self, bad: int) -> bool:
        """Roll back to the latest complete checkpoint before step `bad`, and skip the batch that this step read.

        Returns:
            Whether there was such a checkpoint.
        """
        self.votes.drain()  # the vote of a step that is undone, too
        self._finish_save()
        tag = store.newest(self.checkpoints, self.ranks, before=bad)
        if tag is not None and not self._stores_alike(self.checkpoints / tag):
            tag = None
        if tag is None:
            if self.nonfinite:
                self._raise_if_nonfinite()
            self.record.say(f"there is no checkpoint before step {bad} to roll back to: the run continues")
            return False
        number, here = batch_number(bad - 1, self.skipped), self.step
        compact = bool(zero_shards.indexes_of(self.engine.module))
        loadable = resume.find_loadable(self.checkpoints / tag, self.ranks, self.experiment.deepspeed, compact)
        progress = load_checkpoint(self.engine, self.ledger, self.out, self.ranks, loadable)
        self.step, self.record.layers = progress.step, progress.layers
        self.spikes = Spikes(self.training.spike, progress.losses)
        self.skipped = sorted({*self.skipped, *progress.skipped})
        self.ranks.on_first(lambda: store.set_aside(self.checkpoints, self.step))
        first = max(batch_number(self.step, self.skipped), number - self.training.spike.skip + 1)
        left_out = list(range(first, number + 1))
        self.skipped = sorted({*self.skipped, *left_out})
        self.rollbacks += 1
        self.nonfinite = 0
        self._record_event("rolled back", from_step=here, to_step=self.step, skipped=left_out)
        self.record.rewind(self.step, self._tokens())
        self.observer.rewind(self.step)
        self.record.say(f"rolled back to step {self.step}; skipped: batch {', '.join(map(str, left_out))}")
        return True

    def _stores_alike(self, checkpoint: Path) -> bool:
        """Return whether the run continues from a checkpoint with the storage of this engine."""
        return self.ranks.on_first(lambda: storage.stretch_of(self.stretches, checkpoint)) == self.stretch

    def _log(self, loss: torch.Tensor, evaluates: bool) -> None:
        row = {
            "step": self.step,
            "loss": self._mean(loss),
            "lr": learning_rate(self.step - 1, self.peak, self.training),
            "grad_norm": zero_shards.grad_norm(self.engine),
            **state_of(self.engine.mst),
            **self.ledger.row(),
            **self.record.pace(self.step, self._tokens()),
        }
        if self.save_seconds is not None:
            row["save_s"], self.save_seconds = self.save_seconds, None
        if evaluates:
            row["val_loss"] = self.evaluate()
            row |= {} if self.tasks is None else self.tasks.at(self.engine, self.step)
        self.record.write(row)
        if self.operations is not None:
            self.operations.row(row)

    def _tokens(self) -> int:
        return self.ledger.seen * self.experiment.model.seq_length

    def _mean(self, loss: torch.Tensor) -> float:
        mean = loss.double().cpu()
        dist.all_reduce(mean, group=self.ranks.control)
        return float(mean) / self.ranks.world_size

    def _update(self) -> torch.Tensor:
        """Take one optimizer step on the global batch; return this rank's mean loss, on the device."""
        set_groups(self.engine.optimizer.param_groups, self.step, self.peak, self.experiment)
        return self.update(self.engine, self._micro_batches(batch_number(self.step, self.skipped)), self.accumulation)

    def _micro_batches(self, number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield this rank's micro-batches of a global batch."""
        for turn in range(self.accumulation):
            micro_batch, began = self.share.micro_batch(turn), time.perf_counter()
            tokens, targets = self._micro_batch(self.train, number, micro_batch)
            self.stragglers.fetched(time.perf_counter() - began)
            if self.experiment.model.dropout:
                torch.manual_seed(counter_hash(self.training.seed, "dropout", self.step, micro_batch))
            yield tokens, targets

    def _micro_batch(self, sampler: Sampler, step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        whole = sampler.batch(step, range(index * self.micro, (index + 1) * self.micro))
        tokens, targets = (self.share.cut(each) for each in whole)
        if self.device.type == "cuda":  # a copy from pageable memory may wait for all queued work of the device
            tokens, targets = tokens.pin_memory(), targets.pin_memory()
        return tokens.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean validation loss over a fixed set of sequences, on any number of ranks.

        Micro-batches are assigned in turn. A rank that has none left repeats the last one, because under ZeRO-3 every
        forward pass is a collective.
        """
        count = -(-self.training.eval_sequences // self.micro)
        mine = [self.share.micro_batch(turn) for turn in range(-(-count // self.share.replicas))]
        micro_batches = (self._micro_batch(self.val, 0, min(index, count - 1)) for index in mine)
        losses = torch.zeros(count, dtype=torch.float64)
        # only the last stage of a pipeline has losses
        for index, loss in zip(mine, self.losses(self.engine, micro_batches, len(mine)), strict=False):
            if index < count and self.share.counts:
                losses[index] = loss / self.share.parts
        # each entry is nonzero on one rank, or on those that share a sequence in equal parts
        dist.all_reduce(losses, group=self.ranks.control)
        return float(losses.mean())

    def _raise_if_nonfinite(self) -> None:
        if self.nonfinite:
            rate = learning_rate(self.step - 1, self.peak, self.training)
            message = (
                f"the loss was not finite in {self.nonfinite} consecutive steps up to step {self.step} (learning rate "
                f"{rate:.3g}); the checkpoints in {self.checkpoints} are older: lower the learning rate or check the "
                "data, then resume"
            )
            raise DivergedError(message)

    def end_diverged(self, error: DivergedError) -> NoReturn:
        """End the run on all ranks, each of which has raised the same error.

        If a launcher has restarted the run and it diverges at the same step as the previous start, run.json records
        that, and the launcher does not restart it again.
        """
        if self.saves is not None:
            self.saves.finish()
        if self.run_file is not None:
            before = self.run_file.starts[-2] if len(self.run_file.starts) > 1 else {}
            again = resume.is_restart() and before.get("how") in DIVERGED and before.get("last_step") == self.step
            self.record_end(DIVERGED[again])
            if again:
                error = DivergedError(
                    f"{error}. The previous start diverged at the same step: restarting does not help"
                )
        self.ranks.fail(error)

    def _save(self, final: bool, universal: bool = False) -> None:
        """Save a checkpoint. If that fails before the end, the run continues and tries again when the next is due.

        Args:
            final: whether the run cannot continue without it. Then it is written here and not in the background,
                because the run would wait for it anyway.
            universal: whether an engine with the other storage loads it next.
        """
        self._finish_save()
        state = {
            **self.ledger.state(),
            "losses": list(self.spikes.losses),
            "skipped": self.skipped,
            "layers": self.record.layers,
        }
        keep = self.training.keep_checkpoints
        compact = bool(zero_shards.indexes_of(self.engine.module))
        dense = universal or (compact and self.training.checkpoint_form == "dense")
        about: Any = {
            "step": self.step,
            "batch": self.batch,
            "micro": self.micro,
            "optimizer": zero_shards.adam_of(self.engine),
            "sizes": ParallelDims() if self.mesh is None else self.mesh.sizes,
        }
        if self.saves is not None and not final:
            try:
                self.save_seconds = self.saves.start(
                    lambda snapshot, draft: store.copy(self.engine, snapshot, draft, {**state, "step": self.step}),
                    self.checkpoints / store.tag_of(self.step),
                    step=self.step, about=store.describe(self.engine, self.ranks, **about), dense=dense, keep=keep,
                )  # fmt: skip
                return
            except (OSError, comm.FailedElsewhere) as error:
                if isinstance(error, OSError):
                    logger.warning("%s %s", error, WITHOUT_COPY)
        try:
            self.save_seconds = store.save(
                self.engine, self.checkpoints, self.ranks,
                keep=keep, state=state, complete=make_dense if dense else None, **about,
            )  # fmt: skip
            self._saved(self.step)
        except (OSError, comm.FailedElsewhere) as error:
            if isinstance(error, OSError) and not final:
                logger.error("%s", error)
            self._save_failed(self.step, error, final)

    def _finish_save(self) -> None:
        """Wait for the save before this one, if it is still being written."""
        if self.saves is None or (saved := self.saves.finish()) is None:
            return
        if saved.error is None:
            self._saved(saved.step)
        else:
            error = OSError(saved.error) if self.ranks.first else comm.FailedElsewhere(1)
            self._save_failed(saved.step, error, final=False)

    def _saved(self, step: int) -> None:
        self.failed_saves = 0
        if self.operations is not None:
            self.operations.saved(step)

    def _save_failed(self, step: int, error: Exception, final: bool) -> None:
        self.failed_saves += 1
        if final:
            raise error
        if self.ranks.first:
            logger.error(
                "step %d was not saved (failed saves in a row: %d): the run continues and will try again",
                step, self.failed_saves,
            )  # fmt: skip
        self._record_event("failed save", step=step, why=str(error) if isinstance(error, OSError) else "elsewhere")


def train(args: argparse.Namespace, experiment: Experiment, out: Path, ranks: Ranks, starting: Starting) -> None:
    """Train an experiment to its last step, and print the summary table.

    Args:
        args: the options, of which --resume and --branch-decay-from are used here.
        experiment: what to train.
        out: the folder of the run.
        ranks: all ranks, which call this together.
        starting: the progress line of the start.

    Raises:
        SystemExit: if the run was asked to stop.
    """
    stop = StopRequest()
    sizes = ranks.agree(lambda: sizes_of(experiment.deepspeed))
    replicas = resume.initial_replicas(out, ranks, sizes)
    fitted = ranks.agree(lambda: shortened(experiment, replicas))
    prepared = prepare(fitted, out, ranks, args.resume, args.branch_decay_from, begins=starting.begins)
    run = Run(prepared, stop, args.stop_at, args.health, command_of(args.on_event))
    begun, first = time.monotonic(), run.step
    try:
        if run.pauses and first < run.training.steps:
            run.pause()
        if first < run.training.steps:
            starting.begins("first step")
            run.advance()
            starting.done()
        elif ranks.first:
            run.record.say(f"{out} is finished, at step {first:,}; {describe_extension(out, run.experiment)}")
        run.to_the_end()
    except DivergedError as error:
        run.end_diverged(error)
    finally:
        if run.saves is not None:
            run.saves.close()
    if run.run_file is not None:
        run.record_end(FINISHED)
        more = uncounted_flops(run.experiment, run.step * run.batch)
        corpora = [start.get("corpus") for start in run.run_file.starts]
        compare = functools.partial(
            compare_with_baseline,
            run.training.baseline,
            more=more,
            corpora=corpora,
            eval_sequences=run.training.eval_sequences,
        )
        run.record.say(run.record.summary(run.step, time.monotonic() - begun, first, compare))
    ranks.leave()
