"""Runs the runs of a study, each a process of `mst_scale.pretrain`, one or more at a time, and appends their records.

What is done is read from the disk: a queue that was killed continues where it stopped, and an unfinished run continues
from its latest checkpoint. Dense runs with a WSD schedule share a trunk (OUT/trunks): a run at the constant rate, which
is extended as longer runs need it, and from which each run branches off to decay. If the trunk is past that step and
has no checkpoint there, the run is made from its start. Runs of one trunk never run at the same time, nor do runs that
grow from the same smaller run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TextIO

import mst_scale
from mst_scale.checkpoints import finding
from mst_scale.config import Experiment, to_dict
from mst_scale.errors import UserError
from mst_scale.run_logging import metrics, run_file
from mst_scale.run_logging.out_lock import OutLock
from mst_scale.run_logging.progress import clock

from . import records
from .outcome import wanted
from .plan import Job, Plan
from .records import DIVERGED, FAILED, FINISHED, Row

START_SECONDS = 16.0  # of a run before its first step, and in its evaluations
POLL_SECONDS = 1.0
DIVERGED_CODE = 3  # the exit code of a run that diverged
GUESS = 2e10  # FLOP/s, until a run has been measured
TRUNK_CHECKPOINTS = 1_000


class Stopped(Exception):
    """The queue was asked to stop, or its time is over; running runs have been saved."""


class Runner:
    """The queue of one plan in one folder."""

    def __init__(
        self, plan: Plan, out: Path, results: Path, data: Path, *, deadline: float | None = None, at_once: int = 1
    ):
        self.plan, self.out, self.results, self.data = plan, out, results, str(data)
        self.corpus = records.corpus_of(data)
        self.deadline = deadline
        self.at_once = at_once
        self.asked_to_stop = False
        self.rows: dict[str, Row] = {}
        self.read()
        self.screen = Screen(sys.stderr)

    def read(self) -> None:
        """Read all records. Runs that failed before are tried again.

        Raises:
            UserError: if runs of this plan were made on another corpus.
        """
        found = records.known(self.results)
        mine = {job.digest for job in wanted(self.plan, found, self.data)[0]}
        for row in found.values():
            if row["digest"] in mine and row["status"] == FINISHED and row["corpus"] != self.corpus:
                raise UserError(
                    f"--data {self.data} is not the corpus of the runs in "
                    f"{records.path_of(self.plan.name, self.results)}: give that corpus, or another --results folder"
                )
        self.rows = {digest: row for digest, row in found.items() if row["status"] != FAILED}

    def run_all(self) -> None:
        """Make every run that is wanted; `Stopped` if there was no time for all."""
        running: dict[Future[Row], Job] = {}
        with ThreadPoolExecutor(self.at_once) as pool:
            try:
                while True:
                    jobs, guessed = wanted(self.plan, self.rows, self.data)
                    todo = [job for job in jobs if job.digest not in self.rows]
                    if not todo:
                        return
                    if self._over():
                        raise Stopped
                    while len(running) < self.at_once and (job := next_of(todo, running.values())) is not None:
                        self._announce(job, len(jobs) + len(guessed), [*todo, *guessed])
                        running[pool.submit(self._make, job)] = job
                    for ended in wait(running, return_when=FIRST_COMPLETED).done:
                        self._keep(running[ended], ended.result())
                        del running[ended]
            except BaseException:
                self.asked_to_stop = True  # the other runs save
                raise
            finally:
                for future, job in running.items():
                    if future.exception() is None and job.digest not in self.rows:
                        self._keep(job, future.result())

    def _announce(self, job: Job, total: int, left: list[Job]) -> None:
        failed = sum(row["status"] != FINISHED for row in self.rows.values())
        trunks = {path.name: _stands_at(path) for path in (self.out / "trunks").glob("*") if path.is_dir()}
        table = [one for one in left if one.block_flops == job.block_flops]
        soon, late = (clock(seconds_left(jobs, self.rows, trunks) / self.at_once) for jobs in (table, left))
        done = f"{total - len(left)} of {total} runs done{f', {failed} failed' if failed else ''}"
        table_of = f"{job.cell.size} at {job.cell.budget} tokens per parameter"
        self.screen.line(f"{done}, about {soon} left for {table_of}, {late} for all · {job}")

    def _keep(self, job: Job, row: Row) -> None:
        self.rows[job.digest] = row
        records.append(records.path_of(self.plan.name, self.results), row)
        result = f"validation loss {row['val_loss']:.4f}" if row["status"] == FINISHED else row["reason"]
        self.screen.line(f"  {result}" + (f" · {job}" if self.at_once > 1 else ""))

    # --- one run ---

    def _make(self, job: Job) -> Row:
        folder = self._folder(job)
        log = folder.with_suffix(".log")
        started = time.monotonic()
        self._wait_for(folder)
        if job.smaller is not None and not finding.list_tags(folder / "checkpoints"):
            code = self._make_smaller(job.smaller)
            if code:
                return self._failure(job, self._folder(job.smaller).with_suffix(".log"), code)
        branch, steps_run = [], job.steps
        if not finding.list_tags(folder / "checkpoints") and (start := job.decays_from):
            trunk = self.out / "trunks" / job.trunk
            self._wait_for(trunk)
            stood = _stands_at(trunk)
            code = self._extend_trunk(job, trunk, start) if stood < start else 0
            if code:
                return self._failure(job, trunk.with_suffix(".log"), code)
            if (trunk / "checkpoints" / finding.tag_of(start)).is_dir():
                branch = ["--branch-decay-from", f"{trunk}:{finding.tag_of(start)}"]
                steps_run = job.steps - start + max(0, start - stood)
        if (found := self._record(job, folder, started, steps_run)) is not None:
            return found  # it ended after its queue was killed
        more = ["--steps", str(job.steps), *branch]
        if job.smaller is not None:
            more += ["--from", str(self._folder(job.smaller))]
        code = self._run(_keeping_one(job.experiment), folder, log, more)
        row = self._record(job, folder, started, steps_run)
        return self._failure(job, log, code) if row is None else row

    def _folder(self, job: Job) -> Path:
        return self.out / "runs" / job.digest

    def _make_smaller(self, job: Job) -> int:
        """Make the smaller run that others grow from, unless it is there; return the exit code."""
        folder = self._folder(job)
        self._wait_for(folder)
        if _stands_at(folder) == job.steps:
            return 0
        return self._run(_keeping_one(job.experiment), folder, folder.with_suffix(".log"), [])

    def _wait_for(self, folder: Path) -> None:
        """Wait for the end of a run that has survived its queue."""
        while folder.is_dir():
            lock = OutLock(folder)
            try:
                lock.take(restarted=False)
            except UserError:
                if self._over():
                    raise Stopped from None
                continue
            lock.release()
            return

    def _record(self, job: Job, folder: Path, started: float, steps_run: int) -> Row | None:
        return records.of_run(job, folder, self.corpus, time.monotonic() - started, steps_run)

    def _extend_trunk(self, job: Job, trunk: Path, start: int) -> int:
        """Train the trunk up to the step where the job's decay begins; return the exit code."""
        training = dataclasses.replace(
            job.experiment.training, steps=start, decay=0, keep_checkpoints=TRUNK_CHECKPOINTS, eval_every=0,
            eval_sequences=1, save_every=max(1, start // 4), log_every=max(1, start // 8),
        )  # fmt: skip
        experiment = dataclasses.replace(job.experiment, training=training)
        return self._run(experiment, trunk, trunk.with_suffix(".log"), [])

    def _run(self, experiment: Experiment, folder: Path, log: Path, more: list[str]) -> int:
        """Run one process to its end and return its exit code; `Stopped` if it was asked to save instead."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        config = folder.with_suffix(".json")
        config.write_text(json.dumps(to_dict(experiment), indent=1))
        arguments = ["--deepspeed_config", str(config), "--out", str(folder), *more]
        command = [sys.executable, "-m", self.plan.program, *arguments]
        with log.open("w") as file:
            # in a new session, so that Ctrl-C reaches only the queue, which lets the run save
            child = subprocess.Popen(command, stdout=file, stderr=file, env=environment(), start_new_session=True)
            asked = False
            try:
                while (code := child.poll()) is None:
                    time.sleep(POLL_SECONDS)
                    if not asked and self._over():
                        child.send_signal(signal.SIGTERM)
                        asked = True
                    if self.at_once == 1:
                        self.screen.status(lambda: f"  step {_stands_in(folder)} of {experiment.training.steps}")
            except BaseException:
                child.kill()
                raise
        if asked and not _finished(folder, experiment.training.steps):
            raise Stopped
        return code

    def _over(self) -> bool:
        return self.asked_to_stop or (self.deadline is not None and time.monotonic() > self.deadline)

    def _failure(self, job: Job, log: Path, code: int) -> Row:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("mst_scale:")]
        last = (errors or lines or ["no output"])[-1]
        reason = f"killed by signal {-code}" if code < 0 else last.replace(str(self.out), "OUT")[:300]
        return records.about(job, DIVERGED if code == DIVERGED_CODE else FAILED, reason=reason, corpus=self.corpus)


class Screen:
    """Prints the progress of the queue; on a terminal the last line is updated in place."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.live = stream.isatty()

    def line(self, text: str) -> None:
        """Print a line that stays."""
        print(f"\r\x1b[K{text}" if self.live else text, file=self.stream, flush=True)

    def status(self, text: Callable[[], str]) -> None:
        """On a terminal, show a line that the next one replaces."""
        if self.live:
            print(f"\r\x1b[K{text()}", end="", file=self.stream, flush=True)


def next_of(todo: Iterable[Job], running: Iterable[Job]) -> Job | None:
    """The first run that is not running and shares neither trunk nor smaller run with one that is."""
    digests, taken = {job.digest for job in running}, {job.begins_with for job in running} - {None}
    return next((job for job in todo if job.digest not in digests and job.begins_with not in taken), None)


def seconds_left(jobs: list[Job], rows: Mapping[str, Row], trunks: Mapping[str, int]) -> float:
    """Estimate from the dense FLOP/s of finished runs of the same size, or of any size if there is none."""
    taken: dict[str, tuple[float, float]] = {}
    for row in rows.values():
        if row["status"] == FINISHED:
            work = row["flops_dense"] / row["steps"] * row["steps_run"]
            for name in (row["size"], ""):
                seconds, before = taken.get(name, (0.0, 0.0))
                taken[name] = seconds + max(0.0, row["seconds"] - START_SECONDS), before + work
    reached = dict(trunks)
    total = 0.0
    for job in jobs:
        steps, start = job.steps, job.decays_from
        if start:
            stood = reached.get(job.trunk, 0)
            steps = job.steps - start + max(0, start - stood)
            reached[job.trunk] = max(stood, start)
        seconds, work = taken.get(job.cell.size) or taken.get("") or (0.0, 0.0)
        work_left = steps * job.dense_flops_per_step
        if job.smaller is not None:
            work_left += job.smaller.steps * job.smaller.dense_flops_per_step
        total += START_SECONDS + work_left * (seconds / work if seconds else 1 / GUESS)
    return total


def _keeping_one(experiment: Experiment) -> Experiment:
    return dataclasses.replace(experiment, training=dataclasses.replace(experiment.training, keep_checkpoints=1))


def _stands_at(folder: Path) -> int:
    """The step of the latest checkpoint; 0 if there is none."""
    tags = finding.list_tags(folder / "checkpoints")
    return int(tags[0].removeprefix("step")) if tags else 0


def _stands_in(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return max((row["step"] for row in metrics.read(path)), default=0) if path.exists() else 0


def _finished(folder: Path, steps: int) -> bool:
    starts = run_file.read(folder / "run.json").get("starts") or [{}]
    return starts[-1].get("how") == "finished" and starts[-1].get("last_step") == steps


def environment() -> dict[str, str]:
    """The environment of a run, in which it imports this source tree."""
    root = str(Path(mst_scale.__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}
