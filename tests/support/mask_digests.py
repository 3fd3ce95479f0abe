"""Prints digests of the masks that every way of choosing makes of fixed weights and gradients, as one JSON object.

Run as a program under limits of the CPU's instructions, it shows whether masks depend on them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from mst_scale.comm.exchange import Exchange
from mst_scale.methods.baselines.n_of_m import kept_both_ways, kept_of, soft_threshold
from mst_scale.methods.baselines.spartan import SoftlyMasked
from mst_scale.methods.baselines.top_kast import largest
from mst_scale.mixed_growing.blocks import Blocks, Elements
from mst_scale.mixed_growing.evolve import Layer
from mst_scale.mixed_growing.masks import LayerMask, sha256
from mst_scale.mixed_growing.policies import POLICIES
from mst_scale.shard import Shard
from tests.support.growing_cases import CPU, KINDS, scores

SHAPE = (96, 132)  # whole groups of 4 in both directions


def inputs(kind: str, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Flags of half of the weights, weights that are zero elsewhere, gradient, momentum; flat.

    Drawn by NumPy: torch's normal numbers depend on the width of the CPU's vectors.
    """
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    size = SHAPE[0] * SHAPE[1]
    squares = rng.random((SHAPE[0] // 4, SHAPE[1] // 4)) < 0.5
    flags = torch.from_numpy(np.kron(squares, np.ones((4, 4), bool))).view(-1)
    weight, gradient, momentum = (torch.from_numpy(scores(rng, size, kind)) for _ in range(3))
    return flags, weight.masked_fill(~flags, 0), gradient, momentum


def evolved(kind: str, name: str, elements: Elements | Blocks) -> tuple[str, str]:
    """The digest of a mask after one topology step, and what the moments of grown weights start from."""
    flags, *tensors = inputs(kind, 1)
    mask = LayerMask(Shard.of_range("layer", SHAPE, 0, flags.numel()), CPU)
    mask.set_flags(flags, int(flags.sum()))
    grid = elements.grid_shape(SHAPE)
    (change,) = elements.evolve(
        [Layer(mask, int(0.4 * grid[0] * grid[1]), *tensors)],
        policy=POLICIES[name], update_fraction=0.3, seed=3, step=100, exchange=Exchange(),
    )  # fmt: skip
    return sha256(mask.flags()), repr(change.gradient_mean_square)


def digests() -> Iterator[tuple[str, object]]:
    for kind in KINDS:
        for name in POLICIES:
            yield f"{kind} {name}", evolved(kind, name, Elements())
        yield f"{kind} blocks", evolved(kind, "mst", Blocks(4, 1))
        matrix = inputs(kind, 2)[2].view(SHAPE)
        yield f"{kind} largest", sha256(largest(matrix, 5000))
        if torch.isfinite(matrix).all():
            yield f"{kind} spartan", sha256(SoftlyMasked.apply(matrix, 5000, 10.0) != 0)
        yield f"{kind} 2 of 4", sha256(kept_of(matrix, 2, 4))
        yield f"{kind} 2 of 4 softly", sha256(soft_threshold(matrix, 2, 4) != 0)
        yield f"{kind} 2 of 4 both ways", sha256(kept_both_ways(matrix))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"cpu": torch.backends.cpu.get_cpu_capability(), "masks": dict(digests())}))
