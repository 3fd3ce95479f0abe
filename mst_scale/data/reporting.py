"""Shows how far the making of a corpus has come: a bar on a terminal, else a line every 30 s, on stderr."""

from __future__ import annotations

import sys
import time
from typing import Any

from mst_scale.comm import may_rewrite

LINE_SECONDS = 30.0


class Report:
    def __init__(self, quiet: bool = False):
        self.quiet = quiet
        self.bar: Any = None
        self.tokens = 0

    def say(self, message: str) -> None:
        if not self.quiet:
            print(message, file=sys.stderr, flush=True)

    def start(self, unit: str, total: int | None, done: int) -> None:
        from tqdm import tqdm  # type: ignore[import-untyped]

        self.unit, self.total, self.done = unit, total, done
        self.began = self.said = time.monotonic()
        if not self.quiet and may_rewrite(sys.stderr):
            self.bar = tqdm(total=total, initial=done, unit=unit, unit_scale=True, dynamic_ncols=True)

    def advance(self, amount: int, tokens: int) -> None:
        self.done += amount
        self.tokens += tokens
        now = time.monotonic()
        if self.bar is not None:
            self.bar.update(amount)
            self.bar.set_postfix_str(f"{self._rate(now)} tokens/s", refresh=False)
        elif now - self.said >= LINE_SECONDS:
            self.said = now
            of = f" of {self.total:,}" if self.total is not None else ""
            self.say(f"{self.done:,}{of} {self.unit}, {self.tokens:,} tokens, {self._rate(now)} tokens/s")

    def finish(self) -> None:
        if self.bar is not None:
            self.bar.close()
        now = time.monotonic()
        self.say(f"{self.tokens:,} tokens in {now - self.began:.1f} s, {self._rate(now)} tokens/s")

    def _rate(self, now: float) -> str:
        return f"{self.tokens / max(1e-9, now - self.began):,.0f}"
