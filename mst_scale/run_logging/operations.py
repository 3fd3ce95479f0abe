"""Tells operators how a run is doing: a health file, a log of events, and a command that runs for each event.

    OUT/events.jsonl     one JSON object per event: time, event, step, and what belongs to it
    --health FILE        rewritten with every row of the metrics and every event: JSON, or the text format of Prometheus
                         if the name ends with .prom (for node_exporter's textfile collector)
    --on-event CMD       started for each event, without a shell, with the event's JSON as its last argument

Events are the start and the end of each start of a run, spikes, rollbacks, failed saves and whatever else run.json
records. The run continues while the command works; at its end it waits a few seconds for commands, because Slurm ends
with a step whatever the step has started. A file that cannot be written is reported once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mst_scale.checkpoint_folders import MANIFEST
from mst_scale.checkpoints import finding
from mst_scale.comm import logger
from mst_scale.comm.launch import without_rank
from mst_scale.errors import UserError
from mst_scale.run_logging.metrics import OptionalWrites, without_nan

EVENTS = "events.jsonl"
OF_ROW = ("step", "tokens", "loss", "val_loss", "grad_norm", "lr", "tokens_per_s", "step_ms", "phase", "sparsity")
LINGER = 5.0  # seconds for which the end of a run waits for commands
ROLLED_BACK = "rolled back"
FAULTS = {"spike": "spikes", ROLLED_BACK: "rollbacks", "failed save": "failed_saves", "corrupted": "corruptions"}


def command_of(text: str | None) -> list[str] | None:
    """Return the words of the option --on-event.

    Raises:
        UserError: if there is no such program.
    """
    if text is None:
        return None
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"--on-event {text}: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise UserError(f"--on-event {text}: there is no program {words[0] if words else text!r}: name one on the PATH")
    return words


class Operations:
    """Files and commands of one start of a run of `steps` steps; only the first rank has one.

    `events` are the run's earlier ones, as run.json has them; `health` and `command` are the options --health and
    --on-event.
    """

    def __init__(
        self, out: Path, steps: int, *, restarts: int = 0, events: Sequence[Mapping[str, Any]] = (),
        health: Path | None = None, command: list[str] | None = None,
    ):  # fmt: skip
        self.out, self.health, self.command = out, health, command
        self._disk = OptionalWrites()
        if health is not None:
            with contextlib.suppress(OSError):  # the first write reports it
                health.parent.mkdir(parents=True, exist_ok=True)
        self._children: list[subprocess.Popen[bytes]] = []
        counted = [event.get("what") for event in events]
        self.state: dict[str, Any] = {
            "state": "training", "steps": steps, "step": None, **_newest_save(out), "restarts": restarts,
            **{name: counted.count(what) for what, name in FAULTS.items()},
        }  # fmt: skip

    def row(self, row: Mapping[str, Any]) -> None:
        """Take the numbers of a row of the metrics."""
        self.state |= {name: row[name] for name in OF_ROW if row.get(name) is not None}
        self._write_health()

    def saved(self, step: int) -> None:
        """Note that the checkpoint of a step is complete."""
        self.state |= {"last_save_step": step, "last_save_time": time.time()}
        self._write_health()

    def event(self, what: str, state: str | None = None, **more: Any) -> None:
        """Log an event, as run.json calls it, and start the command with it.

        `state` is the state of the run from now on, if the event changes it.
        """
        if what in FAULTS:
            self.state[FAULTS[what]] += 1
        if what == ROLLED_BACK:  # newer checkpoints are set aside
            self.state |= _newest_save(self.out)
        if state is not None:
            self.state["state"] = state
        line = json.dumps(without_nan({"time": time.time(), "event": what, "run": str(self.out), **more}))
        self._disk.attempt(EVENTS, lambda: self._append(line))
        self._write_health()
        if self.command is not None:
            self._start(line)

    def finish(self) -> None:
        """Wait until the commands of the last events have ended, but not for long."""
        end = time.monotonic() + LINGER
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, end - time.monotonic()))

    def _append(self, line: str) -> None:
        with (self.out / EVENTS).open("ab+") as file:
            cut = file.tell() > 0 and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"  # by a disk that was full
            file.write(f"{chr(10) * cut}{line}\n".encode())

    def _start(self, line: str) -> None:
        assert self.command is not None
        self._children = [child for child in self._children if child.poll() is None]
        try:
            child = subprocess.Popen(
                [*self.command, line], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
                env=without_rank(),
            )  # fmt: skip
        except OSError as error:
            logger.error("cannot start %s (%s): the run continues without it", self.command[0], error)
        else:
            self._children.append(child)

    def _write_health(self) -> None:
        if self.health is None:
            return
        path, now = self.health, {**self.state, "run": str(self.out), "time": time.time()}
        text = _prometheus(now) if path.suffix == ".prom" else json.dumps(without_nan(now)) + "\n"
        self._disk.attempt(str(path), lambda: _replace(path, text))


def _newest_save(out: Path) -> dict[str, Any]:
    """Return what the state says of the newest complete checkpoint."""
    for tag in finding.list_tags(out / "checkpoints"):
        with contextlib.suppress(OSError):  # it is being removed
            manifest = out / "checkpoints" / tag / MANIFEST
            return {"last_save_step": finding.step_of(manifest.parent), "last_save_time": manifest.stat().st_mtime}
    return {"last_save_step": None, "last_save_time": None}


def _replace(path: Path, text: str) -> None:
    """Write a file that no reader sees half written; it need not survive a crash of the machine."""
    draft, content = f"{path}.partial", text.encode()
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)  # `open` would cost as much as the write
    try:
        if os.write(file, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), draft)
    finally:
        os.close(file)
    os.replace(draft, path)


def _prometheus(state: Mapping[str, Any]) -> str:
    """Return the numbers of a run's state in Prometheus's text format, and its words as labels of `mst_info`."""
    labels = {name: value for name, value in state.items() if isinstance(value, str)}
    quoted = {name: json.dumps(value, ensure_ascii=False)[1:-1] for name, value in labels.items()}
    run = f'{{run="{quoted["run"]}"}}'
    info = ",".join(f'{name}="{value}"' for name, value in quoted.items())
    lines = ["# TYPE mst_info gauge", f"mst_info{{{info}}} 1"]
    for name, value in state.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            lines += [f"# TYPE mst_{name} gauge", f"mst_{name}{run} {value!r}"]
    return "\n".join(lines) + "\n"
