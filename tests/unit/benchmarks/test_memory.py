"""The peak of a function's memory, next to garbage that is freed meanwhile."""

import gc

import numpy as np
import pytest

from mst_scale.benchmarks import memory

MB = 2**20


def test_garbage_that_is_freed_meanwhile_is_not_subtracted():
    gc.disable()
    try:
        circle: list = [np.ones(64 * MB, dtype=np.uint8)]
        circle.append(circle)
        del circle

        def run() -> None:
            gc.collect()
            np.ones(96 * MB, dtype=np.uint8)

        found = memory.peak_of(run, "cpu")
    finally:
        gc.enable()
    if found is None:
        pytest.skip("this system does not tell a process's memory")
    assert found == pytest.approx(96 * MB, rel=0.2)
