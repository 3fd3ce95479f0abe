"""Writes the table of expected speed-ups in docs/blocks.md: `python -m mst_scale.plan.expected_page`.

One GPU with an eighth of the ready config's batch, in its micro-batches: communication and memory are not asked.
"""

from __future__ import annotations

from dataclasses import replace

from mst_scale.config import load
from mst_scale.plan.expected import by_side
from mst_scale.plan.gpus import machine
from mst_scale.plan.setting import setting_of
from mst_scale.plan.skipping import SIDES

CARDS = {"A100": "a100-80gb", "H100": "h100-80gb"}
CONFIGS = ("gpt2_small", "gpt2_xl", "gpt3_6.7b", "gpt3_13b", "gpt3_175b")


def table() -> str:
    """Of a step in the ultra-sparse phase against a dense one, and of its products with weights in brackets."""
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
    print(table())
