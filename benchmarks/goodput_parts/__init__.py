"""The parts of `mst bench goodput`: the baseline's script, the faults, and one side's run through one fault."""
