"""Fixtures of this folder's tests."""

from mst_scale.sparse_linear import kernel
from tests.support.kernels import of_another_processor, one_thread

__all__ = ["another_processor", "narrower_library", "one_thread"]

narrower_library, another_processor = of_another_processor("sparse_linear", kernel)
