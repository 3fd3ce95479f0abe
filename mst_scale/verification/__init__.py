"""Finds silent corruption: values that a rank has computed, received or kept wrongly without an error.

tensor_digest  exact digests of tensors, equal on every device
verification   compares digests with those of a second computation, of other ranks, and of a moment before
"""

from mst_scale.verification.tensor_digest import digest, digests
from mst_scale.verification.verification import Verification

__all__ = ["Verification", "digest", "digests"]
