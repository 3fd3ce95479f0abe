"""A prototype of a coarser granularity that moves: inner channels live and die, are pruned, born and exchanged.

    python -m mst_scale.benchmarks.studies.live_channels --deepspeed_config CONFIG --out DIR

It is `mst_scale.pretrain` with one more method, `channels`. Neurons of the MLPs, value channels and
query-key channels of each head are alive or not as wholes, the same share of every head and MLP, so that all products,
those of attention too, are dense ones of that share of the size. The other keys of the `mst` block mean what they mean
for `mst`: at a topology step a share ζ of the living is pruned and as many are born, R of these drawn at random.

    pruned     the smallest product of the norms of a unit's lines, which is how much it can add
    born       with random incoming weights, as long as those of the living, and outgoing ones of zero: nothing jumps
    by score   all dead units are given such incoming weights, and the last batch a gradient at their outgoing lines;
               the largest norms are born with the weights that they were tried with

The loss is what this shows: nothing here is faster, nor need it be. FLOPs are those of the narrower products, attention
included; a try takes one more forward and backward pass, which is not counted (0.7 % of a run at most).
One process, float32, ZeRO 0, dense products.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mst_scale.config import Experiment
from mst_scale.dead_units.units import Factor, Units, find_units
from mst_scale.engine import api
from mst_scale.engine.sparse import SparseController
from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention import Pattern
from mst_scale.methods import Method, register
from mst_scale.mixed_growing import packed_bits as bitwise
from mst_scale.mixed_growing.blocks import Elements
from mst_scale.mixed_growing.evolve import Change, Layer
from mst_scale.mixed_growing.exchange import Exchange
from mst_scale.mixed_growing.policies import Policy
from mst_scale.pretrain.start import main
from mst_scale.randomness import counter_hash
from mst_scale.zero_shards import named_parameters

NAME = "channels"
SCATTERED = 0.5  # of the living weights, where single weights take over


@dataclass(frozen=True)
class Options:
    """The block mst.options of method `channels`."""

    weights_from: float = 1.0
    """The share of the run after which single weights live and die, no longer channels."""

    def __post_init__(self) -> None:
        if not 0 < self.weights_from <= 1:
            raise UserError(f"mst.options.weights_from must lie in (0, 1], not {self.weights_from}")


METHOD = Method(
    "whole inner channels live and die: a prototype",
    {
        "sparsity": {"initial": "random", "distribution": "uniform"},
        "topology": {"policy": "mst", "random_ratio": 1.0, "grown_moments": "living", "wake_dead_units": False},
        "targets": {"lm_head": False},
        "compute": {"backend": "dense"},
    },
    options=Options,
)

Key = tuple[str, int]


@dataclass(frozen=True)
class Narrow(Pattern):
    """A pattern of heads that have a share of their channels."""

    width: float = 1.0

    def share(self, length: int, accounting: str = "paper", causal: bool = True) -> float:
        """The share of dense attention that is computed."""
        return self.width * super().share(length, accounting, causal)


@dataclass(frozen=True)
class Group:
    """Units that share a budget: those of an MLP, or one kind's of a head."""

    units: Units
    first: int
    size: int

    @property
    def key(self) -> Key:
        """What identifies the group."""
        return self.units.factors[-1].weight.name + self.units.kind, self.first

    @property
    def incoming(self) -> Sequence[Factor]:
        """The matrices whose rows feed the units."""
        return self.units.factors[:-1]

    @property
    def outgoing(self) -> Factor:
        """The matrix that reads the units."""
        return self.units.factors[-1]

    def lines(self, factor: Factor, tensor: Tensor) -> Tensor:
        """A view of a matrix: one row a unit of the group."""
        lines = factor.weight
        start = lines.first + self.first
        return (tensor if lines.axis == 0 else tensor.T)[start : start + self.size]


@dataclass(frozen=True)
class Now:
    """The step under way: the matrices, which units live, and the source of its numbers."""

    weights: Mapping[str, Tensor]
    alive: Mapping[Key, Tensor]
    draw: torch.Generator


class Channels:
    """What lives and dies together, in place of `Elements` and `Blocks`. Masks say all of its state."""

    side = Elements.side
    words = " in whole channels, exchanged"

    def __init__(self, module: torch.nn.Module, heads: int, weights_from: int) -> None:
        self.module, self.weights_from = module, weights_from
        self.parameters = dict(named_parameters(module))
        self.groups = []
        for units in find_units(module)[0]:
            size = units.count // (1 if units.kind == "mlp" else heads)
            self.groups += [Group(units, first, size) for first in range(0, units.count, size)]
        self.batch: tuple[Any, ...] = ()
        module.register_forward_pre_hook(self._remember)

    def _remember(self, module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        if module.training:
            self.batch = given

    def grid_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """See `Elements`."""
        return tuple(shape)

    def at_least(self, shape: Sequence[int]) -> int:
        """See `Elements`."""
        return 0

    def sparsify(self, layers: Sequence[Layer], *, how: str, seed: int, exchange: Exchange) -> list[Change]:
        """Draw the first active channels at random."""
        if how != "random":
            raise UserError(f"mst.sparsity.initial = {how}: channels begin at random")
        draw = torch.Generator().manual_seed(counter_hash("channels", seed) >> 1)
        alive = {}
        for group in self.groups:
            flags = alive[group.key] = torch.zeros(group.size, dtype=torch.bool)
            flags[torch.randperm(group.size, generator=draw)[: wanted(layers, group)]] = True
        for layer in layers:
            if layer.mask.ever is not None:
                layer.mask.ever.zero_()  # the dense start was never trained
        return self._commit(layers, alive)

    def evolve(
        self,
        layers: Sequence[Layer],
        *,
        policy: Policy,
        update_fraction: float,
        seed: int,
        step: int,
        exchange: Exchange,
        **more: Any,
    ) -> list[Change]:
        """Prune and grow channels, or single weights after `weights_from`."""
        how: dict[str, Any] = {
            "policy": policy,
            "update_fraction": update_fraction,
            "seed": seed,
            "step": step,
            "exchange": exchange,
        }
        single = step > self.weights_from
        if single and not self._whole(layers):
            return Elements.evolve(layers, **how, **more)
        now = Now(
            {layer.mask.name: layer.weight.view(layer.mask.shape) for layer in layers},
            {group.key: self._alive(layers, group) for group in self.groups},
            torch.Generator().manual_seed(counter_hash("channels", seed, step) >> 1),
        )
        if single and layers[0].target < layers[0].mask.numel:
            return self._scatter(layers, now, {**how, **more, "update_fraction": SCATTERED})
        self._try(now)
        slopes = self._slopes(now) if policy.random_share < 1 else {}
        alive = {}
        for group in self.groups:
            target, swaps = wanted(layers, group), math.floor(update_fraction * int(now.alive[group.key].sum()))
            alive[group.key] = exchanged(
                now, group, target, swaps, random_share=policy.random_share, slopes=slopes.get(group.key)
            )
            for factor in group.incoming:  # of those that are not born
                group.lines(factor, now.weights[factor.weight.name])[~now.alive[group.key] & ~alive[group.key]] = 0
        return self._commit(layers, alive)

    def _alive(self, layers: Sequence[Layer], group: Group) -> Tensor:
        lines = group.outgoing.weight
        mask = next(layer.mask for layer in layers if layer.mask.name == lines.name)
        return group.lines(group.outgoing, mask.flags().view(mask.shape)).any(1)

    def _whole(self, layers: Sequence[Layer]) -> bool:
        """Whether masks are still of whole channels."""
        masks = {layer.mask.name: layer.mask.flags().view(layer.mask.shape) for layer in layers}
        parts = [group.lines(f, masks[f.weight.name]) for group in self.groups for f in group.units.factors]
        return all(torch.equal(part.any(1), part.all(1)) for part in parts)

    def _try(self, now: Now) -> None:
        """Random incoming weights for what is dead, as long as those of the living."""
        for group in self.groups:
            alive = now.alive[group.key]
            for factor in group.incoming:
                lines = group.lines(factor, now.weights[factor.weight.name])
                size = lines[alive].square().mean().sqrt()
                lines[~alive] = size * torch.randn((int((~alive).sum()), lines.shape[1]), generator=now.draw)

    def _slopes(self, now: Now) -> dict[Key, Tensor]:
        """Norms of the last batch's gradient at the outgoing lines."""
        names = sorted({group.outgoing.weight.name for group in self.groups})
        asked = [self.parameters[name] for name in names]
        for name, parameter in zip(names, asked, strict=True):
            if parameter.data_ptr() != now.weights[name].data_ptr():
                raise UserError("channels grow by gradient where the optimizer has the model's own weights: float32")
        with torch.enable_grad():
            gradients = torch.autograd.grad(self.module(*self.batch), asked)
        of = dict(zip(names, gradients, strict=True))
        return {g.key: g.lines(g.outgoing, of[g.outgoing.weight.name]).norm(dim=1) for g in self.groups}

    def _commit(self, layers: Sequence[Layer], alive: Mapping[Key, Tensor]) -> list[Change]:
        masks = {layer.mask.name: torch.ones(layer.mask.shape, dtype=torch.bool) for layer in layers}
        for group in self.groups:
            for factor in group.units.factors:
                group.lines(factor, masks[factor.weight.name])[~alive[group.key]] = False
        return [taken(layer, masks[layer.mask.name].view(-1)) for layer in layers]

    def _scatter(self, layers: Sequence[Layer], now: Now, how: dict[str, Any]) -> list[Change]:
        """Single weights take over: the smaller half of them goes, as many are born anywhere, those that are incoming
        ones of a dead unit with random values, lest two zeros stand against each other."""
        before = {layer.mask.name: layer.mask.flags() for layer in layers}
        changes = Elements.evolve(layers, **how)
        grown = {x.mask.name: (x.mask.flags() & ~before[x.mask.name]).view(x.mask.shape) for x in layers}
        for group in self.groups:
            alive = now.alive[group.key]
            for factor in group.incoming:
                lines = group.lines(factor, now.weights[factor.weight.name])
                size = lines[alive].square().mean().sqrt()
                new = group.lines(factor, grown[factor.weight.name]) & ~alive[:, None]
                lines[new] = size * torch.randn(int(new.sum()), generator=now.draw)
        return changes


def wanted(layers: Sequence[Layer], group: Group) -> int:
    """How many units of a group shall live."""
    densities = {round(layer.target / layer.mask.numel, 3) for layer in layers}
    if len(densities) > 1:
        raise UserError("mst.sparsity.distribution: channels want the same share of every matrix, uniform")
    return max(1, round(layers[0].target / layers[0].mask.numel * group.size))


def importance(group: Group, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the product of the norms of each unit's weights."""
    norms = [group.lines(factor, weights[factor.weight.name]).norm(dim=1) for factor in group.units.factors]
    return torch.stack(norms).prod(0)


def exchanged(now: Now, group: Group, target: int, swaps: int, *, random_share: float, slopes: Tensor | None) -> Tensor:
    """The living after a step. What has just been pruned is not born again."""
    alive = now.alive[group.key]
    living, dead = alive.nonzero().view(-1), (~alive).nonzero().view(-1)
    prune = max(swaps, living.numel() - target)
    prune = min(prune, living.numel() - target + dead.numel())  # there is enough to be born
    born = target - living.numel() + prune
    after = alive.clone()
    after[living[importance(group, now.weights)[living].argsort()[:prune]]] = False
    by_score = 0 if slopes is None else born - math.floor(random_share * born)
    if slopes is not None:
        after[dead[slopes[dead].argsort(descending=True)[:by_score]]] = True
    dead = (~alive & ~after).nonzero().view(-1)
    after[dead[torch.randperm(dead.numel(), generator=now.draw)[: born - by_score]]] = True
    return after


def taken(layer: Layer, flags: Tensor) -> Change:
    """Give a matrix its new mask, and say what that has changed."""
    mask = layer.mask
    before, was = mask.flags(), mask.active
    mask.set_flags(flags, int(flags.sum()))
    gone, grown = before & ~flags, flags & ~before
    return Change(
        name=mask.name,
        numel=mask.numel,
        before=was,
        active=mask.active,
        pruned=int(gone.sum()),
        grown=int(grown.sum()),
        regrown=0,
        by_score=0,
        by_random=int(grown.sum()),
        ever_active=None if mask.ever is None else bitwise.count(mask.ever),
        length=mask.length,
        pruned_bits=bitwise.pack(gone),
        grown_bits=bitwise.pack(grown),
    )


class ChannelController(SparseController):
    """`engine.mst` of a run whose channels live and die."""

    def __init__(self, engine: Any, experiment: Experiment):
        mst, steps = experiment.mst, experiment.training.steps
        if engine.world_size > 1 or engine.zero_optimization_stage() or mst.compute.backend != "dense":
            raise UserError(
                "the prototype of channels runs in one process, at ZeRO 0, with mst.compute.backend = dense"
            )
        self.channels_until = round(mst.options.weights_from * steps)
        self.channels = Channels(engine.module, experiment.model.n_head, self.channels_until)
        super().__init__(engine, experiment)

    def _elements(self, stated: Any, names: list[str]) -> Channels:  # type: ignore[override]  # it has all that is asked of those
        return self.channels

    @property
    def pattern(self) -> Pattern:
        """The attention pattern, for the FLOPs of the active channels."""
        found = super().pattern
        if self.dense or self.step > self.channels_until:
            return found
        return Narrow(found.kind, found.stride, 1 - self.schedule.at(self.step).sparsity)


def _controller(engine: Any, experiment: Experiment) -> SparseController:
    return (ChannelController if experiment.mst.method == NAME else SparseController)(engine, experiment)


if __name__ == "__main__":
    register(NAME, METHOD)
    api.SparseController = _controller  # type: ignore[misc, assignment]
    main()
