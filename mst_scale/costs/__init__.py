"""Counts what a run costs in FLOPs, before it starts and while it goes.

flops         the formulas, in two accountings
muon          what Muon's Newton-Schulz adds to a step
stretches     a run by its config: stretches of steps that cost the same
ledger        a forecast from stretches; what a run has really spent
paper_table   the paper's table
"""
