"""Prints the table of docs/blocks.md: speedups of a step in the sparsest phase, and of its products in parentheses.

For one GPU with an eighth of the ready-made config's batch: communication and memory are not included.
"""

from dataclasses import replace

from mst_scale.config import load
from mst_scale.plan.gpus import machine
from mst_scale.plan.roofline import SIDES
from mst_scale.plan.setting import setting_of
from mst_scale.plan.step_time import by_side

CARDS = {"A100": "a100-80gb", "H100": "h100-80gb"}
CONFIGS = ("gpt2_small", "gpt2_xl", "gpt3_6.7b", "gpt3_13b", "gpt3_175b")


def blocks_table() -> str:
    """Return the table in Markdown."""
    lines = [f"| width | config | {' | '.join(f'{card}, {side}' for card in CARDS for side in SIDES)} |"]
    lines.append("|---" * (2 + len(CARDS) * len(SIDES)) + "|")
    for name in CONFIGS:
        experiment = load(name)
        alone = replace(setting_of(experiment, 8), ranks=1)
        found = [side for card in CARDS.values() for side in by_side(experiment, alone, machine(card, 1))[1:]]
        cells = [f"{side.speedup:.1f} ({side.products:.1f})" for side in found]
        lines.append(f"| {experiment.model.n_embd:,} | `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(blocks_table())
