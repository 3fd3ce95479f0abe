"""Counts the bytes that one topology step sends, and estimates its time on any number of ranks.

The layers that one optimizer call updates share their all-reduces (ZeRO-1/2: all of them; ZeRO-3: a sub-group). For W
layers that change, and for each selection (prune, grow by score, grow at random) A layers with a choice to make, A' of
them larger than 65,536 weights:

    largest scores, NaN check      8·W for each kind of score      one call; weights and gradients for mst, rigl, set, …
    prune, and grow by score       2 · 512·A' + 16·A               two histograms of a sample, the counts at a bracket
    grow at random                 16·A                            counts at a bracket
    refinement of each             4·2^b · (open layers) per round, until no layer is open
    mean g², totals                8·W, 24·W                       two calls

Masks made of blocks send 4 bytes per block and 8 for each kind of score instead. Then follow, of all L sparse layers,
16·L for the digests, and unless mst.compute.backend is dense 8·L to agree which of them use their masks in products,
and one bit per weight of these. ZeRO-0 sends nothing, since all replicas choose the same without exchanging anything. A
drift check (every `topology.check_every` steps) compares digests, and counts inactive weights that are not 0. Not
included are that count in the update after a topology step (16·L), and the count of dead units (a byte per row and
column at logged rows).

Only refinement depends on the weights (and a bracket that misses, which costs 16 bytes per layer once more). A layer
with c candidates in its bracket has λ = c/2^(b·r) others in its bin after r rounds, and is done if its k-th is the last
of them, with probability (1 - e^-λ)/λ. A plan assumes the rounds expected by this. `tests/ranks/plan/` compares every
call of real steps on 2 ranks with `calls`, given how many layers were open in each round, byte for byte, and the
expectation with real rounds.

Ranks that share a layer's matrices decide together with those that hold its shards; a pipeline's stages decide
independently, so a step sends the calls of its first stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from mst_scale.config import Experiment
from mst_scale.flops.ledger import grid_of
from mst_scale.mixed_growing.config import BlockGranularity, TopologyConfig
from mst_scale.mixed_growing.distribution import Plan, active_counts, plan
from mst_scale.mixed_growing.policies import BY_GRADIENT
from mst_scale.plan.gpus import Machine
from mst_scale.plan.memory import LISTED_WHOLE
from mst_scale.plan.roofline import in_channels, skips
from mst_scale.plan.setting import Parameter, Setting, groups, held, sparse_parameters, sub_groups
from mst_scale.plan.step_time import seconds
from mst_scale.plan.traffic import Call
from mst_scale.sparsity_variation import Schedule

# Of mixed_growing/top_k.py, which a test holds these to.
SAMPLE, SAMPLE_BINS, SIGMAS, SLACK = 1 << 14, 128, 6.0, 16
DIGIT_BITS, ROUND_BYTES = (6, 12), 1 << 14
KEY_BITS = 31
RANKS = tuple(4**k for k in range(8))  # 1 … 16,384


@dataclass(frozen=True)
class Layer:
    """What a topology step does to one parameter; counts are of its weights, or of its blocks."""

    parameter: Parameter
    elements: int
    before: int  # active before the step …
    after: int  # … and after it
    plan: Plan
    regrow: bool

    @property
    def changes(self) -> bool:
        """Whether anything is pruned or grown."""
        return self.plan.prune + self.plan.grow > 0

    @property
    def sparsity(self) -> float:
        """Sparsity after the step."""
        return 1 - self.after / self.elements

    def selection(self, which: str) -> tuple[int, int]:
        """(wanted, candidates) of prune, grow or random."""
        if which == "prune":
            return self.plan.prune, self.before
        free = self.elements - self.before + (self.plan.prune if self.regrow else 0)
        if which == "grow":
            return self.plan.by_score, free
        return self.plan.by_random, free - self.plan.by_score

    def chooses(self, which: str) -> bool:
        """Return whether the selection wants neither nothing nor everything."""
        wanted, candidates = self.selection(which)
        return 0 < wanted < candidates


def layers(experiment: Experiment, step: int) -> list[Layer]:
    """Return what the topology step at the end of optimizer step `step` does to every sparse layer."""
    mst, schedule, chosen = experiment.mst, experiment.schedule, experiment.mst.topology.chosen
    found = sparse_parameters(experiment.model, mst.targets)
    grids = [grid_of(p.shape, mst.topology) for p in found]
    now, then = schedule.at(step), schedule.at(step - 1)
    zeta = now.update_fraction if chosen.swaps else 0.0
    shapes, distribution = [grid.shape for grid in grids], mst.sparsity.distribution
    before, after = (active_counts(shapes, point.sparsity, distribution) for point in (then, now))
    result = []
    for p, grid, had, target in zip(found, grids, before, after, strict=True):
        elements, active, regrow = math.prod(grid.shape), max(had, grid.least), mst.topology.regrow
        wanted = plan(elements, active, target, zeta, chosen.random_share, regrow)
        result.append(Layer(p, elements, active, max(target, grid.least), wanted, regrow))
    return result


@dataclass(frozen=True)
class Calls:
    """The collectives of one topology step. Payloads as in `traffic`."""

    certain: list[Call]
    rounds: list[Call]  # of refinement, as many as were given or are expected
    masks: list[Call]  # of layers that multiply only with their active weights

    @property
    def all(self) -> list[Call]:
        """All of them."""
        return [*self.certain, *self.rounds, *self.masks]


def calls(
    experiment: Experiment, s: Setting, step: int, opened: Sequence[int] | None = None, again: Sequence[int] = ()
) -> Calls:
    """Return the collectives of the topology step at the end of optimizer step `step`.

    `opened` are the layers that were open in each round of refinement, by default the expected ones, and `again` those
    whose bracket missed, in each pass that took; none are expected to.
    """
    if s.stage == 0 and s.tensor == 1:
        return Calls([], [], [])
    here = {p.name for p in held(experiment.model, s)}
    everything = [layer for layer in layers(experiment, step) if layer.parameter.name in here]
    topology = experiment.mst.topology
    in_blocks = isinstance(topology.granularity, BlockGranularity)
    drawn = in_channels(experiment)  # not ranked: all ranks know them
    certain, rounds = [], []
    if not in_blocks and not drawn:  # all ranks have all blocks' scores and refine alone
        certain += [16 * missed for missed in again]
        rounds += [_round(rows, _count_bytes(everything)) for rows in opened or ()]
    for together in _updates(experiment, s, everything):
        if topology.grown_moments == "active_mean":  # their largest gradient and their sum of squares
            certain += 2 * [8 * len(together)]
        changing = [layer for layer in together if layer.changes]
        if drawn:
            certain.append(24 * len(together))
        elif in_blocks:
            certain += _in_blocks(together, changing, topology)
        else:
            certain += _in_weights(changing, topology) if changing else []
            if opened is None:
                rounds += [size for which in ("prune", "grow", "random") for size in _expected(changing, which)]
    certain.append(16 * len(everything))
    if experiment.mst.compute.backend != "dense":
        certain.append(8 * len(everything))
    masked = [x.parameter for x in everything if skips(experiment, s.precision, x.parameter.shape, x.sparsity)]
    return Calls(_all_reduces(certain), _all_reduces(rounds), whole_masks(masked))


def whole_masks(masked: Sequence[Parameter]) -> list[Call]:
    """Return the all-reduces of the masks of these parameters."""
    return _all_reduces([-(-p.numel // 8) for p in masked])


def drift_check(experiment: Experiment, s: Setting) -> list[Call]:
    """Return the calls of a drift check: of shards of a parameter, and of replicas, which also count wrong zeros."""
    here = {p.name for p in held(experiment.model, s)}
    count = sum(p.name in here for p in sparse_parameters(experiment.model, experiment.mst.targets))
    return _all_reduces([16 * count, 8 * count] * (s.stage > 0) + [8 * count] * 4)


def _updates(experiment: Experiment, s: Setting, everything: Sequence[Layer]) -> Iterator[list[Layer]]:
    """Return the layers that each call of the optimizer updates."""
    found = held(experiment.model, s)
    for group in sub_groups(found, s) if s.stage == 3 else groups(found):
        names = {p.name for p in group}
        if here := [layer for layer in everything if layer.parameter.name in names]:
            yield here


def _in_weights(changing: Sequence[Layer], topology: TopologyConfig) -> list[int]:
    count, plans = _count_bytes(changing), [layer.plan for layer in changing]
    chosen, seeded = topology.chosen, topology.grown_moments == "seeded"
    read = {BY_GRADIENT} if seeded else set()
    read |= {chosen.prune} if any(x.prune for x in plans) else set()
    read |= {chosen.grow} if any(x.by_score for x in plans) else set()
    sizes = [8 * len(read) * len(changing)]
    for which in ("prune", "grow", "random"):
        choosing = [layer for layer in changing if layer.chooses(which)]
        if which != "random":
            sizes += 2 * [count * SAMPLE_BINS * sum(layer.elements > LISTED_WHOLE for layer in choosing)]
        sizes.append(16 * len(choosing))
    return [*sizes, 8 * seeded * sum(x.grow > 0 for x in plans), 24 * len(changing)]


def _in_blocks(together: Sequence[Layer], changing: Sequence[Layer], topology: TopologyConfig) -> list[int]:
    chosen, seeded = topology.chosen, topology.grown_moments == "seeded"
    ranking = {chosen.prune}
    if any(layer.plan.by_score for layer in changing):
        ranking.add(chosen.grow)
    peaks = 8 * len(ranking | ({BY_GRADIENT} if seeded else set())) * len(changing)
    norms = [8 * sum(layer.elements for layer in changing)] * len(ranking)
    return [4 * sum(layer.elements for layer in together), peaks, *norms, 8 * seeded * len(changing)]


def _all_reduces(sizes: Sequence[int]) -> list[Call]:
    return [Call("all-reduce", size) for size in sizes if size]


def _count_bytes(found: Sequence[Layer]) -> int:
    return 4 if all(layer.elements < 2**31 for layer in found) else 8


# --- rounds of refinement ---


def _expected(changing: Sequence[Layer], which: str) -> list[int]:
    """Return the bytes of each round of one selection."""
    brackets = [_bracket(layer, which) for layer in changing if layer.chooses(which)]
    sizes, bits = [], 0
    open_layers = float(len(brackets))
    while open_layers >= 0.5 and bits < KEY_BITS:
        rows = max(1, round(open_layers))
        sizes.append(_round(rows, _count_bytes(changing)))
        bits += _digit(rows)
        open_layers = sum(_still_open(c / 2.0**bits) for c in brackets)
    return sizes


def _round(rows: int, count: int) -> int:
    return rows * count << _digit(rows)


def _digit(rows: int) -> int:
    widest = (ROUND_BYTES // (4 * rows)).bit_length() - 1
    return min(max(widest, DIGIT_BITS[0]), DIGIT_BITS[1])


def _bracket(layer: Layer, which: str) -> float:
    """Candidates between the ends of the bracket."""
    wanted, candidates = layer.selection(which)
    if which == "random":
        return min(candidates, 2 * (SIGMAS * math.sqrt(wanted) + SLACK))
    if layer.elements <= LISTED_WHOLE:
        return float(candidates)
    size = min(SAMPLE, candidates)
    fraction = wanted / candidates
    slack = SIGMAS * math.sqrt(size * fraction * (1 - fraction)) + SLACK
    return min(candidates, candidates / size * 2 * slack)


def _still_open(others: float) -> float:
    return 0.0 if others < 1e-9 else 1 + math.expm1(-others) / others


# --- for a plan ---


@dataclass(frozen=True)
class TopologyStep:
    """The collectives of a typical topology step."""

    step: int  # which one
    payload: int
    all_reduces: int
    rounds: int  # those of them that are rounds of refinement, which are assumed; the rest is certain
    masks: int  # bytes of masks in addition to the payload, of layers that multiply only with their active weights
    seconds: dict[int, float]  # of its collectives, on 1, 4, 16 … 16,384 ranks
    here: float  # the same on the setting's ranks
    drift_payload: int  # bytes of a drift check, every `check_every` steps
    in_run: int  # the number of topology steps in the run


def typical_step(schedule: Schedule) -> int | None:
    """Return the topology step of the sparsest phase nearest to its middle, or one outside; None if a run has none."""
    sparsest = schedule.sparsest()
    middle = max(1, (sparsest.start + sparsest.stop) // 2)
    onward, back = range(middle, sparsest.stop), range(middle, 0, -1)
    after = range(sparsest.stop, schedule.total_steps + 1)
    return next((step for step in chain(onward, back, after) if schedule.is_topology_step(step)), None)


def topology_step(experiment: Experiment, s: Setting, machine: Machine) -> TopologyStep | None:
    """Describe the run's typical topology step; None for a run without any."""
    step = None if experiment.mst.stays_dense else typical_step(experiment.schedule)
    if step is None:
        return None
    found = calls(experiment, s, step)
    # at ZeRO-3 the number of ranks decides what an optimizer call updates
    alone = replace(s, tensor=1, sequence=1, pipeline=1)
    reduced = found.certain + found.rounds
    return TopologyStep(
        step=step,
        payload=sum(c.payload for c in reduced),
        all_reduces=len(reduced),
        rounds=len(found.rounds),
        masks=sum(c.payload for c in found.masks),
        seconds={n: seconds(calls(experiment, replace(alone, ranks=n), step).all, n, 1, machine) for n in RANKS},
        here=seconds(found.all, s.ranks // s.pipeline, 1, machine),
        drift_payload=sum(c.payload for c in drift_check(experiment, s)),
        in_run=sum(1 for _ in experiment.schedule.topology_steps()),
    )
