"""Shows the phases of a run's startup, its progress, and whether sparse steps save time on this machine.

Saving FLOPs does not always save time: kernels for sparse weights need wide layers, and topology steps take additional
time. Sparse steps are compared with the dense steps of the same run, in its warm-up and its dense end: no step is
added, and training does not depend on the times. A run that is never dense has no comparison; `mst bench step` measures
both for any config.

    dense       every weight is active and attention is dense; until there are enough such steps, those with dense
                weights and sparse attention are used instead
    sparse      the network has the highest sparsity of the run, without a topology step
    topology    the same, with a topology step

All times are medians of the last steps of their kind; the mean sparse step includes topology steps in proportion to
their number.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple, TextIO

from mst_scale.comm import launched_rank, may_rewrite
from mst_scale.units import flops_unit

MIN_SECONDS = 0.5  # shorter parts of the startup are not listed
WINDOW = 64  # steps in a median
FEWEST = {"dense": 8, "dense weights": 8, "sparse": 20}  # steps that a median needs
FIRST = 2  # steps of each kind that are ignored, because they allocate memory and compile kernels
NOISE = 1.05  # no warning if the ratio of two medians is smaller


class Starting:
    """Prints on the first rank each part of the startup, and at its end the time that each part took."""

    def __init__(self) -> None:
        self._first = launched_rank() == 0
        self._began = self._since = time.monotonic()
        self._part = ""
        self._took: list[tuple[str, float]] = []

    def begins(self, part: str, about: str = "") -> None:
        """Name the next part; `about` is printed after it."""
        self._ends()
        self._part = part
        self._print(f"starting: {part}{about}")

    def done(self) -> None:
        """End the last part."""
        self._ends()
        parts = [f"{part} {seconds:.0f} s" for part, seconds in self._took if seconds >= MIN_SECONDS]
        self._print(f"started in {time.monotonic() - self._began:.0f} s{': ' * bool(parts)}{', '.join(parts)}")

    def _ends(self) -> None:
        now = time.monotonic()
        if self._part:
            self._took.append((self._part, now - self._since))
        self._since = now

    def _print(self, line: str) -> None:
        if self._first:
            with contextlib.suppress(OSError):  # a closed terminal, or a log on a full disk, does not end the run
                print(line, flush=True)


class ProgressLine:
    """The progress of a run: one line that is rewritten on a terminal, plain lines elsewhere.

    `total` is the last step, or None if it is not known.
    """

    def __init__(self, total: int | None, step: int, out: TextIO | None = None):
        self.out = out or sys.stdout
        self._total, self._first_step, self._start = total, step, time.monotonic()
        self._live = may_rewrite(self.out)

    def show(self, row: dict[str, Any], dense_ms: float | None = None) -> None:
        """Show a row of the metrics, with the time of a dense step if it is known."""
        progress = [f"step {row['step']}"]
        if self._total is not None:
            elapsed = time.monotonic() - self._start
            left = elapsed / max(1, row["step"] - self._first_step) * (self._total - row["step"])
            progress = [f"step {row['step']:>{len(str(self._total))}}/{self._total}", f"ETA {clock(left)}"]
        saved = []
        if row["flops"] < row["flops_dense"] or row["sparsity"]:
            sparsity, target = f"{row['sparsity']:.0%}", f"{row['target_sparsity']:.0%}"
            saved = [f"{row['phase']}, sparsity {sparsity}{'' if sparsity == target else f' of {target}'}"]
            # of some models none are counted, and a grown run starts with those of the growth
            if 0 < row["flops"] < row["flops_dense"]:
                size, unit = flops_unit(row["flops_dense"] - row["flops"])
                flops = f"{(row['flops_dense'] - row['flops']) / size:.3g} {unit} saved"
                saved += [f"FLOPs ÷{row['flops_dense'] / row['flops']:.2f}, {flops}"]
            saved += [
                f"step {_duration(row['step_ms'])}" + ("" if dense_ms is None else f" (dense {_duration(dense_ms)})"),
            ]
        parts = [
            *progress,
            "no loss" if row["loss"] is None else f"loss {row['loss']:.4f}",
            f"{row['tokens_per_s']:,.0f} tokens/s",
            *saved,
        ]
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            while len(parts) > 1 and len(" · ".join(parts)) > width:
                parts.pop()
            self._put("\r" + " · ".join(parts)[:width].ljust(width))
        else:
            self._put(" · ".join(parts) + "\n")

    def begin(self, step: int) -> None:
        """Estimate the time left from the steps after this one; the first step compiles and allocates."""
        self._first_step, self._start = step, time.monotonic()

    def print_message(self, message: str) -> None:
        """Print a separate line, without breaking the progress line."""
        self.close()
        self._put(message + "\n")

    def close(self) -> None:
        """Remove the line from a terminal."""
        if self._live:
            self._put("\r\x1b[K")

    def _put(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a closed terminal, or a log on a full disk, does not end the run
            self.out.write(text)
            self.out.flush()


class Comparison(NamedTuple):
    """Milliseconds of a mean sparse step, including topology steps, and of a dense one."""

    sparse_ms: float
    dense_ms: float

    @property
    def slower(self) -> bool:
        """Whether sparse steps are slower than dense ones by more than noise."""
        return self.sparse_ms > NOISE * self.dense_ms


class StepTimes:
    """The step times of one start of a run."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()
        self._seconds = {kind: deque[float](maxlen=WINDOW) for kind in (*FEWEST, "topology")}
        self._warned = False

    def add(self, kind: str | None, seconds: float, *, moved: bool) -> None:
        """Add a step of this kind (see `kind_of`); `moved` if it ended with a topology step."""
        if moved:
            kind = "topology" if kind == "sparse" else None
        if kind is not None:
            self._seen[kind] += 1
            if self._seen[kind] > FIRST or kind == "topology":
                self._seconds[kind].append(seconds)

    @property
    def dense_ms(self) -> float | None:
        """The time of a dense step; None if there were too few."""
        return self._ms("dense") or self._ms("dense weights")

    @property
    def comparison(self) -> Comparison | None:
        """The times of sparse and dense steps; None if there were too few of either."""
        dense, sparse = self.dense_ms, self._ms("sparse")
        if dense is None or sparse is None:
            return None
        share = self._seen["topology"] / (self._seen["topology"] + self._seen["sparse"])
        topology = 1e3 * median(self._seconds["topology"]) if self._seconds["topology"] else sparse
        return Comparison(sparse + share * (topology - sparse), dense)

    def warning(self) -> str | None:
        """Return a warning if sparse steps are slower, once."""
        found = self.comparison
        if self._warned or found is None or not found.slower:
            return None
        self._warned = True
        return (
            f"sparse steps are slower than dense steps here: {found.sparse_ms:.1f} ms, including topology steps, "
            f"versus {found.dense_ms:.1f} ms. To save time as well as FLOPs, use wider layers, a larger micro-batch, a "
            "longer mst.topology.interval, or mst.topology.granularity (blocks, channels). `mst bench step` measures "
            "a config."
        )

    def _ms(self, kind: str) -> float | None:
        times = self._seconds[kind]
        return 1e3 * median(times) if len(times) >= FEWEST[kind] else None


def kind_of(mst: Any, densities: Mapping[str, float]) -> str | None:
    """Return the kind of the next step, whose layers have these densities; None if it is not compared."""
    if all(density == 1 for density in densities.values()):
        return "dense" if mst.pattern.kind == "dense" or not mst.attended else "dense weights"
    return "sparse" if mst.point.sparsity == mst.schedule.max_sparsity else None


def clock(seconds: float) -> str:
    """Format a duration: `1:02:03`, or `2:03` below an hour."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def table(rows: list[tuple[str, str]]) -> str:
    """Format two aligned columns between horizontal rules."""
    width = max(len(name) for name, _ in rows)
    body = [f"  {name:<{width}}  {value}" for name, value in rows]
    rule = "─" * max(len(line) for line in body)
    return "\n".join([rule, *body, rule])


def _duration(ms: float) -> str:
    return f"{ms:.3g} ms" if ms < 1000 else f"{ms / 1e3:.3g} s"
