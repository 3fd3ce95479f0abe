"""Pretrain on the machines of a hostfile, reached by ssh or pdsh. Each line of the file is NAME slots=PROCESSES.

  mst launch hostfile --hostfile FILE [options] CONFIG [arguments of mst_scale.pretrain]
  mst launch hostfile --hostfile hosts gpt3_1.3b --data /shared/fineweb --out /shared/runs/1.3b

  CONFIG           a file, or the name of a ready-made config
  … --out DIR      after CONFIG: folder of the run (default: runs/CONFIG-METHOD, such as runs/demo-mst)
  --hostfile FILE  the machines, read here; this folder, the installation, CONFIG and the data must be at the same path
                   on all of them, and OUT on a file system that they share
  --launcher NAME  ssh (default) or pdsh
  --ssh-port P     port of ssh (default 22)
  --master ADDR    address of the first machine for the others (default: its name in the hostfile)
  --port P         port for the rendezvous of the ranks (default 29500)
  --restarts N     maximum number of restarts after a failure (default 3), each from the latest complete checkpoint
  --dry-run        show what would run

ssh must work without a password. On SIGTERM, SIGUSR1 or Ctrl-C the ranks save and end; the same command continues the
run. launchers/cluster.sh sets the environment, which is copied to the machines; secrets such as HF_TOKEN are not, since
command lines show them: set those on each machine. On each machine, DeepSpeed's launcher starts the ranks. Unlike with
DeepSpeed's own pdsh runner, every argument of the command is quoted for the remote shells. In a clone you can also call
launchers/hostfile.sh.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from mst_scale.errors import UserError
from mst_scale.launch.command_line import (
    check_batch,
    check_run,
    quoted,
    read_hostfile,
    read_options,
    read_request,
    seconds_in,
)
from mst_scale.launch.environment import SCRIPTS, carried_variables, load_cluster_settings
from mst_scale.launch.node import ranks_of_node
from mst_scale.launch.restarts import RESTARTS, keep_running
from mst_scale.launch.supervisor import Supervisor, spawn

# Names go into commands: nothing but letters, digits and ._:- (and no - in front, which would be an option).
LINE = re.compile(r"\s*((?:[A-Za-z0-9_.-]+@)?[A-Za-z0-9_.:][A-Za-z0-9_.:-]*)\s+slots=([1-9][0-9]*)\s*", re.ASCII)


class Machines:
    """The machines of a hostfile, and the commands that run on them for one start after the other."""

    def __init__(self, hosts: list[str], launcher: str, ssh_port: int | None):
        self.hosts = hosts
        self.job = ""
        self._pdsh = launcher == "pdsh"
        port = ["-p", str(ssh_port)] if ssh_port is not None else []
        self._remote = ["ssh", "-o", "BatchMode=yes", *port]
        if self._pdsh:
            appended = [f"PDSH_SSH_ARGS_APPEND=-p {ssh_port}"] if ssh_port is not None else []
            self._remote = ["env", "PDSH_RCMD_TYPE=ssh", *appended, "pdsh", "-S"]
        self._asking: dict[str, subprocess.Popen[bytes]] = {}

    def commands(self, program: Callable[[int], list[str]]) -> list[list[str]]:
        """Return what starts `program(number of the machine)` on each machine, as a job with a new name."""
        self.job = f"{os.getpid()}-{secrets.token_hex(4)}"
        start = ["env", "-C", _working_folder(), *self._node(), self.job]
        return [self._at(host, [*start, *program(number)]) for number, host in enumerate(self.hosts)]

    def ask(self, pids: list[int], again: bool) -> None:
        """Let the ranks of all machines save and end, without waiting for a machine that does not answer."""
        for host in self.hosts:
            if host not in self._asking or self._asking[host].poll() is not None:
                self._asking[host] = spawn(self._at(host, ["env", *self._node(), "--stop", self.job]), own_session=True)

    def _node(self) -> list[str]:
        """Return what starts node.sh: a login by ssh has another environment than ours, and may find another Python."""
        return [*(f"{k}={v}" for k, v in carried_variables().items()), "bash", str(SCRIPTS / "node.sh")]

    def _at(self, host: str, words: list[str]) -> list[str]:
        line = quoted(words)
        if self._pdsh:
            return [*self._remote, f"-w{host}", line.replace("%", "%%")]  # pdsh replaces %h, %n and %u
        return [*self._remote, host, line]


def main(words: list[str]) -> int:
    """Read the options and run; return the exit code."""
    options, config, arguments = read_options(
        words,
        __doc__,
        numbers={"--ssh-port": None, "--port": 29500, "--restarts": RESTARTS},
        texts={"--hostfile": None, "--launcher": "ssh", "--master": None},
        flags=["--dry-run"],
    )
    if options.launcher not in ("ssh", "pdsh"):
        raise UserError(f"--launcher {options.launcher}: choose ssh or pdsh")
    if options.hostfile is None:
        raise UserError("give the machines: --hostfile FILE")
    hostfile = Path(options.hostfile)
    nodes = _read(hostfile)
    request = read_request(config, arguments)
    check_run(request, nodes)  # DeepSpeed numbers ranks along the file, each line's slots together
    check_batch(request, [sum(slots for _, slots in nodes)])
    if not options.dry_run and shutil.which(options.launcher) is None:
        raise UserError(f"{options.launcher} is not installed here")
    load_cluster_settings()
    os.environ["MST_LAUNCHER"] = "hostfile"
    hosts = [name for name, _ in nodes]
    machines = Machines(hosts, options.launcher, options.ssh_port)

    world = {name: [str(slot) for slot in range(slots)] for name, slots in nodes}
    address = options.master or hosts[0].rpartition("@")[2]

    def program(number: int) -> list[str]:
        words = ["mst_scale.pretrain", "--deepspeed_config", config, *arguments]
        return ranks_of_node(world, number, address, str(options.port), *words)

    if options.dry_run:
        print("\n".join(map(quoted, machines.commands(program))))
        return 0
    supervisor = Supervisor(machines.ask)
    # Ranks that have met end by themselves when one is lost; those that still wait for it are asked to.
    patience = seconds_in("MST_MEETING", 60)

    def start() -> int:
        return supervisor.run(*machines.commands(program), own_session=True, patience=patience)

    return keep_running(supervisor, start, config, arguments, options.restarts)


def _read(hostfile: Path) -> list[tuple[str, int]]:
    """Return the machines with their numbers of processes, line after line."""
    found: list[tuple[str, int]] = []
    for number, line in enumerate(read_hostfile(hostfile), start=1):
        if match := LINE.fullmatch(line):
            if match[1] in dict(found):
                raise UserError(f"{hostfile}, line {number}: {match[1]} is listed twice: put all its slots on one line")
            found.append((match[1], int(match[2])))
        elif line.strip():
            raise UserError(f"{hostfile}, line {number}: write NAME slots=NUMBER, not '{line}'")
    if not found:
        raise UserError(f"{hostfile} names no machine")
    return found


def _working_folder() -> str:
    """Return this folder by the name that the user gave it: on another machine the folder behind a link may differ."""
    named = os.environ.get("PWD", "")
    return named if os.path.isabs(named) and os.path.exists(named) and os.path.samefile(named, ".") else os.getcwd()
