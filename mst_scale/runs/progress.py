"""Shows how far a run has come: one line that is rewritten on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from typing import Any, TextIO

from mst_scale.comm import may_rewrite


class ProgressLine:
    """The progress of a run, as rank 0 prints it."""

    def __init__(self, total: int, step: int, out: TextIO | None = None):
        self.out = out or sys.stdout
        self.total, self.first_step, self.start = total, step, time.monotonic()
        self.live = may_rewrite(self.out)

    def show(self, row: dict[str, Any], dense_ms: float | None = None) -> None:
        """`dense_ms`: what a dense step takes here, if it is known."""
        elapsed = time.monotonic() - self.start
        left = elapsed / max(1, row["step"] - self.first_step) * (self.total - row["step"])
        parts = [
            f"step {row['step']:>{len(str(self.total))}}/{self.total}",
            "no loss" if row["loss"] is None else f"loss {row['loss']:.4f}",
            f"{row['tokens_per_s']:,.0f} tokens/s",
            f"ETA {clock(left)}",
        ]
        if row["flops"] < row["flops_dense"] or row["sparsity"]:
            saved = row["flops_dense"] - row["flops"]
            size, unit = flops_unit(saved)
            parts.insert(2, f"{row['phase']}, sparsity {row['sparsity']:.0%} of {row['target_sparsity']:.0%}")
            parts.insert(3, f"FLOPs ÷{row['flops_dense'] / row['flops']:.2f}, {saved / size:.3g} {unit} saved")
            beside = "" if dense_ms is None else f" (dense {dense_ms:.3g} ms)"
            parts.insert(4, f"step {row['step_ms']:.3g} ms{beside}")
        line = " · ".join(parts)
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            self._put("\r" + line[:width].ljust(width))
        else:
            self._put(line + "\n")

    def say(self, message: str) -> None:
        """A line of its own, without tearing the progress line."""
        self.close()
        self._put(message + "\n")

    def close(self) -> None:
        if self.live:
            self._put("\r\x1b[K")

    def _put(self, text: str) -> None:
        """A terminal that was closed, or a log on a full disk, does not end the run."""
        with contextlib.suppress(OSError):
            self.out.write(text)
            self.out.flush()


UNITS = (
    (1e24, "YFLOP"), (1e21, "ZFLOP"), (1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"),
)  # fmt: skip


def flops_unit(largest: float) -> tuple[float, str]:
    """(divide by, unit), so that small numbers are shown."""
    return next(((size, name) for size, name in UNITS if largest >= size), (1.0, "FLOP"))


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def table(rows: list[tuple[str, str]]) -> str:
    """Two aligned columns under a rule."""
    width = max(len(name) for name, _ in rows)
    body = [f"  {name:<{width}}  {value}" for name, value in rows]
    rule = "─" * max(len(line) for line in body)
    return "\n".join([rule, *body, rule])
