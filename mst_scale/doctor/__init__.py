"""Checks whether this machine, or the ranks of a job, can train, and says how to fix what is wrong.

findings   the result of a check, and how it is printed
examine    runs every check on every rank, whatever one of them meets
machine    versions, memory, disk and locks
ranks      whether the ranks agree with each other, and how fast they reach each other
full       with --full: kernels against their definitions, a few training steps, and what "auto" chooses
"""
