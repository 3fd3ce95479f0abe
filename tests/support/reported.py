"""Runs tests with what DeepSpeed's accelerator reports of fp16 forced on and off, in this process and on ranks.

CPUs differ in it, and nothing that enters a weight or a mask may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from deepspeed.accelerator import get_accelerator

from tests.support import pool
from tests.support.toys import report_fp16


def reporting(rank: int, world: int, supported: bool, fn: Callable[..., Any], *args: Any) -> Any:
    report_fp16(supported)
    return fn(rank, world, *args)


@pytest.fixture(params=[False, True], ids=["without fp16", "with fp16"])
def reported_fp16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """The test runs twice, as on a CPU without instructions for fp16 and as on one with them."""
    run = pool.run

    def run_reporting(fn: Callable[..., Any], world: int, *args: Any, **named: Any) -> list[Any]:
        return run(reporting, world, request.param, fn, *args, **named)

    monkeypatch.setattr(pool, "run", run_reporting)
    report_fp16(request.param)
    yield request.param
    vars(get_accelerator()).pop("is_fp16_supported")
