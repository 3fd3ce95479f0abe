"""Masks are the same bits on CPUs with fewer instructions than this one."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.mask_digests import digests

LIMITS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "default": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}


@pytest.mark.full
@pytest.mark.parametrize("limit", LIMITS)
def test_masks_do_not_depend_on_the_instructions_of_the_cpu(limit):
    found = subprocess.run(
        [sys.executable, "-m", "tests.support.mask_digests"],
        env={**os.environ, **LIMITS[limit]}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    limited = json.loads(found.stdout)
    assert limited["cpu"].lower() == limit, "the limit was not heeded"
    here = json.loads(json.dumps(dict(digests())))
    assert len(here) > 80
    assert limited["masks"] == here
