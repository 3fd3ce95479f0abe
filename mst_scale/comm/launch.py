"""Reads what the launcher has set for this process: its rank, the number of ranks, and their rendezvous address."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from datetime import timedelta
from pathlib import Path

from mst_scale.errors import UserError

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
OF_A_RANK = ("CROSS_", "TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_WORLD_SIZE", "OMPI_", "PMIX_", "PMI_")  # beginnings
OF_THE_LAUNCHER = tuple(f"MST_{what}" for what in ("FAILED", "REFUSED", "STOPPED", "DIVERGED", "CORRUPTED", "STORE"))
DEFAULT_TIMEOUT = 30  # minutes, as in launchers/cluster.sh
LONGEST_TIMEOUT = 60 * 24 * 30
MINUTE = 60.0  # seconds
OF_DEEPSPEED = "29500"  # the port of every run that states none
LOWEST_PORT = 10_000  # below, the well-known services


_adopted: list[timedelta] = []  # the timeout of a default process group that the program has created


def timeout() -> timedelta:
    """Return how long a rank waits for the others, in a collective or for a heartbeat: DEEPSPEED_TIMEOUT minutes.

    If that is not set, a default process group that the program has created with another timeout decides (`adopt`).
    """
    if _adopted and "DEEPSPEED_TIMEOUT" not in os.environ:
        return _adopted[-1]
    stated = os.environ.get("DEEPSPEED_TIMEOUT", str(DEFAULT_TIMEOUT))
    if not stated.isascii() or not stated.isdecimal() or not 1 <= int(stated[:9]) <= LONGEST_TIMEOUT:
        raise UserError(f"DEEPSPEED_TIMEOUT = {stated!r} must be an integer from 1 to {LONGEST_TIMEOUT:,} (minutes)")
    return timedelta(seconds=int(stated) * MINUTE)


def adopt(limit: timedelta) -> None:
    """Make `timeout` return this limit unless DEEPSPEED_TIMEOUT is set."""
    _adopted[:] = [limit]


def several() -> bool:
    """Return whether a launcher has started several processes."""
    return int(os.environ["WORLD_SIZE"]) > 1 if "WORLD_SIZE" in os.environ else under_mpi()


def launched_rank() -> int:
    """Return the rank that the launcher has set, which is known before the process group exists."""
    return int(next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), 0))


def under_mpi() -> bool:
    """Return whether mpirun has started this process."""
    return any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"))


def machine() -> str:
    """Return the name of this machine and of its kernel's boot, which distinguishes machines of one name."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = "/" + Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return f"{socket.gethostname()}{boot}"


def without_rank() -> dict[str, str]:
    """Return the environment for a program that is not a rank: it must not join the ranks or report to the launcher."""
    of_a_rank = (*LAUNCHER_VARIABLES, *RANK_VARIABLES, *OF_THE_LAUNCHER)
    return {
        name: value for name, value in os.environ.items() if name not in of_a_rank and not name.startswith(OF_A_RANK)
    }


def complete_environment() -> None:
    """Set the launcher's variables if it has not: to those that mpi4py finds, or to those of a single rank.

    The ranks of DeepSpeed's launcher get a port of their own if the launcher only offers its default.

    Raises:
        UserError: if the launcher states several ranks and leaves out some of the variables. Each process would train
            alone.
    """
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    of_one = {"WORLD_SIZE": "1", "RANK": "0"}
    stated = next((name for name, value in of_one.items() if os.environ.get(name, value) != value), None)
    if missing and stated is not None and not under_mpi():
        raise UserError(
            f"{stated} is {os.environ[stated]}, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set: set {', '.join(LAUNCHER_VARIABLES)} for each rank, as "
            f"torchrun and deepspeed do, or unset {stated}"
        )
    if missing:
        values = _mpi_ranks() if under_mpi() else ("0", "0", "1", "127.0.0.1", str(free_port()))
        os.environ.update(zip(LAUNCHER_VARIABLES, values, strict=True))
    elif os.environ["MASTER_PORT"] == OF_DEEPSPEED and os.environ.get("CROSS_SIZE") == "1":
        # all ranks of one launcher on a machine choose this port alike, and ranks of other launchers do not
        os.environ["MASTER_PORT"] = str(LOWEST_PORT + os.getppid() % (_first_ephemeral_port() - LOWEST_PORT))


def _mpi_ranks() -> tuple[str, ...]:
    """Return the values of LAUNCHER_VARIABLES."""
    try:
        from mpi4py import MPI
    except ImportError:
        raise UserError("under mpirun the ranks are found through mpi4py: pip install 'mst_scale[mpi]'") from None
    world = MPI.COMM_WORLD
    hosts = world.allgather(MPI.Get_processor_name())
    rank = world.Get_rank()
    # A single host needs no name service.
    address = "127.0.0.1" if len(set(hosts)) == 1 else socket.getfqdn()
    address, port = world.bcast((address, free_port()) if rank == 0 else None, root=0)
    local_rank = hosts[:rank].count(hosts[rank])
    return str(rank), str(local_rank), str(world.Get_size()), address, str(port)


def free_port() -> int:
    """Return a port for the rendezvous that the system does not assign to other connections in the meantime."""
    for port in random.SystemRandom().sample(range(LOWEST_PORT, _first_ephemeral_port()), 50):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"no free port was found above {LOWEST_PORT}: choose one with --master_port")


def _first_ephemeral_port() -> int:
    """Return the first port that the system assigns to connections (IANA's value if it cannot be read)."""
    with contextlib.suppress(OSError, ValueError), open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first = int(file.read().split()[0])
        if first >= 2 * LOWEST_PORT:
            return first
    return 49152
