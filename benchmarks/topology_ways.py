"""Implements one topology step with our algorithm and with the usual ones, on the matrices of a GPT.

`benchmarks.topology` describes `naive` and `kthvalue`. All use the same `State` and only differ in the random part.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from mst_scale.comm.exchange import Exchange
from mst_scale.mixed_growing.distribution import active_counts, plan
from mst_scale.mixed_growing.evolve import Layer, evolve
from mst_scale.mixed_growing.masks import LayerMask
from mst_scale.mixed_growing.policies import POLICIES
from mst_scale.shard import Shard

SPARSITY, ZETA, RANDOM_SHARE = 0.96, 0.3, POLICIES["mst"].random_share
CPU = torch.device("cpu")
Shape = tuple[int, int]


def gpt(layers: int, width: int) -> list[Shape]:
    """Weight matrices of a GPT-2: qkv, projection, up, down per block, and the tied head."""
    block = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    return block * layers + [(50304, width)]


SHAPES = {"gpt2": gpt(12, 768), "gpt3-1.3b": gpt(24, 2048)}


class State:
    """The matrices of one rank: whole ones for the baselines, slices of the same memory for us."""

    def __init__(self, shapes: list[Shape], rank: int, ranks: int, shared: bool):
        sizes = [math.prod(shape) for shape in shapes]
        self.targets = active_counts(shapes, SPARSITY)
        generator = torch.Generator().manual_seed(0)

        def buffers(scale: float) -> list[Tensor]:
            if shared:
                largest = torch.randn(max(sizes), generator=generator) * scale
                return [largest[:size] for size in sizes]
            return [torch.randn(size, generator=generator) * scale for size in sizes]

        def draw(size: int, target: int) -> Tensor:
            mask = torch.rand(size, generator=generator) < 1.2 * target / size
            active = mask.nonzero().view(-1)
            mask[active[torch.randperm(active.numel(), generator=generator)[target:]]] = False
            return mask

        self.weights, self.gradients = buffers(0.02), buffers(1e-4)
        drawn: dict[Shape, Tensor] = {}
        self.masks: list[Tensor] = []
        self.layers: list[Layer] = []
        for i, (shape, size, target) in enumerate(zip(shapes, sizes, self.targets, strict=True)):
            if shared and shape in shapes[:i]:
                mask = drawn[shape]
            else:
                mask = drawn[shape] = draw(size, target)
            if not shared:
                self.weights[i].mul_(mask)
                self.masks.append(mask)
            begin, end = rank * size // ranks, (rank + 1) * size // ranks
            sharded = LayerMask(Shard.of_range(f"matrix{i}", shape, begin, end - begin), CPU)
            sharded.set_flags(mask[begin:end], target)
            self.layers.append(Layer(sharded, target, self.weights[i][begin:end], self.gradients[i][begin:end]))
        self.bits = [layer.mask.bits.clone() for layer in self.layers if layer.mask.bits is not None]

    def restore(self) -> None:
        """Back to the masks before the step."""
        for layer, bits in zip(self.layers, self.bits, strict=True):
            layer.mask.set_bits(bits.clone(), layer.target)


def ours(state: State, exchange: Exchange) -> None:
    """Take one topology step with `evolve`."""
    evolve(state.layers, policy=POLICIES["mst"], update_fraction=ZETA, seed=0, step=50_000, exchange=exchange)


def naive(state: State, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Full sorts of replicated scores."""
    generator = torch.Generator().manual_seed(0)
    new = []
    for mask, weight, gradient, target in zip(state.masks, state.weights, state.gradients, state.targets, strict=True):
        counts = plan(mask.numel(), target, target, ZETA, RANDOM_SHARE, True)
        drop, grow = weight.abs(), gradient.abs()
        if group is not None:
            dist.all_reduce(drop, group=group)
            dist.all_reduce(grow, group=group)
        drop.masked_fill_(~mask, -1)
        active = torch.zeros_like(mask)
        active[torch.topk(drop, mask.numel()).indices[: target - counts.prune]] = True
        order = torch.topk(grow.masked_fill_(active, -1), mask.numel()).indices
        active[order[: counts.by_score]] = True
        free = (~active).nonzero().view(-1)
        active[free[torch.randperm(free.numel(), generator=generator)[: counts.by_random]]] = True
        new.append(active)
    return new


def kthvalue(state: State) -> list[Tensor]:
    """The k-th score of every matrix and a comparison; one process."""
    generator = torch.Generator().manual_seed(0)
    new = []
    for mask, weight, gradient, target in zip(state.masks, state.weights, state.gradients, state.targets, strict=True):
        size = mask.numel()
        counts = plan(size, target, target, ZETA, RANDOM_SHARE, True)
        at = mask.nonzero().view(-1)
        drop = weight[at].abs_()
        active = mask.clone()
        active[at[drop <= drop.kthvalue(counts.prune).values]] = False
        grow = gradient.abs().masked_fill_(active, -1)
        active |= grow >= grow.kthvalue(size - counts.by_score + 1).values
        drawn = torch.randint(size, (2 * counts.by_random + 100,), generator=generator)
        drawn = drawn[~active[drawn]].unique()
        active[drawn[torch.randperm(drawn.numel(), generator=generator)[: counts.by_random]]] = True
        gradient.square().mean()
        new.append(active)
    return new
