"""Runs Triton kernels without a GPU, in a process of its own where Triton interprets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.support.tiny_run import ROOT


def interpret(arguments: list[str], cases: list[dict[str, Any]] | None = None, seconds: float = 300) -> str:
    """What `python ARGUMENTS` prints; the cases reach it as JSON on stdin."""
    done = subprocess.run(
        [sys.executable, *arguments],
        input=json.dumps(cases),
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
