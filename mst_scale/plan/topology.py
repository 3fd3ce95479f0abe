"""What does one topology step send, and how long does that take on any number of ranks?

All layers that change share their all-reduces. For W layers, W' of them larger than 65,536 weights:

    largest scores, NaN check      16·W                  one call
    prune, and grow by score       2 · 512·W' + 16·W     two histograms of a sample, then the counts at a bracket
    grow at random                 16·W                  counts at a bracket
    refinement of each             4·2^b · (open layers) a round, until no layer is open
    mean g², totals, digests       8·W, 24·W, 16·W       three calls

Masks made of blocks send 20 bytes a block instead of histograms. Only the rounds of refinement depend on the weights:
a layer with c candidates in its bracket meets λ = c/2^(b·r) others in its bin after r rounds, and is done if its k-th
is the last of them, with probability (1 - e^-λ)/λ. `tests/plan/test_topology.py` compares that expectation with real
steps, and the other calls exactly. The payload does not depend on the number of ranks; ZeRO-0 sends the digests alone,
since replicas choose alike without a word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mst_scale.choices import stays_dense
from mst_scale.config import Experiment
from mst_scale.config.blocks import BlockGranularity
from mst_scale.mixed_growing.distribution import active_counts
from mst_scale.plan.clock import seconds
from mst_scale.plan.gpus import Machine
from mst_scale.plan.memory import LISTED_WHOLE
from mst_scale.plan.parameters import sparse_parameters
from mst_scale.plan.setting import Setting
from mst_scale.plan.traffic import Call

# Of mixed_growing/{selection,chance,refinement,scores}.py, which a test holds these to.
SAMPLE, SAMPLE_BINS, SIGMAS, SLACK = 1 << 14, 128, 6.0, 16
DIGIT_BITS, ROUND_BYTES = (6, 12), 1 << 14
KEY_BITS = 31
RANKS = tuple(4**k for k in range(8))  # 1 … 16,384


@dataclass(frozen=True)
class Layer:
    """How many of a layer's weights are chosen from how many, by each of the three selections."""

    numel: int
    prune: tuple[int, int]  # (wanted, candidates)
    grow: tuple[int, int]
    random: tuple[int, int]


def layers(experiment: Experiment, sparsity: float, update_fraction: float) -> list[Layer]:
    """A step inside a phase of constant sparsity."""
    mst = experiment.mst
    found = sparse_parameters(experiment.model, mst.targets)
    alive = active_counts([p.shape for p in found], sparsity, mst.sparsity.distribution)
    share = 0.25 if mst.topology.random_ratio is None else mst.topology.random_ratio
    result = []
    for p, active in zip(found, alive, strict=True):
        prune = int(update_fraction * active)
        by_random = int(share * prune)
        free = p.numel - active + prune
        grown = prune - by_random
        result.append(Layer(p.numel, (prune, active), (grown, free), (by_random, free - grown)))
    return result


def calls(found: Sequence[Layer]) -> tuple[list[Call], list[Call]]:
    """Those that are certain, and the rounds of refinement that are to be expected. All layers change."""
    changing = [layer for layer in found if layer.prune[0] > 0 and layer.numel > layer.prune[1]]
    large = sum(layer.numel > LISTED_WHOLE for layer in changing)
    count = len(changing)
    histograms = [4 * SAMPLE_BINS * large] * 2 if large else []
    certain = [16 * count]
    certain += 2 * [*histograms, 16 * count] + [16 * count]
    certain += [8 * count, 24 * count, 16 * len(found)]
    rounds = []
    for chosen in ("prune", "grow", "random"):
        brackets = [_bracket(layer, chosen) for layer in changing]
        rounds += _rounds(brackets)
    return [Call("all-reduce", size) for size in certain if size], [Call("all-reduce", size) for size in rounds if size]


def calls_in_blocks(experiment: Experiment, side: int) -> list[Call]:
    """Masks made of blocks: how much of each is alive, its L1 norms of weights and of gradients; the rest as above."""
    found = sparse_parameters(experiment.model, experiment.mst.targets)
    blocks = sum(-(-p.shape[0] // side) * -(-p.shape[1] // side) for p in found)
    sizes = [4 * blocks, 16 * len(found), 8 * blocks, 8 * blocks, 8 * len(found), 16 * len(found)]
    return [Call("all-reduce", size) for size in sizes]


def _bracket(layer: Layer, chosen: str) -> float:
    """Candidates between the ends of the bracket."""
    wanted, candidates = getattr(layer, chosen)
    if chosen == "random":
        return min(candidates, 2 * (SIGMAS * math.sqrt(wanted) + SLACK))
    if layer.numel <= LISTED_WHOLE:
        return float(candidates)
    size = min(SAMPLE, candidates)
    share = wanted / candidates
    slack = SIGMAS * math.sqrt(size * share * (1 - share)) + SLACK
    return min(candidates, candidates / size * 2 * slack)


def _rounds(brackets: Sequence[float]) -> list[int]:
    """Bytes of each round."""
    sizes, bits = [], 0
    open_layers = float(len(brackets))
    while open_layers >= 0.5 and bits < KEY_BITS:
        rows = max(1, round(open_layers))
        widest = (ROUND_BYTES // (4 * rows)).bit_length() - 1
        digit = min(max(widest, DIGIT_BITS[0]), DIGIT_BITS[1])
        sizes.append(rows * 4 << digit)
        bits += digit
        open_layers = sum(_still_open(c / 2.0**bits) for c in brackets)
    return sizes


def _still_open(others: float) -> float:
    return 0.0 if others < 1e-9 else 1 + math.expm1(-others) / others


@dataclass(frozen=True)
class TopologyStep:
    """`seconds` by number of ranks: its collectives alone. What it computes has not been measured on GPUs."""

    payload: int
    all_reduces: int
    seconds: dict[int, float]
    """On 1, 4, 16 … 16,384 ranks."""
    here: float


def topology_step(experiment: Experiment, s: Setting, machine: Machine) -> TopologyStep | None:
    """One in the middle of the run's sparsest phase; None for a dense run."""
    if stays_dense(experiment.mst):
        return None
    sparsity = experiment.mst.sparsity
    granularity = experiment.mst.topology.granularity
    if isinstance(granularity, BlockGranularity):
        certain, rounds = calls_in_blocks(experiment, granularity.block), list[Call]()
    else:
        certain, rounds = calls(layers(experiment, sparsity.max, experiment.mst.topology.update_fraction))
    sent = certain + rounds if s.stage else certain[-1:]  # replicas compare their digests
    by_ranks = {ranks: seconds(sent, ranks, machine) for ranks in RANKS}
    return TopologyStep(sum(c.payload for c in sent), len(sent), by_ranks, seconds(sent, s.ranks, machine))
