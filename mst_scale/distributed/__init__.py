"""Ranks that speak with one voice.

launch     what the launcher has told this process; a port to meet at
messages   of rank 0, on stderr
errors     one line and an exit code for what went wrong
exits      how a rank ends so that everybody learns why
group      the ranks together: decide, raise, leave
votes      what all ranks say of a step, without waiting
peers      which rank has gone, told to the others
mesh       who shares a layer, a sequence, a batch
parser     a wrong option is one line, on one rank
"""

from mst_scale.distributed.errors import FailedElsewhere, SharedMistake, exit_code, is_plain, one_line, shown
from mst_scale.distributed.exits import end, end_with_launcher, leave, tell_launcher, thread_failed
from mst_scale.distributed.group import Ranks, init
from mst_scale.distributed.launch import complete_environment, free_port, launched_rank, several, timeout, under_mpi
from mst_scale.distributed.mesh import Mesh, Sizes
from mst_scale.distributed.messages import logger, may_rewrite, speak
from mst_scale.distributed.peers import Watch
from mst_scale.distributed.votes import Verdict, Votes
from mst_scale.errors import Damaged

__all__ = [
    "Damaged",
    "FailedElsewhere",
    "Mesh",
    "Ranks",
    "SharedMistake",
    "Sizes",
    "Verdict",
    "Votes",
    "Watch",
    "complete_environment",
    "end",
    "end_with_launcher",
    "exit_code",
    "free_port",
    "init",
    "is_plain",
    "launched_rank",
    "leave",
    "logger",
    "may_rewrite",
    "one_line",
    "several",
    "shown",
    "speak",
    "tell_launcher",
    "thread_failed",
    "timeout",
    "under_mpi",
]
