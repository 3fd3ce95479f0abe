"""Drives a headless Chromium through its DevTools pipe, to see what a page does in a real browser."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip


def executable() -> str | None:
    """`MST_CHROMIUM`, or the first that is installed."""
    return os.environ.get("MST_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab. Everything a page asks the network for, and every error, is kept."""

    def __init__(self, seconds: float = 60.0):
        self.seconds = seconds
        self.profile = tempfile.mkdtemp(prefix="mst-chromium-")
        theirs, self.ours_out = _high_pipe()
        self.ours_in, theirs_out = _high_pipe()
        self.waiting = select.poll()
        self.waiting.register(self.ours_in, select.POLLIN)
        program = executable()
        assert program is not None
        command = f'exec "$0" "$@" 3<&{theirs} 4>&{theirs_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", command, program, *FLAGS, f"--user-data-dir={self.profile}"],
            pass_fds=(theirs, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(theirs_out)
        self.buffer, self.number, self.session = b"", 0, None
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def open(self, path: Path, *, width: int, height: int, scheme: str) -> None:
        """Load a file in a window of this size, for a reader who prefers this colour scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.requests, self.errors, self.loaded = [], [], False
        self.call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + self.seconds
        while not self.loaded:
            self._receive(deadline)

    def evaluate(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.ours_out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + self.seconds
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            ready = self.waiting.poll(1e3 * max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium gave no answer"
            data = os.read(self.ours_in, 1 << 20)
            assert data, "Chromium ended"
            self.buffer += data
        text, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return dict(message)

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Page.loadEventFired":
            self.loaded = True

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours_in)
        os.close(self.ours_out)
        shutil.rmtree(self.profile, ignore_errors=True)


def _high_pipe() -> tuple[int, int]:
    """(read, write) ends above 9, out of the way of the numbers that Chromium expects."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]
