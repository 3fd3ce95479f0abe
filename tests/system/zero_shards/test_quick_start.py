"""What DeepSpeed's start leaves out is done when it is needed."""

import subprocess
import sys

from mst_scale.zero_shards.start import MUON, at_first_call
from tests.support import tiny_run


def test_decorated_functions_are_compiled_once_and_late():
    compiled = []

    def compiles(function, mode):
        compiled.append((function.__name__, mode))
        return lambda x: function(x) + 1

    decorate = at_first_call(compiles)

    @decorate(mode="fast")
    def double(x):
        return 2 * x

    assert not compiled
    assert [double(3), double(4)] == [7, 9] and compiled == [("double", "fast")]


def test_torchs_compiler_is_not_loaded_by_a_start():
    program = f"""
import sys, torch
from mst_scale.zero_shards.start import hasten
before = torch.compile
hasten()
import cpuinfo
assert torch.compile is before and hasattr(cpuinfo.get_cpu_info, "cache_info")
assert "{MUON}" in sys.modules and "torch._inductor.compile_fx" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], env=tiny_run.environment(), check=True)
