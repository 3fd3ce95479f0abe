"""Benchmark programs: `mst bench BENCHMARK`, in a clone also `python -m mst_scale bench BENCHMARK`."""
