"""Defines the parts and cases of `gpu_day`, and the machine and limits with which they run."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mst_scale

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One measurement. Its row says `said`, what came out in words; `fine` where it can be right or wrong."""

    name: str
    run: Callable[[], Row]


@dataclass(frozen=True)
class Part:
    """A part of a GPU day."""

    name: str
    group: str
    """Of the parts that one command runs."""
    question: str
    minutes: float
    """At most, and …"""
    case_seconds: float
    """… for one case: what takes longer hangs."""
    memory: float
    """Share of the GPU's memory."""
    module: str
    """Whose function of the part's name gives its cases; imported where they run."""
    at_once: int = 1
    """Processes that share its cases: what is not timed need not wait for one compiler."""

    def cases(self, where: Where) -> Iterator[Case]:
        """Yield the cases of the part."""
        found: Iterator[Case] = getattr(importlib.import_module(self.module), self.name)(where)
        return found


@dataclass(frozen=True)
class Where:
    """The machine, as a part sees it. `tiny`: the CPU, tiny shapes, Triton's interpreter."""

    tiny: bool
    out: Path
    work: Path
    """For what is not kept: runs, logs."""

    @property
    def device(self) -> str:
        """The device that cases run on."""
        return "cpu" if self.tiny else "cuda"

    def environment(self) -> dict[str, str]:
        """Of a part's process: this source tree, no launcher around it."""
        from ..studies.runner import environment

        tiny = {"TRITON_INTERPRET": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"} if self.tiny else {}
        caches = {
            "TRITON_CACHE_DIR": str(self.work / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.work / "inductor"),
        }
        return {**environment(), **({} if self.tiny else caches), **tiny}

    def machine(self) -> Row:
        """Describe the machine and the state of the code."""
        from mst_scale.run_logging.run_file import git_state

        from ..machine import machine

        try:
            import triton

            version = triton.__version__
        except ImportError:
            version = None
        about = {key: value for key, value in machine().items() if key != "load"}
        git = git_state(Path(mst_scale.__file__).resolve().parents[1]) or {}
        return {**about, "triton": version, "commit": git.get("commit"), "tiny": self.tiny, "start": time.time_ns()}
