"""Benchmark programs: `mst bench WHAT`, or `python -m mst_scale.benchmarks.WHAT`."""
