"""Programs that measure: `mst bench WHAT`, or `python -m benchmarks.WHAT`."""
