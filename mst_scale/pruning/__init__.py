"""Pruning after training: which weights of a finished model become zero.

request      what a user can ask, checked; `HOW`: the ways by name
way          what a way is
magnitude    the smallest weights
wanda        the smallest |weight| · norm of its input
sparsegpt    the weights that the others can best make up for, which then do so
pattern      the groups of N:M
lowest       the lowest scores of each group, zeros first
network      the order of a model's matrices, and what their layers see
calibration  the sequences that they see
"""

from mst_scale.pruning.network import prune_model
from mst_scale.pruning.request import HOW, Request, requested

__all__ = ["HOW", "Request", "prune_model", "requested"]
