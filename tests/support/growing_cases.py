"""Randomised topology steps: what they are made of, and how they run on shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st

from mst_scale.comm.exchange import Exchange
from mst_scale.mixed_growing import packed_bits, random_k, top_k
from mst_scale.mixed_growing.evolve import Change, Layer, evolve
from mst_scale.mixed_growing.masks import LayerMask
from mst_scale.mixed_growing.policies import policy
from mst_scale.shard import Shard

CPU = torch.device("cpu")
KINDS = ("normal", "ties", "equal", "zeros", "denormal", "huge", "heavy")


@contextmanager
def small_machine() -> Iterator[None]:
    """Sizes shrunk so that small layers take every path: several spans, samples, brackets that fail, many rounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_bits, "CPU_SPAN", 64)
        patch.setattr(top_k, "SMALL", 40)
        patch.setattr(top_k, "SAMPLE", 24)
        for module in (top_k, random_k):
            patch.setattr(module, "SIGMAS", 0.1)
            patch.setattr(module, "SLACK", 0)
        patch.setattr(top_k, "SAMPLE_BITS", 2)
        patch.setattr(top_k, "DIGIT_BITS", (2, 3))
        yield


def scores(rng: np.random.Generator, size: int, kind: str) -> np.ndarray:
    """Signed scores; the kinds stress ties, the ends of float32 and outliers."""
    sign = rng.choice([-1.0, 1.0], size)
    values = {
        "normal": lambda: rng.standard_normal(size),
        "ties": lambda: rng.integers(0, 4, size) * sign,
        "equal": lambda: np.full(size, 0.25) * sign,
        "zeros": lambda: np.where(rng.random(size) < 0.9, 0.0 * sign, rng.standard_normal(size)),
        "denormal": lambda: rng.integers(0, 50, size) * 1.4e-45 * sign,
        "huge": lambda: np.where(rng.random(size) < 0.1, np.inf, rng.random(size) * 3e38) * sign,
        "heavy": lambda: np.exp(rng.standard_normal(size) * 20) * sign,
    }[kind]()
    with np.errstate(over="ignore"):  # heavy tails reach infinity, which is a score like any other
        return values.astype(np.float32)


@dataclass(frozen=True)
class LayerCase:
    size: int
    kind: str
    density: float
    target: float


@dataclass(frozen=True)
class Case:
    layers: tuple[LayerCase, ...]
    policy: str
    random_share: float | None
    zeta: float
    regrow: bool
    seed: int
    small: bool
    straddle: bool
    """One buffer of all parameters cut once (ZeRO-1/2), or each parameter cut on its own (ZeRO-3)."""

    def arrays(self) -> list[dict[str, Any]]:
        """Whole parameters: mask, weight (0 where dead), gradient, momentum, target."""
        made = []
        for i, layer in enumerate(self.layers):
            rng = np.random.default_rng([self.seed, i])
            active = round(layer.density * layer.size)
            mask = np.zeros(layer.size, bool)
            mask[rng.permutation(layer.size)[:active]] = True
            weight = np.where(mask, scores(rng, layer.size, layer.kind), np.float32(0))
            gradient, momentum = (scores(rng, layer.size, layer.kind) for _ in range(2))
            target = round(layer.target * layer.size)
            made.append(
                {"name": f"layer{i}", "mask": mask, "weight": weight, "gradient": gradient, "momentum": momentum,
                 "target": target}
            )  # fmt: skip
        return made

    def slices(self, rank: int, world: int) -> list[tuple[int, int]]:
        """[begin, end) of each parameter on a rank, cut anywhere."""
        rng = np.random.default_rng([self.seed, 99, world])
        if not self.straddle:
            cuts = [np.sort(rng.integers(0, x.size + 1, world - 1)) for x in self.layers]
            ends = [[0, *c.tolist(), x.size] for c, x in zip(cuts, self.layers, strict=True)]
            return [(e[rank], e[rank + 1]) for e in ends]
        offsets = np.cumsum([0, *(x.size for x in self.layers)])
        borders = [0, *np.sort(rng.integers(0, offsets[-1] + 1, world - 1)).tolist(), int(offsets[-1])]
        found = []
        for x, offset in zip(self.layers, offsets.tolist(), strict=False):
            begin, end = (min(max(b - offset, 0), x.size) for b in borders[rank : rank + 2])
            found.append((begin, end))
        return found


def cases() -> st.SearchStrategy[Case]:
    share = st.sampled_from([0.0, 0.04, 0.3, 0.5, 0.97, 1.0])
    layer = st.builds(
        LayerCase,
        size=st.sampled_from([0, 1, 2, 9, 64, 65, 200, 333, 900]),
        kind=st.sampled_from(KINDS),
        density=share,
        target=share,
    )
    return st.builds(
        Case,
        layers=st.lists(layer, min_size=1, max_size=4).map(tuple),
        policy=st.sampled_from(["mst", "rigl", "set", "mest", "snfs", "static", "gmp"]),
        random_share=st.sampled_from([None, None, 0.0, 0.25, 0.6, 1.0]),
        zeta=st.sampled_from([0.0, 0.1, 0.3, 1.0]),
        regrow=st.booleans(),
        seed=st.integers(0, 2**20),
        small=st.booleans(),
        straddle=st.booleans(),
    )


def run_case(rank: int, world: int, case: Case) -> tuple[list[np.ndarray], list[Change]]:
    """This rank's slices of the new masks, and what was reported."""
    exchange = Exchange(dist.group.WORLD if world > 1 else None)
    layers = []
    for x, (begin, end) in zip(case.arrays(), case.slices(rank, world), strict=True):
        mask = LayerMask(Shard.of_range(x["name"], (x["mask"].size, 1), begin, end - begin), CPU)
        mask.set_flags(torch.from_numpy(x["mask"][begin:end]), int(x["mask"].sum()))
        mask.track_ever()
        layers.append(
            Layer(mask, x["target"], *(torch.from_numpy(x[k][begin:end]) for k in ("weight", "gradient", "momentum")))
        )

    def step() -> list[Change]:
        return evolve(
            layers,
            policy=policy(case.policy, random_share=case.random_share),
            update_fraction=case.zeta,
            seed=case.seed,
            step=100,
            exchange=exchange,
            regrow=case.regrow,
        )

    if case.small:
        with small_machine():
            changes = step()
    else:
        changes = step()
    return [layer.mask.flags().numpy() for layer in layers], changes
