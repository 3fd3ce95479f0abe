"""Benchmark programs: `mst bench WHAT`, in a clone also `python -m mst_scale bench WHAT`."""
