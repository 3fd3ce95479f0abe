"""Counts what a run costs in FLOPs, before it starts and while it goes.

flops         the formulas, in two accountings
muon          what Muon's Newton-Schulz adds to a step
stretches     a run by its config: stretches of steps that cost the same
ledger        a forecast from stretches; what a run has really spent
grown         what a run has cost that a smaller one has grown into
any_model     FLOPs of models that are not ours
dense_short   the steps of dense training that another run's FLOPs pay for
beside        what is spent beside the products of a run's steps
frontier      how many times its FLOPs a method is worth, measured on dense runs
paper_table   the paper's table
"""
