"""Pretrain on this machine: one process for each GPU, or two on the CPU.

  mst launch local [options] CONFIG [arguments of mst_scale.pretrain]
  mst launch local gpt2_small --out runs/gpt2
  mst launch local --processes 2 demo --method dense
  mst launch local --elastic 1:4 gpt2_small --out runs/gpt2    # then, in another shell: echo 2 > runs/gpt2/ranks

  CONFIG              a file, or the name of a ready-made config
  … --out DIR         after CONFIG: folder of the run (default: runs/CONFIG-METHOD, such as runs/demo-mst)
  --processes N       number of processes (default: one for each GPU; without a GPU, 2 on the CPU)
  --elastic MIN:MAX   let the number of processes change: as many as there are GPUs, at most MAX; fewer if a rank fails
                      twice in a row, or if the file of --ranks-from says so. At a change, the run saves and continues
                      with the same global batch, data order and schedule
  --ranks-from FILE   with --elastic: file with the wanted number of processes, which you may rewrite at any time
                      (default: OUT/ranks; if the file does not exist, as many as possible)
  --restarts N        maximum number of restarts after a failure (default 3), each from the latest complete checkpoint,
                      after a pause of 10 s, 20 s, 40 s, …
  --port P            port for the rendezvous of the ranks (default: a free one)
  --dry-run           show what would run

On SIGTERM, SIGUSR1 or Ctrl-C the ranks save and end; the same command continues the run. launchers/cluster.sh sets
the environment. In a clone you can also call launchers/local.sh.
"""

from __future__ import annotations

import functools
import os
import sys
from argparse import Namespace
from collections.abc import Callable

from mst_scale.comm import free_port
from mst_scale.errors import UserError
from mst_scale.launch.command_line import (
    check_batch,
    check_places,
    check_run,
    describe_run,
    quoted,
    read_options,
    read_request,
)
from mst_scale.launch.elastic import FLAG, elastic_places, keep_changing
from mst_scale.launch.environment import (
    default_processes,
    gpus,
    load_cluster_settings,
    shown_variables,
    use_cpu_without_gpus,
)
from mst_scale.launch.node import ranks_of_node
from mst_scale.launch.restarts import RESTARTS, keep_running
from mst_scale.launch.supervisor import Supervisor, ask_ranks, print_message


def main(words: list[str]) -> int:
    """Read the options and run; return the exit code."""
    options, config, arguments = read_options(
        words,
        __doc__,
        numbers={"--processes": None, "--restarts": RESTARTS, "--port": None},
        texts={"--elastic": None, "--ranks-from": None},
        flags=["--dry-run"],
    )
    if options.elastic is not None:
        return _run_elastic(config, [FLAG, *arguments], options)
    if options.ranks_from is not None:
        raise UserError(f"--ranks-from {options.ranks_from} needs {FLAG} MIN:MAX")
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
    request = read_request(config, arguments)
    check_run(request, [("this machine", processes)])
    check_places(request)
    places = gpus() or [str(number) for number in range(processes)]
    if len(places) < processes:
        raise UserError(f"{processes} processes need as many GPUs, but there are {len(places)} ({', '.join(places)})")
    check_batch(request, [processes])
    _set_environment(processes)
    command = functools.partial(_command, places[:processes], config, arguments, port)

    if dry_run:
        print(describe_run(request, processes), file=sys.stderr, flush=True)
        print(quoted(command(), shown_variables()))
        return 0
    supervisor = Supervisor(ask_ranks)
    return keep_running(supervisor, functools.partial(_start, supervisor, command), config, arguments, restarts)


def _run_elastic(config: str, arguments: list[str], options: Namespace) -> int:
    """Pretrain with a number of processes that may change, and return the exit code."""
    if options.processes is not None:
        raise UserError(f"--processes {options.processes} is one number, and {FLAG} a range: leave one of them out")
    places = elastic_places(options.elastic, config, arguments, options.ranks_from, gpus)
    request = read_request(config, arguments)
    check_places(request)
    _set_environment(places.allowed.most)

    if options.dry_run:
        taken = places.take()
        print(describe_run(request, len(taken)), file=sys.stderr, flush=True)
        print(quoted(_command(taken, config, arguments, options.port), shown_variables()))
        return 0
    supervisor = Supervisor(ask_ranks)

    def start(taken: list[str]) -> int:
        command = functools.partial(_command, taken, config, arguments, options.port)
        return _start(supervisor, command, lambda: places.changed(len(taken)))

    return keep_running(
        supervisor, functools.partial(keep_changing, supervisor, places, start), config, arguments, options.restarts
    )


def _command(places: list[str], config: str, arguments: list[str], port: int | None) -> list[str]:
    """Return the command that starts one rank on each of these GPUs or places.

    It leaves out DeepSpeed's runner, the command `deepspeed`: on one machine, the runner imports torch and DeepSpeed
    only to start this command, and with a given number of ranks it ignores CUDA_VISIBLE_DEVICES.
    """
    words = ["mst_scale.pretrain", "--deepspeed_config", config, *arguments]
    return ranks_of_node({"localhost": places}, 0, "127.0.0.1", str(port or free_port()), *words)


def _set_environment(processes: int) -> None:
    use_cpu_without_gpus(processes)
    os.environ["MST_LAUNCHER"] = "local"
    load_cluster_settings()


def _start(supervisor: Supervisor, command: Callable[[], list[str]], leave: Callable[[], bool] | None = None) -> int:
    try:
        words = command()
    except OSError as error:  # no port is free now
        print_message(str(error))
        return 1
    # a Ctrl-C must not reach DeepSpeed's launcher, which would end its ranks after 30 s
    return supervisor.run(words, own_session=True, leave=leave)
