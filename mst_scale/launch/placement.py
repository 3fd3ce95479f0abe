"""Checks that ranks which share a layer stay on one node, before anything runs.

Ranks fill one node after the other, and neighbors share a layer (DeepSpeed's `tensor_parallel.autotp_size`), so whole
groups on every node are enough. Whatever else is wrong with a config is reported by `mst_scale.pretrain`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from mst_scale.config.load import load
from mst_scale.config.parallel import KEYS, sizes_of
from mst_scale.config.ready import config_file
from mst_scale.errors import UserError


def check_groups(
    config: str, nodes: Iterable[tuple[str, int]], arguments: Sequence[str], mapped_by: str | None = None
) -> None:
    """Reject a start that would split a tensor-parallel group over two nodes.

    Args:
        config: The experiment, as given to the launcher.
        nodes: Names of nodes with the number of processes of each; a node may come several times.
        arguments: The other arguments of `mst_scale.pretrain`.
        mapped_by: An option of mpirun by which ranks take another order.

    Raises:
        UserError: A group would leave its node, or might.
    """
    path = config_file(config)
    if not any("autotp_size" in word for word in arguments) and "autotp_size" not in path.read_text(errors="replace"):
        return
    try:
        tensor = sizes_of(load(config, overrides(arguments)).deepspeed).tensor
    except (UserError, OSError):
        return  # pretrain reports it
    stated = f"{KEYS['tensor']} = {tensor}"
    if tensor > 1 and mapped_by is not None:
        raise UserError(f"{stated} needs neighboring ranks on one node: leave {mapped_by} out")
    processes: Counter[str] = Counter()
    for node, count in nodes:
        processes[node] += count
    for node, count in processes.items():
        if count % tensor:
            raise UserError(
                f"{stated}: the {count} processes of {node} cannot be divided into groups of {tensor}, which must not "
                f"span nodes: start a multiple of it on each node, or --set {KEYS['tensor']}={math.gcd(count, tensor)}"
            )


def overrides(arguments: Sequence[str]) -> list[str]:
    """Return the values of --set among the arguments of pretrain."""
    stated = [after for word, after in pairwise(arguments) if word == "--set"]
    return stated + [word.removeprefix("--set=") for word in arguments if word.startswith("--set=")]
