"""Prunes a trained model: selects weights and sets them to zero.

request      validates the user's options; `METHODS`: the pruning methods by name
method       what a pruning method is, how much it removes, and the groups of N:M
scores       magnitude and Wanda: the weights with the lowest scores
sparsegpt    SparseGPT: the weights whose removal is easiest to compensate; the others are updated
network      the order of a model's matrices, and the calibration inputs of their layers
"""

from mst_scale.pruning.network import prune_model
from mst_scale.pruning.request import METHODS, Request, requested

__all__ = ["METHODS", "Request", "prune_model", "requested"]
