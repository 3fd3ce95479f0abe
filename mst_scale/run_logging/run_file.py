"""Writes run.json, which documents a run.

It contains the resolved config; for each start the time, command, versions, state of the source tree, hosts, ranks,
seeds, the step it continued from, and how it ended; and events such as rollbacks, failed saves and changes of the
number of ranks. Rank 0 rewrites the whole file each time.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mst_scale.comm import logger
from mst_scale.files import write_if_possible
from mst_scale.machine import installed, processor_entries

PACKAGES = ("mst_scale", "torch", "deepspeed", "numpy", "safetensors", "triton", "mpi4py")
SCHEDULERS = (
    "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "MST_LAUNCHER", "MST_RESTART", "MST_RESIZED",
    "MST_START",
)  # fmt: skip
# How a start ended, in run.json; a start that was killed or crashed has no such entry.
FINISHED, STOPPED, STORAGE = "finished", "asked to stop", "continued with another storage"
ENDED = "ended"  # a loop of the user's own, before its last step
PAUSED = "stopped where --stop-at says"
CORRUPTED = "ended by silent corruption"
DIVERGED = ("diverged", "diverged again at the same step")


class RunFile:
    """The run.json of a run, with an entry for this start."""

    def __init__(self, path: Path, config: dict[str, Any], start: dict[str, Any]):
        self.path = path
        before = read(path)
        if not before and path.is_file():
            os.replace(path, aside := path.with_name(f"{path.name}.damaged"))
            logger.error("%s cannot be read: it is kept as %s, and a new one is begun", path, aside.name)
        self.starts = [*before.get("starts", []), start]
        self.events: list[dict[str, Any]] = before.get("events", [])
        self.config = config
        self.write()

    @property
    def restarts(self) -> int:
        """How often the run was started again; a change of storage, which is listed as a start, is none."""
        return restarts(self.starts)

    def happened(self, what: str, **more: Any) -> None:
        """Add an event."""
        self.events.append({"time": now(), "start": len(self.starts) - 1, "what": what, **more})
        self.write()

    def ended(self, how: str, step: int) -> None:
        """Record how this start ended, and at which step."""
        self.starts[-1].update(ended=now(), how=how, last_step=step)
        self.write()

    def write(self) -> None:
        """Write the file; if the disk is full, the next call writes it."""
        content = {"restarts": self.restarts, "starts": self.starts, "events": self.events, "config": self.config}
        write_if_possible(self.path, json.dumps(content, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    """Return the content of run.json, or an empty dict if there is no such file or it is not a valid one."""
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def restarts(starts: Sequence[Mapping[str, Any]]) -> int:
    """Return how often a run was started again, by its starts; a change of storage, which is one of them, is none."""
    return sum(start.get("how") != STORAGE for start in starts[:-1])


def rollbacks(path: Path) -> list[list[int]]:
    """Return the batches that each rollback skipped."""
    return [event["skipped"] for event in read(path).get("events", []) if event.get("what") == "rolled back"]


def verified(path: Path) -> int | None:
    """Return the last step that was verified before the last start ended with silent corruption; None if it did not."""
    found = read(path)
    if (found.get("starts") or [{}])[-1].get("how") != CORRUPTED:
        return None
    steps: list[int] = [event["verified"] for event in found.get("events", []) if event.get("what") == "corrupted"]
    return steps[-1] if steps else None


def about(**more: Any) -> dict[str, Any]:
    """Describe this start from the first rank; `more` are further entries."""
    return {
        "time": now(),
        "command": command(),
        "folder": os.getcwd(),
        "device": device(),
        "versions": _versions(),
        "git": git_state(Path(__file__).resolve().parents[2]),
        "job": {name: os.environ[name] for name in SCHEDULERS if name in os.environ},
        **more,
    }


def command() -> list[str]:
    """Return the command line of this process."""
    return [sys.executable, *sys.orig_argv[1:]]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "system": platform.platform()}
    return found | {name: version for name in PACKAGES if (version := installed(name)) is not None}


def device() -> str:
    """Return the GPU's name, or the processor's with its number of cores."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{processor_entries().get('model name') or platform.machine()}, {os.cpu_count()} cores"


def git_state(root: Path) -> dict[str, Any] | None:
    """Return the commit and the changed files of a source tree, or None if it is not a git checkout."""
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD").strip()
        changed = _git(root, "status", "--porcelain", "--untracked-files=no").splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed": [line[3:] for line in changed]}


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout


def now() -> str:
    """Return the current time in the format of run.json."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
