"""Counts the FLOPs of a run, before it starts and while it trains.

formulas      the formulas, in two accountings, and those of Muon's Newton-Schulz
ledger        forecasts the FLOPs of a run from its config, and counts those that it has used
budgets       FLOPs that relate two runs: those of a smaller run, and those of a run to match
any_model     a ledger for models other than ours
frontier      the FLOP multiplier of a method, measured on dense runs
paper_table   the paper's tables
"""
