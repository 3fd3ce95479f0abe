"""Refuses a start whose tensor-parallel groups would leave their nodes; the launchers ask before anything runs.

    python -m mst_scale.config.placement CONFIG NODE=PROCESSES … [--mapped OPTION] -- [arguments of pretrain]

Ranks fill one node after the other, and neighbours share a layer: whole groups on every node are enough. Prints one
line and ends with 2 where that does not hold. What else is wrong with a config, pretrain says.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from mst_scale.config.load import load
from mst_scale.config.parallel import KEYS, sizes_of
from mst_scale.errors import UserError


def refusal(tensor: int, nodes: Mapping[str, int], mapped: str = "") -> str | None:
    """What to say; None where every group stays in a node. `mapped`: an option by which ranks take another order."""
    if tensor == 1:
        return None
    stated = f"{KEYS['tensor']} = {tensor}"
    if mapped:
        return f"{stated} needs neighbouring ranks on one node: leave {mapped} out"
    for node, processes in nodes.items():
        if processes % tensor:
            fits = math.gcd(processes, tensor)
            return (
                f"{stated}: the {processes} processes of {node} are not whole groups, and one would leave its node: "
                f"start a multiple of {tensor} on each, or --set {KEYS['tensor']}={fits}"
            )
    return None


def overrides(arguments: Sequence[str]) -> list[str]:
    """What --set says among the arguments of pretrain."""
    stated = [after for word, after in pairwise(arguments) if word == "--set"]
    return stated + [word.removeprefix("--set=") for word in arguments if word.startswith("--set=")]


def main(words: Sequence[str]) -> int:
    cut = words.index("--")
    (config, *nodes), arguments = words[:cut], words[cut + 1 :]
    mapped = ""
    if "--mapped" in nodes:
        at = nodes.index("--mapped")
        nodes, mapped = nodes[:at], nodes[at + 1]
    try:
        tensor = sizes_of(load(config, overrides(arguments)).deepspeed).tensor
    except (UserError, OSError):
        return 0
    counts: Counter[str] = Counter()
    for node in nodes:
        name, _, number = node.rpartition("=")
        counts[name] += int(number)  # a node may have several lines
    said = refusal(tensor, counts, mapped)
    if said:
        print(said)
    return 2 if said else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
