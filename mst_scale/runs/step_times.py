"""Times a run's optimizer steps, to say whether its sparse steps are faster than its dense ones on this machine.

Saving FLOPs does not always save time: kernels for sparse weights need wide layers, and topology steps cost time of
their own. The dense steps to compare with are those that the run takes itself, in its warm-up and its dense end: no
step is added, and nothing that training computes depends on a time. A run that is never dense has none; `mst bench
step` measures both for any config.

    dense       every weight is active and attention is dense; as long as there were too few of these steps, those
                with dense weights under sparse attention stand for them
    sparse      the network is as sparse as the run makes it, the topology stays
    topology    the same, with a topology step

All are medians of the last steps of their kind; the mean sparse step counts topology steps as often as they came.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

WINDOW = 64  # steps in a median
FEWEST = {"dense": 8, "dense weights": 8, "sparse": 20}  # from so many steps on a median counts
FIRST = 2  # steps of each kind that are left out: they allocate memory and compile kernels
NOISE = 1.05  # a smaller ratio of two medians is not worth a warning


@dataclass(frozen=True)
class Comparison:
    """Milliseconds of a mean sparse step, topology steps included, and of a dense one."""

    sparse_ms: float
    dense_ms: float

    @property
    def slower(self) -> bool:
        return self.sparse_ms > NOISE * self.dense_ms

    def in_words(self) -> str:
        return (
            f"sparse steps are slower than dense steps here: {self.sparse_ms:.1f} ms, topology steps included, against "
            f"{self.dense_ms:.1f} ms. The FLOPs saved save no time: use wider layers, a larger micro-batch, a longer "
            "mst.topology.interval, or mst.topology.granularity (blocks, channels). `mst bench step` measures a config."
        )


class StepTimes:
    """The times of one start of a run."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.seconds: dict[str, deque[float]] = {
            kind: deque(maxlen=WINDOW) for kind in ("dense", "dense weights", "sparse", "topology")
        }
        self.told = False

    def add(self, kind: str | None, seconds: float, *, moved: bool) -> None:
        """Take a step of this kind, one of `kind_of`; `moved`: it ended with a topology step."""
        if moved:
            kind = "topology" if kind == "sparse" else None
        if kind is None:
            return
        self.seen[kind] += 1
        if self.seen[kind] > FIRST or kind == "topology":
            self.seconds[kind].append(seconds)

    @property
    def dense_ms(self) -> float | None:
        """A dense step; None while there were too few."""
        return self._ms("dense") or self._ms("dense weights")

    @property
    def comparison(self) -> Comparison | None:
        dense, quiet = self.dense_ms, self._ms("sparse")
        if dense is None or quiet is None:
            return None
        share = self.seen["topology"] / (self.seen["topology"] + self.seen["sparse"])
        topology = 1e3 * median(self.seconds["topology"]) if self.seconds["topology"] else quiet
        return Comparison(quiet + share * (topology - quiet), dense)

    def warning(self) -> str | None:
        """What is to be said of it, once."""
        found = self.comparison
        if self.told or found is None or not found.slower:
            return None
        self.told = True
        return found.in_words()

    def _ms(self, kind: str) -> float | None:
        times = self.seconds[kind]
        return 1e3 * median(times) if len(times) >= FEWEST[kind] else None


def kind_of(mst: Any, densities: Mapping[str, float]) -> str | None:
    """The kind of the step that comes next, whose layers compute with these densities; None: none that is compared."""
    if all(density == 1 for density in densities.values()):
        return "dense" if mst.pattern.kind == "dense" or not mst.attended else "dense weights"
    most = mst.schedule.max_sparsity
    return "sparse" if mst.point.sparsity == most else None
