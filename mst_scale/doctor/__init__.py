"""Checks whether this machine, or these ranks, can train, and what stands in the way.

command      the whole of it: meets the other ranks, runs the checks, prints
finding      one line: a name, a verdict, what was seen, how to fix it
examine      every check in its order, on every rank, whatever one of them meets
progress     what is being checked, while that takes long
report       the findings as lines or JSON

The quick checks:

versions     what is installed, against what is supported and tested; which device computes
room         free memory and disk, locks of killed builds
ranks        whether the ranks agree with each other
collectives  how fast the ranks reach each other

With --full:

kernels      each of our kernels against its definition
training     a few sparse steps, and masks that are the same on all ranks
choices      what "auto" would take here, and the crossovers that decide it (--tune)
"""
