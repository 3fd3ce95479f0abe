"""PART 1 of Mixed Sparsity Training, Sparsity Variation: the target sparsity and the update fraction of every step.

schedule   phase, target sparsity and update fraction of each step, and which steps change the masks
config     the block `mst.sparsity`, and the schedule that it states for a run
"""

# ruff: noqa: F401 (the names that other packages use)

from mst_scale.sparsity_variation.config import DURATIONS, LIMITED, MIN_DEFAULT_INTERVAL, SparsityConfig
from mst_scale.sparsity_variation.schedule import PHASES, Phase, Point, Schedule, Segment
