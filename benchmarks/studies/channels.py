"""Writes masks with whole active channels: a prototype of a coarser granularity, for method `fixed`.

    python -m mst_scale.benchmarks.studies.channels --width 128 --out corpora/study/channels-128.safetensors

Neurons of the MLPs, and value and query-key channels of each head, are active or inactive as a whole. They are drawn at
random, with the same number in every head. Products with such masks are smaller dense products, which are faster on any
GPU without special kernels. Embedding and head stay dense. This program is for measuring the loss; it saves no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from mst_scale.checkpoints import open_masks
from mst_scale.comm.parser import Parser, at_least
from mst_scale.config import ModelConfig
from mst_scale.dead_units.units import Units, find_units
from mst_scale.errors import UserError
from mst_scale.models import GPT


def channel_masks(model: torch.nn.Module, heads: int, density: float, seed: int) -> dict[str, torch.Tensor]:
    """Return the mask of each matrix by name: true in the lines of active units, false in those of others."""
    generator = torch.Generator().manual_seed(seed)
    masks: dict[str, torch.Tensor] = {}
    for units in find_units(model)[0]:
        active = active_units(units, heads, density, generator)
        for factor in units.factors:
            lines, shape = factor.weight, tuple(model.get_parameter(factor.weight.name).shape)
            mask = masks.setdefault(lines.name, torch.ones(shape, dtype=torch.bool))
            dead = lines.spread(~active, shape[lines.axis])
            mask[dead if lines.axis == 0 else (slice(None), dead)] = False
    return masks


def active_units(units: Units, heads: int, density: float, generator: torch.Generator) -> torch.Tensor:
    """Return which units are active, equally many in each head."""
    groups = 1 if units.kind == "mlp" else heads
    size = units.count // groups
    keep = max(1, round(density * size))
    active = torch.zeros(groups, size, dtype=torch.bool)
    for group in active:
        group[torch.randperm(size, generator=generator)[:keep]] = True
    return active.view(-1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its results."""
    parser = Parser(prog="python -m mst_scale.benchmarks.studies.channels", description=__doc__)
    parser.add_argument("--width", type=at_least(1), required=True, help="of the model, model.n_embd")
    parser.add_argument("--layers", type=at_least(1), default=2, help="(default: %(default)s)")
    parser.add_argument("--heads", type=at_least(1), default=4, help="(default: %(default)s)")
    parser.add_argument(
        "--density", type=at_least(0.0), default=0.2, help="fraction of active units (default: %(default)s)"
    )
    parser.add_argument("--seed", type=at_least(0), default=1, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(arguments)
    if not 0 < options.density < 1:
        raise UserError(f"--density {options.density}: give the share of units that live, above 0 and below 1")
    config = ModelConfig(n_layer=options.layers, n_head=options.heads, n_embd=options.width, seq_length=8, vocab_size=8)
    masks = channel_masks(GPT(config), options.heads, options.density, options.seed)
    open_masks.write(options.out, masks.items())
    kept, total = sum(int(m.sum()) for m in masks.values()), sum(m.numel() for m in masks.values())
    print(f"{options.out}: {len(masks)} matrices, {kept / total:.1%} of their weights active")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
