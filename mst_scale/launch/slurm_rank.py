"""
Start the ranks of one node through DeepSpeed's launcher, as a task of a Slurm step.

  bash launchers/slurm_rank.sh RANKS MODULE [arguments of the module]
"""

from __future__ import annotations

import base64
import json
import os
import sys

from mst_scale.launch import node


def main(words: list[str]) -> int:
    """Run DeepSpeed's launcher and return its exit code."""
    ranks, module, *arguments = words
    nodes = int(os.environ["SLURM_NNODES"])
    number = os.environ["SLURM_NODEID"]
    # the form in which DeepSpeed's launcher takes it; with the nodes' numbers for names
    world = json.dumps({f"node{n}": list(range(int(ranks))) for n in range(nodes)})
    # the doctor takes no --local_rank, which DeepSpeed's launcher would put before its verb
    no_local_rank = [] if module == "mst_scale.pretrain" else ["--no_local_rank"]
    command = [
        sys.executable, "-u", "-m", "deepspeed.launcher.launch",
        f"--world_info={base64.urlsafe_b64encode(world.encode()).decode()}", f"--node_rank={number}",
        f"--master_addr={os.environ['MASTER_ADDR']}", f"--master_port={os.environ['MASTER_PORT']}",
        "--log_level=error", "--module", *no_local_rank, module, *arguments,
    ]  # fmt: skip
    return node.run(f"{os.environ['SLURM_JOB_ID']}-{number}", command)
