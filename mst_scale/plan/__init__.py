"""Estimates the memory, time, communication and gain of a run on N GPUs before it is started.

gpus        peaks of GPUs, nodes and networks by data sheets, and the fractions of them that plans assume
setting     how ranks share a model, and which parameters each of them holds
traffic     the collectives of a step and their bytes
backward    the moments of a backward pass, and what is there in each
memory      bytes on a GPU by part, and on its host
roofline    seconds of kernels for blocks of weights and for attention patterns
step_time   seconds of a step, dense and in every phase
topology    bytes and seconds of a topology step
recommend   the fastest setting and masks that fit, and the reasons
answer      the whole plan of a config
by_phase    numbers of GPUs for each phase: the fewest, and the fewest GPU-hours

expected_gain   the FLOP multiplier that a recipe is expected to have, and the recipe that fits a goal

Plain arithmetic: neither torch nor DeepSpeed is imported.
"""
