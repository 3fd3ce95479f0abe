"""Counts what a run costs in FLOPs, before it starts and while it trains.

formulas      the formulas, in two accountings, and those of Muon's Newton-Schulz
ledger        a forecast of a run from its config, and a ledger of what it has really spent
budgets       the FLOPs of a run that another has grown out of, or whose FLOPs it may spend
any_model     a ledger for models that are not ours
frontier      the FLOP multiplier of a method, measured on dense runs
paper_table   the paper's tables
"""
