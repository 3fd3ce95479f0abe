"""Run a command on one node of a run, and let its ranks save and end when asked.

The hostfile and Slurm launchers start this on each node; it is of no use by hand.

  bash launchers/node.sh JOB COMMAND…    run it; on SIGTERM and SIGUSR1 the ranks save and end
  bash launchers/node.sh --stop JOB      the same, from another process of this node
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from mst_scale.launch.supervisor import Supervisor, ask_ranks


def main(words: list[str]) -> int:
    """Run the command, or stop those of a job."""
    if not words or words[0] in ("--help", "-h"):
        print((__doc__ or "").strip())
        return 0
    if words[0] == "--stop":
        _stop(words[1])
        return 0
    return run(words[0], words[1:])


def run(job: str, command: Sequence[str]) -> int:
    """Run a command of a job and return its exit code."""
    supervisor = Supervisor(ask_ranks)  # before anybody can read the file, or the signal would end us
    pid_file = _pid_file(job, os.getpid())
    descriptor = os.open(pid_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w") as file:
        file.write(f"{os.getpid()}\n")
    try:
        # Slurm sends a signal to every process of a step. DeepSpeed's launcher would die of SIGUSR1, and its ranks with
        # it before they have saved; a rank sets a handler of its own.
        return supervisor.run(command, ignored=(signal.SIGUSR1,))
    finally:
        pid_file.unlink(missing_ok=True)


def ranks_of_node(
    world: Mapping[str, Sequence[str]], number: int, address: str, port: str, module: str, *arguments: str
) -> list[str]:
    """Return the command that starts the ranks of one node through DeepSpeed's launcher.

    Args:
        world: The GPUs, or just the numbers of the ranks, of each node by its name.
        number: The number of this node among them.
        address: Where the ranks meet.
        port: The port there.
        module: The program that each rank runs.
        arguments: Its arguments.
    """
    encoded = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
    # the doctor takes no --local_rank, which DeepSpeed's launcher would put before its verb
    no_local_rank = [] if module == "mst_scale.pretrain" else ["--no_local_rank"]
    # its only error says with which code a rank has exited: the rank has said why, and `restarts` repeats the code
    return [
        sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={encoded}", f"--node_rank={number}",
        f"--master_addr={address}", f"--master_port={port}", "--log_level=critical",
        "--module", *no_local_rank, module, *arguments,
    ]  # fmt: skip


def _stop(job: str) -> None:
    pattern = _pid_file(job, "*")
    for path in pattern.parent.glob(pattern.name):
        with contextlib.suppress(FileNotFoundError):
            # the folder is everybody's: another user's file could name any of our processes
            if path.is_file() and path.stat().st_uid == os.getuid():
                pid = path.read_text().strip()
                try:
                    if not re.fullmatch("[1-9][0-9]*", pid):
                        raise ProcessLookupError
                    os.kill(int(pid), signal.SIGUSR1)
                except (ProcessLookupError, PermissionError, OverflowError):
                    path.unlink()


def _pid_file(job: str, pid: int | str) -> Path:
    return Path(tempfile.gettempdir(), f"mst-{os.getuid()}-{job}.{pid}.pid")
