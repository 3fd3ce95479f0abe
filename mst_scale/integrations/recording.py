"""Records an engine that trains in a custom loop, so that `mst report` works for it.

    recording = mst_scale.record(engine, "runs/mine")        after initialize, on every rank
    …
    recording.log(val_loss=…)                                adds values of the loop to the row of the last step

`OUT/metrics.jsonl`, `run.json` and TensorBoard are those of `mst_scale.pretrain`. The loss is the one that is passed to
`backward`, and FLOPs are counted from the matrices of the model (`flops.any_model`). FLOPs and rows are saved with the
engine's checkpoints, so that a resumed run reads like one that was never stopped.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import socket
import time
import warnings
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mst_scale import zero_shards
from mst_scale.comm import logger
from mst_scale.comm.exchange import Exchange
from mst_scale.comm.parser import validate_new_folder
from mst_scale.config import Experiment, to_dict
from mst_scale.engine.api import READ
from mst_scale.engine.types import MST, Engine
from mst_scale.errors import UserError, format_value
from mst_scale.flops import any_model
from mst_scale.flops.formulas import newton_schulz_flops
from mst_scale.hybrid_sparse_attention.pattern import Pattern
from mst_scale.run_logging import metrics, run_file
from mst_scale.run_logging.progress import kind_of
from mst_scale.run_logging.record import Record, Row, state_of
from mst_scale.run_logging.run_file import RunFile

STATE = "mst_record"  # its name in a checkpoint's client_state
DENSE = Pattern("dense")
_latest: weakref.WeakValueDictionary[Path, Recording] = weakref.WeakValueDictionary()  # of each folder


def record(engine: Engine, out: str | Path, *, every: int = 10, tensorboard: bool = True) -> Recording:
    """Start to record a run. Call this on every rank.

    Args:
        engine: The engine that `mst_scale.initialize` returned.
        out: The folder of the run.
        every: The number of optimizer steps between rows; a row is also written at the last step.
        tensorboard: Whether to write the same numbers for TensorBoard.

    Raises:
        UserError: if `every` is not an integer from 1, `out` cannot be a folder, or the engine cannot be recorded.
    """
    if not isinstance(every, int) or every < 1:
        raise UserError(f"record(every={every!r}): every must be an integer, at least 1")
    return Recording(engine, Path(out), every=every, tensorboard=tensorboard, shows=True)


class Recording:
    """The recording of one engine. Every rank has one, and the first rank writes.

    With `every` 0, rows are written when `row` is called, and at the last step.
    """

    def __init__(self, engine: Any, out: Path, *, every: int, tensorboard: bool, shows: bool):
        if not hasattr(engine, "mst"):
            raise UserError("record() needs the engine that mst_scale.initialize returns: this one has no .mst")
        if zero_shards.groups_of(engine).stages is not None:
            raise UserError("record() does not support pipelines: mst_scale.pretrain records them")
        self.engine, self.out, self.every, self.tensorboard, self.shows = engine, out, every, tensorboard, shows
        self.mst: Any = engine.mst
        self.steps: int = self.mst.schedule.total_steps
        self.group = zero_shards.groups_of(engine).replicas
        self.first = engine.global_rank == 0
        everyone = Exchange(dist.group.WORLD)
        everyone.agree(lambda: validate_new_folder("record(): the folder", out) if self.first else None)
        parts = int(engine.sequence_parallel_size)
        self.ledger = any_model.ModelLedger(engine.module, self._optimizer_flops(), parts)
        self.before = dict.fromkeys(self.ledger.spent, 0.0)  # by all ranks, in starts before this one
        self.layers: dict[str, Row] = {}
        self.loss = torch.zeros((), device=engine.device)  # of the current step
        self.micro_batches, self.divided = 0, True
        self.place: tuple[int, int] | None = None  # of the latest loss's micro-batch
        self.left_out = False  # gradients were discarded since the latest loss
        self.record: Record | None = None  # from the first step on: a checkpoint may be loaded before
        self.run_file: RunFile | None = None
        self.step = -1  # the one just taken, with its loss and rate, norm and end
        self.last: tuple[torch.Tensor | None, float] = (None, 0.0)
        self.norm: float | None = None
        self.ended = 0.0
        self.counted: set[str] = set()  # names of a row's values that a loop cannot log
        self.newest: Row | None = None  # row, which logged values join …
        self.paced: Row = {}  # … with its pace
        self.waits = False  # the latest row is not written yet
        self.closed = False  # no step will come that writes it
        self.untrained = False  # the last step was taken in evaluation mode
        self.warnings: set[str] = set()  # that were given
        self.saved_row: Row | None = None  # the row that waited when the loaded checkpoint was saved
        self._read_next_step()
        zero_shards.watch_losses(engine, self._add_loss)
        zero_shards.on_zero_grad(engine, partial(_leave_out, weakref.ref(self)))
        zero_shards.carry_state(engine, STATE, self._saved, self._loaded)
        self.mst.on_step(self._after_step)
        place = out.absolute()
        if (earlier := _latest.get(place)) is not None:
            earlier.close()  # at the end of the program, it would write over this one's files
        _latest[place] = self
        atexit.register(_close, weakref.ref(self))  # weak references, so that the engine can be freed

    # --- the engine's steps ---

    def _add_loss(self, loss: torch.Tensor, divided: bool) -> None:
        if self.engine.module.training:
            if self.left_out:
                self._forget_losses()
            # a micro-batch ends with a step of the engine, or else with the next forward pass
            forwards = len(self.ledger.inputs) if zero_shards.sets_boundaries(self.engine) else 0
            place = (self.engine.micro_steps, forwards)
            self.micro_batches += place != self.place
            self.loss += loss.float().sum()  # it may have the shape (1,)
            self.place, self.divided = place, divided

    def _forget_losses(self) -> None:
        self.loss, self.micro_batches, self.place, self.left_out = torch.zeros_like(self.loss), 0, None, False

    def _mean_loss(self) -> torch.Tensor | None:
        """Return this rank's loss of the step: the mean of its micro-batches, or their sum if the loop divides them."""
        if not self.micro_batches:
            return None
        if not self.divided or _divided_by_lightning(self.engine.module):
            return self.loss
        managed = self.engine.managed_gradient_accumulation()  # otherwise all backward passes have one place
        return self.loss / (self.micro_batches if managed else self.engine.gradient_accumulation_steps())

    def _read_next_step(self) -> None:
        """Store densities, pattern and rate of the next step, because the engine replaces them during that step."""
        self.densities, self.gradients = self.mst.densities(), self.mst.gradient_densities()
        self.pattern = self.mst.pattern if self.mst.attended else DENSE
        self.kind = kind_of(self.mst, self.densities)
        self.rate = self._rate()

    def _after_step(self, mst: MST) -> None:
        if self.record is None or mst.step > self.step + 1 or mst.step <= self.step:
            self._begin(mst.step - 1)
        assert self.record is not None
        self._flush()
        self.step, self.closed = mst.step, False
        self.ledger.add(self.pattern, self.densities, self.gradients)
        self.record.gather(mst)
        if self.engine.lr_scheduler is None:
            self.rate = self._rate()
        self.norm = zero_shards.grad_norm(self.engine)
        self.last = self._mean_loss(), self.rate
        self.untrained = not self.micro_batches and not self.engine.module.training
        if self.untrained:
            self._warn_once(
                "the model trains in evaluation mode, so neither its loss nor its FLOPs are recorded: call "
                "engine.train() before the forward pass of each training step"
            )
        self._forget_losses()
        before, self.ended = self.ended, time.monotonic()
        if before:  # with what the loop does between steps: medians leave out an evaluation
            self.record.times.add(self.kind, self.ended - before, moved=mst.changed_at == mst.step)
        self._read_next_step()
        if self.step == self.steps or (self.every and self.step % self.every == 0):
            self.row()

    def _begin(self, step: int) -> None:
        """Begin at `step`, for the first step of a start or after a checkpoint was loaded."""
        tokens = int(self.before["tokens"])
        (row, self.saved_row), kept = (self.saved_row, None), step
        if row is not None:
            row = {**self._written(row["step"]), **row}
            self.newest, self.waits, kept = row, True, row["step"] - 1
        if self.record is not None:
            self.record.layers = self.layers
            self.record.rewind(kept, tokens)
            self.record.restart(step, tokens, self.ledger.begun)
            return
        if self.first:
            self.out.mkdir(parents=True, exist_ok=True)
            if step == 0 and (self.out / "metrics.jsonl").exists():
                logger.warning("%s has the metrics of an earlier run: they are replaced", self.out)
            self.run_file = RunFile(self.out / "run.json", self._config(), self._start(step))
        length = self.steps if self.mst.experiment.has_length else None
        self.record = Record(
            self.out, length, batch=zero_shards.sequences_a_step(self.engine), step=kept, tokens=tokens,
            monitor=_TensorBoard(self.out if self.tensorboard and self.first else None), first=self.first,
            layers=self.layers, shows=self.shows,
        )  # fmt: skip
        self.record.restart(step, tokens, self.ledger.begun)

    def _written(self, step: int) -> Row:
        """Return the row of a step in the file: it has what the loop added after the checkpoint was saved."""
        path = self.out / "metrics.jsonl"
        rows = [row for row in metrics.read(path) if row.get("step") == step] if self.first and path.exists() else []
        return dict(rows[-1]) if rows else {}

    # --- rows ---

    def row(self, **known: Any) -> Row:
        """Return a row for the last step, in which the values `known` replace the recorded ones.

        Call it on every rank. The row is written a step later, and the next pace is measured from now on.

        Args:
            **known: values by the names of metrics.
        """
        return self._row(None, **known)

    def _row(self, until: float | None, **known: Any) -> Row:
        """Return a row for the last step, which ended at `until` (default: now)."""
        assert self.record is not None, "no optimizer step has been taken"
        loss, rate = self.last
        spent = self._spent()
        mean = None if loss is None else self._mean(loss)  # waits for the device
        if self.record.window < self.step:  # otherwise it is a second row of this step
            self.paced = self.record.pace(self.step, int(spent["tokens"]), until)
            self.record.restart(self.step, self.paced["tokens"], until)
        counted = {"step": self.step, **state_of(self.mst), **any_model.row(spent), **self.paced}
        self.counted = set(counted)
        row = {"step": self.step, "loss": mean, "lr": rate, "grad_norm": self.norm, **counted, **known}
        self.newest, self.waits = row, True
        return row

    def log(self, **values: float) -> None:
        """Add values of the loop, such as val_loss, to the row of the last step. Call this on every rank.

        Args:
            **values: numbers by the names that the columns in metrics.jsonl will have.

        Raises:
            UserError: if no step has been taken, a checkpoint has been loaded since, a value is not a number, or the
                recording itself counts a value of this name.
        """
        numbers = {name: _number(name, value) for name, value in values.items()}
        if self.record is None:
            raise UserError("log() adds values to the last step, but no step has been taken")
        if self.mst.step != self.step:
            raise UserError(
                f"log() adds values to the last step, {self.step}, but the engine is at step {self.mst.step}: a "
                "checkpoint has been loaded since, or the step has no row yet; call it after engine.step()"
            )
        row = self.newest
        if row is None or row["step"] != self.step:
            row = self._row(self.ended)
        elif not self.waits:  # it is written: replace it
            self.record.rewind(self.step - 1, self.record.window_tokens)
            self.record.restart(self.step, self.record.window_tokens)
            self.waits = True
        if taken := [name for name in values if name in self.counted]:
            raise UserError(f"log({taken[0]}=…): the recording counts {taken[0]} itself; choose another name")
        row |= numbers
        if not self.ledger.inputs:  # the time since the step was the loop's own, such as an evaluation
            self.record.restart(self.step, self.record.window_tokens)
        if self.closed:
            self._flush()

    def note(self, **values: float) -> None:
        """Call `log`, the new name of this method.

        Args:
            **values: see `log`.
        """
        warnings.warn("note() is now log(); the old name goes with mst_scale 0.3", DeprecationWarning, stacklevel=2)
        self.log(**values)

    def _flush(self) -> None:
        if self.waits and self.newest is not None and self.record is not None:
            self.record.put(self.newest)
            if self.newest.get("loss") is None and not self.untrained:
                self._warn_once(
                    "no loss is recorded: call engine.backward(loss), or recording.log(loss=…) after a step"
                )
        self.waits = False

    def _warn_once(self, message: str) -> None:
        if message not in self.warnings:
            self.warnings.add(message)
            logger.warning("%s", message)

    def close(self) -> None:
        """Write the pending row, and record the end of this start."""
        self._flush()
        self.closed = True
        if self.record is not None:
            self.record.close()
        if self.run_file is not None:
            self.run_file.ended(run_file.FINISHED if self.step >= self.steps else run_file.ENDED, self.step)
            self.run_file = None

    def __del__(self) -> None:
        if hasattr(self, "waits"):  # __init__ has succeeded
            self.close()

    def _rate(self) -> float:
        return float(zero_shards.base_optimizer(self.engine).param_groups[0]["lr"])

    def _optimizer(self) -> dict[str, Any]:
        """Describe the optimizer, which the loop may have created without the config."""
        optimizer = zero_shards.base_optimizer(self.engine)
        group = optimizer.param_groups[0]
        rate, decay = group.get("initial_lr", group["lr"]), group.get("weight_decay")
        return {"class": type(optimizer).__name__, "lr": float(rate), "weight_decay": decay}

    def _optimizer_flops(self) -> float:
        """Return this rank's part of the optimizer's FLOPs per step."""
        of_muon = zero_shards.muon_shapes(self.engine)
        whole = sum(newton_schulz_flops(shape, method) for shape, method in of_muon)
        return whole / dist.get_world_size(self.group)

    def _mean(self, loss: torch.Tensor) -> float:
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=self.group)
        return float(mean) / dist.get_world_size(self.group)

    def _spent(self) -> dict[str, float]:
        """Return the FLOPs of all ranks, in this start and earlier ones."""
        mine = torch.tensor(list(self.ledger.spent.values()), dtype=torch.float64, device=self.engine.device)
        dist.all_reduce(mine, group=self.group)
        return {key: self.before[key] + value for key, value in zip(self.before, mine.tolist(), strict=True)}

    # --- checkpoints ---

    def _saved(self) -> dict[str, Any]:
        return {
            "spent": self._spent(),
            "layers": {} if self.record is None else self.record.layers,
            "row": self.newest if self.waits else None,
        }

    def _loaded(self, state: dict[str, Any] | None) -> None:
        """Continue from a checkpoint's state, which is None if it was saved without a recording."""
        self._flush()
        spent = state["spent"] if state else {}
        self.before = {key: spent.get(key, 0.0) for key in self.before}
        self.layers = dict(state["layers"]) if state else {}
        self.saved_row = state["row"] if state else None
        self.ledger.spent = dict.fromkeys(self.ledger.spent, 0.0)
        self.ledger.inputs.clear()
        self._forget_losses()
        self._read_next_step()

    # --- run.json ---

    def _config(self) -> dict[str, Any]:
        """Return the part of the config that has an effect in a custom loop."""
        experiment: Experiment = self.mst.experiment
        full = to_dict(experiment)
        training = {key: full["training"][key] for key in READ if key != "steps" or experiment.has_length}
        return {**experiment.deepspeed, "training": training, "mst": full["mst"]}

    def _start(self, step: int) -> dict[str, Any]:
        engine = self.engine
        parameters = sum(math.prod(zero_shards.shape_of(p)) for p in engine.module.parameters())
        logger.info("recording into %s: %s", self.out, self.ledger.describe())
        return run_file.about(
            from_step=step,
            checkpoint=None,
            ranks=engine.world_size,
            hosts=[socket.gethostname()],
            batch={
                "sequences": zero_shards.sequences_a_step(engine),
                "micro": engine.train_micro_batch_size_per_gpu(),
                "accumulation": engine.gradient_accumulation_steps(),
            },
            model={"class": type(engine.module).__name__, "parameters": parameters},
            optimizer=self._optimizer(),
        )


def _divided_by_lightning(module: Any) -> bool:
    """Return whether Lightning divides a loss by the micro-batches of a step, which DeepSpeed then does again."""
    return getattr(module, "_trainer", None) is not None and bool(module.automatic_optimization)


def _leave_out(recording: weakref.ref[Recording]) -> None:
    """Note that gradients are discarded: by a loop that leaves out a batch, or by the engine in each step."""
    if (found := recording()) is not None:
        found.left_out = True


def _close(recording: weakref.ref[Recording]) -> None:
    if (found := recording()) is not None:
        found.close()


class _TensorBoard:
    """TensorBoard's writer, with the interface of DeepSpeed's monitor; disabled without a folder."""

    def __init__(self, out: Path | None):
        self.enabled = out is not None
        if out is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(out / "tensorboard"))

    def write_events(self, events: list[tuple[str, float, int]]) -> None:
        for name, value, samples in events:
            self.writer.add_scalar(name, value, samples)
        self.writer.flush()


def _number(name: str, value: Any) -> float | None:
    """Return a logged value as JSON can hold it; it may be a tensor or a number of numpy."""
    if value is None or isinstance(value, int | float):
        return value
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        if not isinstance(value, str):
            return float(value)
    raise UserError(f"log({name}=…) takes a number, not {format_value(value)}")
