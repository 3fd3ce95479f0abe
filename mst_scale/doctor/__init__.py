"""What this machine, or these ranks, can train with, and what stands in the way.

command      the whole of it: meets the other ranks, looks, tells
finding      one line: a name, a verdict, what was seen, the cure
examine      every check in its order, on every rank, whatever one of them meets
board        where a rank that has failed tells those who wait for it
device       what computes here
progress     what is being looked at, while that takes long
versions     what is installed, against what is supported and tested
room         free memory and disk, locks of killed builds
kernels      each of our kernels against its definition
collectives  how fast the ranks reach each other
ranks        whether the ranks agree with each other
training     a few sparse steps, and masks that are the same on all ranks
choices      what "auto" would take here
tune         crossovers measured here
report       the findings as lines or JSON
"""
