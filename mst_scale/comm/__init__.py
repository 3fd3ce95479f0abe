"""Communication between the ranks of a run: process groups, agreement on errors, detection of lost ranks, exits.

launch     reads the launcher's environment and finds a free port
messages   logging: messages of rank 0, errors of every rank
exits      ends a rank with one line and an exit code
groups     creates process groups by name
ranks      all ranks of a run: their rendezvous, shared decisions and errors
mesh       pipeline, data, sequence and tensor parallelism
exchange   the small all-reduces of masks; errors that all ranks raise together
watchdog   detects a rank that is lost or makes no progress, and ends the others
stragglers names a rank that is slow but works
own_loops  the watchdog and the timeout of your own training loops
parser     command lines whose errors are one line, on one rank
"""

# ruff: noqa: F401 (the names that other packages use)

from typing import Any

from mst_scale import _deprecated
from mst_scale.comm.exits import (
    FailedElsewhere,
    SharedMistake,
    end,
    end_with_launcher,
    exit_code,
    is_out_of_memory,
    is_plain,
    leave,
    notify_launcher,
    one_line,
    run_program,
    thread_failed,
)
from mst_scale.comm.groups import new_group
from mst_scale.comm.launch import complete_environment, free_port, launched_rank, several, timeout, under_mpi
from mst_scale.comm.mesh import Mesh, ParallelDims
from mst_scale.comm.messages import logger, may_rewrite, speak
from mst_scale.comm.ranks import Ranks, Verdict, Votes, init
from mst_scale.comm.watchdog import Watch
from mst_scale.errors import Damaged


def __getattr__(name: str) -> Any:
    return _deprecated.renamed(__name__, name)
