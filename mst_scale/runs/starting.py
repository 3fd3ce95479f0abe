"""Says what a start is busy with, on the first rank, and at its end how long each part of it took."""

from __future__ import annotations

import contextlib
import time

from mst_scale.comm import launched_rank

WORTH_SAYING = 0.5  # seconds


class Starting:
    """`begins` names the next part, `done` ends the last one."""

    def __init__(self) -> None:
        self.first = launched_rank() == 0
        self.began = self.since = time.monotonic()
        self.part = ""
        self.took: list[tuple[str, float]] = []

    def begins(self, part: str, about: str = "") -> None:
        """`about` is said beside it."""
        self._ends()
        self.part = part
        self._say(f"starting: {part}{about}")

    def done(self) -> None:
        self._ends()
        parts = [f"{part} {seconds:.0f} s" for part, seconds in self.took if seconds >= WORTH_SAYING]
        self._say(f"started in {time.monotonic() - self.began:.0f} s{': ' * bool(parts)}{', '.join(parts)}")

    def _ends(self) -> None:
        now = time.monotonic()
        if self.part:
            self.took.append((self.part, now - self.since))
        self.since = now

    def _say(self, line: str) -> None:
        """A terminal that was closed, or a log on a full disk, does not end the run."""
        if self.first:
            with contextlib.suppress(OSError):
                print(line, flush=True)
