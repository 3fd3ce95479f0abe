"""Pretrain on this machine: one process for each GPU, or two on the CPU.

  mst launch local [options] CONFIG [arguments of mst_scale.pretrain]
  mst launch local gpt2_small --out runs/gpt2
  mst launch local --processes 2 demo --method dense

  CONFIG          a file, or a ready config by name
  --processes N   number of processes (default: one for each GPU; without a GPU, 2 on the CPU)
  --restarts N    maximum number of restarts after a failure (default 3), each from the latest complete checkpoint,
                  after a pause of 10 s, 20 s, 40 s, …
  --port P        port at which the ranks meet (default: a free one)
  --dry-run       show what would run

On SIGTERM, SIGUSR1 or Ctrl-C the ranks save and end; the same command continues the run. launchers/cluster.sh sets
the environment. In a clone you can also call launchers/local.sh.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable

from mst_scale.comm import free_port
from mst_scale.launch.command_line import quoted, read_options, split_config
from mst_scale.launch.environment import (
    default_processes,
    load_cluster_settings,
    shown_variables,
    use_cpu_without_gpus,
)
from mst_scale.launch.placement import check_groups
from mst_scale.launch.restarts import RESTARTS, keep_running
from mst_scale.launch.supervisor import Supervisor, ask_ranks


def main(words: list[str]) -> int:
    """Read the options and run; return the exit code."""
    numbers = {"--processes": None, "--restarts": RESTARTS, "--port": None}
    options, rest = read_options(words, __doc__, numbers=numbers, flags=["--dry-run"])
    config, arguments = split_config(rest)
    processes = options.processes or default_processes()
    return run(config, arguments, processes, restarts=options.restarts, port=options.port, dry_run=options.dry_run)


def run(
    config: str,
    arguments: list[str],
    processes: int,
    *,
    restarts: int = RESTARTS,
    port: int | None = None,
    dry_run: bool = False,
) -> int:
    """Pretrain with this many processes of this machine, through DeepSpeed's launcher, and return the exit code."""
    check_groups(config, [("this machine", processes)], arguments)
    use_cpu_without_gpus(processes)
    load_cluster_settings()
    os.environ["MST_LAUNCHER"] = "local"

    def command() -> list[str]:
        return [
            "deepspeed", "--log_level", "error", "--num_accelerators", str(processes),
            "--master_port", str(port or free_port()),
            "--module", "mst_scale.pretrain", "--deepspeed_config", config, *arguments,
        ]  # fmt: skip

    if dry_run:
        print(quoted(command(), shown_variables()))
        return 0
    supervisor = Supervisor(ask_ranks)
    return keep_running(supervisor, functools.partial(_start, supervisor, command), config, arguments, restarts)


def _start(supervisor: Supervisor, command: Callable[[], list[str]]) -> int:
    try:
        words = command()
    except OSError as error:  # no port is free now
        print(f"mst_scale: {error}", file=sys.stderr)
        return 1
    # a Ctrl-C must not reach DeepSpeed's launcher, which would end its ranks after 30 s
    return supervisor.run(words, own_session=True)
