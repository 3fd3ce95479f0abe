"""One side's run through one fault: starts the job, injects the fault at its step, and records when steps are finished.

Both jobs write a small JSON file after each step ({"step", "time"}), which is read a hundred times per second.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import mst_scale
from mst_scale.errors import UserError

from . import broken_weight, disk

SIDES = ("ours", "plain")
FAULTS = {
    "rank killed": "SIGKILL to one rank",
    "rank frozen": "SIGSTOP to one rank, for good",
    "node lost": "SIGKILL to the launcher and all ranks; the job is submitted again at once, as Slurm requeues it",
    "newest damaged": "half of a file of the newest checkpoint is cut off, then both ranks are killed",
    "disk full": "writes of the job fail with ENOSPC for some seconds",
    "disk slow": "writes of the job are slowed down for some seconds",
    "divergence": "one rank's copy of a weight becomes infinite, as by a flipped bit, and the loss with it",
}
RANKS, WARM = 2, 5  # times count from the end of this step
POLL_SECONDS = 0.01
PLAIN = Path(__file__).with_name("plain.py")


@dataclass(frozen=True)
class Setting:
    """What both sides of a trace have in common.

    Attributes:
        config: the experiment, with everything but the save interval.
        interval: steps from one fault to the next.
        timeout: minutes that ranks wait for each other (DEEPSPEED_TIMEOUT).
        outage: seconds for which a disk is full or slow.
        rate: bytes per second of each process on a slow disk.
    """

    config: dict[str, Any]
    interval: int
    timeout: int
    outage: float
    rate: float


@dataclass
class Watched:
    """When steps were finished: (time, step), in order; and what was done to the job."""

    steps: list[tuple[float, int]] = field(default_factory=list)
    fault_at: float | None = None
    starts: int = 1

    def summary(self, every: int) -> dict[str, Any]:
        """Return the numbers of which the results are made; `every` is the number of steps between saves."""
        (begin, first), (end, last) = self.steps[0], self.steps[-1]
        gaps = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(self.steps, self.steps[1:], strict=False)]
        behind = [a[1] - b[1] + 1 for a, b in zip(self.steps, self.steps[1:], strict=False) if b[1] <= a[1]]
        return {
            "wall_s": end - begin,
            "steps": last - first,
            "step_s": statistics.median(seconds / step for seconds, step in gaps if step > 0),
            "silence_s": max(seconds for seconds, _ in gaps),
            "repeated": sum(behind),
            "rewinds": len(behind),
            "starts": self.starts,
            "saves": self._saves(every),
        }

    def _saves(self, every: int) -> list[float]:
        """Return what each save before the fault cost, in steps: what the step after it took longer than usual."""
        pairs = list(zip(self.steps, self.steps[1:], strict=False))
        single = [(a[1], b[0] - a[0]) for a, b in pairs if b[1] == a[1] + 1 and b[0] < (self.fault_at or math.inf)]
        if not single:
            return []
        usual = statistics.median(seconds for _, seconds in single)
        return [seconds / usual - 1 for step, seconds in single if step % every == 0]


class Job:
    """A running job of one side, in a folder of its own."""

    def __init__(self, side: str, folder: Path, setting: Setting, every: int):
        folder.mkdir(parents=True)
        self.side, self.out, self.progress = side, folder / "out", folder / "progress"
        self.skip: list[int] = []
        self.control, self._log = folder / "control", (folder / "log").open("wb")
        self.frozen: psutil.Process | None = None
        self.control.mkdir()
        self.config = folder / "config.json"
        raw = setting.config
        self.config.write_text(json.dumps({**raw, "training": {**raw["training"], "save_every": every}}))
        root = Path(mst_scale.__file__).parents[1]
        self.environment = {
            **os.environ, **disk.environment(self.out, self.control, setting.rate),
            "PYTHONPATH": os.pathsep.join(map(str, [broken_weight.write(self.control), root])),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "DEEPSPEED_TIMEOUT": str(setting.timeout), "MST_PAUSE": "0", "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a store of its own for each start by torchrun
        }  # fmt: skip
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            self.environment.pop(name, None)
        self.start()

    def start(self) -> None:
        """Start the launcher."""
        if self.side == "ours":
            words = [
                "-m", "mst_scale", "launch", "local", "--processes", str(RANKS), "--restarts", "1000",
                str(self.config), "--method", "dense", "--out", str(self.out), "--health", str(self.progress),
            ]  # fmt: skip
        else:
            words = [
                "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
                "--max-restarts", "1000", str(PLAIN), "--config", str(self.config), "--out", str(self.out),
                "--progress", str(self.progress),
            ]  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, *words], env=self.environment, stdin=subprocess.DEVNULL, stdout=self._log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def tree(self) -> list[psutil.Process]:
        """Return all processes of the job."""
        with contextlib.suppress(psutil.NoSuchProcess):
            job = psutil.Process(self.process.pid)
            return [job, *job.children(recursive=True)]
        return []

    def ranks(self) -> list[psutil.Process]:
        """Return the processes that train, in rank order."""
        found = {}
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                trains = "mst_scale.pretrain" in words or str(PLAIN) in words
                if trains and "torch.distributed.run" not in words and "RANK" in process.environ():
                    found[int(process.environ()["RANK"])] = process
        return [found[rank] for rank in sorted(found)]

    def kill(self) -> None:
        """End all processes at once, and wait until they are gone."""
        processes = self.tree()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, 30)
        self.process.wait()

    def close(self) -> None:
        """End the job."""
        self.kill()
        self._log.close()

    def newest(self) -> Path:
        """Return the checkpoint from which a restart continues."""
        folder = self.out / "checkpoints" if self.side == "ours" else self.out
        return folder / (folder / "latest").read_text().strip()

    def position(self) -> tuple[float, int] | None:
        """Return when the last step was finished, and its number."""
        try:
            found = json.loads(self.progress.read_text())
        except (OSError, ValueError):
            return None
        return None if found["step"] is None else (found["time"], found["step"])


def run(side: str, fault: str | None, folder: Path, setting: Setting, *, every: int, seed: int) -> dict[str, Any]:
    """Run a job through one fault, from the end of step WARM over `interval` steps; return what was measured.

    Raises:
        UserError: if the job ends by itself or stands still.
    """
    chance = random.Random(f"{seed} {fault}")
    # not before two checkpoints are there
    at, victim = WARM + chance.randrange(setting.interval // 2, 3 * setting.interval // 4), chance.randrange(RANKS)
    job = Job(side, folder, setting, every)
    try:
        watched = _watch(job, fault, at, victim, setting)
    finally:
        job.close()
    written = re.findall(r"saved \S+ in (\S+) s", (folder / "log").read_text(errors="replace"))
    return {
        "side": side, "fault": fault, "every": every, "at": at, "seed": seed, **watched.summary(every),
        "write_s": statistics.median(map(float, written)) if written else 0.0,
    }  # fmt: skip


def _watch(job: Job, fault: str | None, at: int, victim: int, setting: Setting) -> Watched:
    watched, pending = Watched(), fault is not None
    repair_at: float | None = None
    for moment, step in _positions(job, watched, setting):
        if pending and step >= at:
            watched.fault_at, pending = moment, False
            repair_at = _inject(job, fault or "", victim, watched, setting)
        if repair_at is not None and moment >= repair_at:
            _repair(job, fault or "")
            repair_at = None
        if step >= WARM + setting.interval:
            return watched
    raise AssertionError


def _positions(job: Job, watched: Watched, setting: Setting) -> Iterator[tuple[float, int]]:
    """Yield the time and the last finished step, again and again, and note new steps."""
    patience = 60 * setting.timeout + setting.outage + 200
    changed = time.time()
    while True:
        now, found = time.time(), job.position()
        if found is not None and found[1] >= WARM and (not watched.steps or found[1] != watched.steps[-1][1]):
            watched.steps.append(found)
            changed = now
        if now - changed > patience:
            log = Path(job.config.parent / "log").read_text(errors="replace")[-2000:]
            raise UserError(f"the job of {job.side} stands still or has ended (step {found and found[1]}): {log}")
        yield now, watched.steps[-1][1] if watched.steps else 0
        time.sleep(POLL_SECONDS)


def _inject(job: Job, fault: str, victim: int, watched: Watched, setting: Setting) -> float | None:
    """Let the fault happen; return when it is repaired from outside, or None."""
    now, ranks = time.time(), job.ranks()
    if fault == "rank killed":
        ranks[victim].kill()
    elif fault == "rank frozen":
        ranks[victim].send_signal(signal.SIGSTOP)
        job.frozen = ranks[victim]
        return now + 60 * setting.timeout if job.side == "plain" else None
    elif fault == "node lost":
        job.kill()
        job.start()
        watched.starts += 1
    elif fault == "newest damaged":
        model = next(job.newest().glob("mp_rank_00_model_states.pt"))
        for rank in ranks:
            rank.send_signal(signal.SIGSTOP)
        os.truncate(model, model.stat().st_size // 2)
        for rank in ranks:
            rank.kill()
    elif fault in ("disk full", "disk slow"):
        (job.control / fault.split()[1]).touch()
        return now + setting.outage
    elif fault == "divergence":
        (job.control / broken_weight.FILE).write_text(str(victim))
    return None


def _repair(job: Job, fault: str) -> None:
    """End a fault of the disk, or kill a frozen rank, so that torchrun starts again."""
    if job.frozen is not None:
        job.frozen.kill()
    else:
        (job.control / fault.split()[1]).unlink()
