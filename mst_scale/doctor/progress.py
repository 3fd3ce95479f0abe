"""Says what is being looked at while that takes long: a line that goes again on a terminal, else one every 30 s."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mst_scale.comm import may_rewrite

WORTH_SAYING = 2.0  # seconds
LINE_SECONDS = 30.0
TICK = 0.5


class Progress:
    def __init__(self, quiet: bool = False):
        self.quiet = quiet
        self.live = may_rewrite(sys.stderr)

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Say it from a thread of its own, until the block ends."""
        if self.quiet:
            yield
            return
        ended = threading.Event()
        speaker = threading.Thread(target=self._speak, args=(what, ended), daemon=True)
        speaker.start()
        try:
            yield
        finally:
            ended.set()
            speaker.join()

    def _speak(self, what: str, ended: threading.Event) -> None:
        began = time.monotonic()
        next_line, shown = LINE_SECONDS, False
        with suppress(OSError, ValueError):  # a terminal that was closed
            while not ended.wait(TICK):
                passed = time.monotonic() - began
                if self.live and passed >= WORTH_SAYING:
                    shown = True
                    print(f"\r\x1b[K{what} … {passed:.0f} s", end="", file=sys.stderr, flush=True)
                elif not self.live and passed >= next_line:
                    next_line += LINE_SECONDS
                    print(f"mst doctor: {what} … {passed:.0f} s", file=sys.stderr, flush=True)
            if shown:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
