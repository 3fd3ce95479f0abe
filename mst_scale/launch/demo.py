"""
Pretrain the small GPT of ds_configs/demo.json on two processes of this machine, into runs/demo.

  bash launchers/demo.sh [arguments of mst_scale.pretrain]

A demo that has finished is shown again, and one that was stopped continues. For a new one remove runs/demo.
"""

from __future__ import annotations

from mst_scale.launch import local
from mst_scale.launch.environment import count_gpus, set_default


def main(words: list[str]) -> int:
    """Run the demo; all words go to `mst_scale.pretrain`."""
    if count_gpus() == 0:
        set_default("OMP_NUM_THREADS", "1")
    return local.run("ds_configs/demo.json", ["--out", "runs/demo", *words], processes=min(count_gpus() or 2, 2))
