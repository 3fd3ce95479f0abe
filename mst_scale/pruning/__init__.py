"""Prunes a trained model: selects weights and sets them to zero.

request   validates the user's options
method    `METHODS`: magnitude and Wanda remove the weights with the lowest scores; SparseGPT those whose removal is
          easiest to compensate, and updates the others
network   the order of a model's matrices, and the calibration inputs of their layers
"""

from mst_scale.pruning.method import METHODS
from mst_scale.pruning.network import prune_model
from mst_scale.pruning.request import Request, requested

__all__ = ["METHODS", "Request", "prune_model", "requested"]
