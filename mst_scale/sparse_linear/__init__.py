"""Linear layers that skip what is masked: the weight stays dense, the compute touches only what the mask keeps."""

from mst_scale.sparse_linear.definition import definition
from mst_scale.sparse_linear.layers import Index, Product, SparseLayers

__all__ = ["Index", "Product", "SparseLayers", "definition"]
