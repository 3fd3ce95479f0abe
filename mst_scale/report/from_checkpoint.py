"""Reads the weights of a run that has no snapshots (its folder was copied, or cleaned up) from a checkpoint.

The figures are then of the newest whole checkpoint alone, not of the end of each phase. One matrix is read at a time.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from mst_scale.checkpoints import mask_files, store
from mst_scale.checkpoints.multiplied import multiplied_weights_of
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.masks import assemble
from mst_scale.runs import snapshots
from mst_scale.runs.observer import cell_sizes, cell_sums, describe
from mst_scale.runs.snapshots import Snapshot
from mst_scale.shard import Shard

EMBEDDINGS = ("wte.", "wpe.", "embeddings.")  # of a dense run, whose checkpoint does not say what could be sparse


def look(checkpoint: Path) -> Snapshot:
    weights = multiplied_weights_of(checkpoint)
    masks = mask_files.read_all(checkpoint) if (checkpoint / mask_files.FOLDER).is_dir() else None
    if masks is not None:
        names = masks.head["names"]
    else:
        names = [n for n, s in weights.shapes.items() if len(s) > 1 and not n.startswith(EMBEDDINGS)]
    drawn, matrices = snapshots.pictured(names), []
    pictures: dict[str, np.ndarray] = {}
    alive: dict[str, np.ndarray] = {}
    total = active = 0
    for name in names:
        values = weights.read(name).detach().flatten()
        shard = Shard.whole(name, weights.shapes[name])
        shape = shard.cut.matrix
        living = torch.ones(values.numel(), dtype=torch.bool)
        if masks is not None:
            living = packed_bits.unpack(assemble(masks.shards(name), name), values.numel())
        count = int(living.sum())
        total, active = total + values.numel(), active + count
        sums = [float(values.sum(dtype=torch.float64)), float(values.double().square().sum())]
        matrices.append(describe(name, shape, count, sums, float(values.abs().max())))
        if name in drawn:
            pictures[name] = cell_sums(values, shard, magnitude=True).numpy() / cell_sizes(shape)
            alive[name] = cell_sums(living, shard).numpy() / cell_sizes(shape)
    manifest = store.head(checkpoint) or {}
    step = int(manifest.get("step") or (masks.head["step"] if masks is not None else 0))
    phase = masks.head["phase"] if masks is not None else "dense"
    parameters = sum(math.prod(shape) for shape in weights.shapes.values())
    sparsity = 1 - active / total if total else 0.0
    return Snapshot(step, phase, sparsity, parameters, matrices, pictures, alive)
