from tests.hybrid_sparse_attention.conftest import one_thread

__all__ = ["one_thread"]
