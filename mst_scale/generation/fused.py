"""Computes all blocks of a sparse GPT for one more token of each sequence, in one call of the compiled kernel.

With a few milliseconds per token, calling some twenty torch operators per block would take as long as the products.
`Decoder` computes the same with these operators; that is the definition, and what computes if a matrix is dense or
there is no compiled kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch

from mst_scale.generation.cache import Cache
from mst_scale.generation.sparse_matrix import Call, Matrix, SparseMatrix, library

MATRICES = ("attention.qkv", "attention.proj", "mlp.up", "mlp.down")


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.POINTER(Call)) for name in ("qkv", "proj", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("ln_1", "ln_1_bias", "ln_2", "ln_2_bias", "keys", "values")),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
        *((name, ctypes.c_void_p) for name in ("visible", "x")),
        *(
            (name, ctypes.c_int64)
            for name in ("n_layers", "n_visible", "batch", "heads", "dim", "room", "length", "threads")
        ),
        ("eps", ctypes.c_double),
    ]


class FusedBlocks:
    """The blocks of one model and one cache; none of their tensors may be replaced while it is used."""

    def __init__(
        self, matrices: Mapping[str, Matrix], vectors: Mapping[str, torch.Tensor], cache: Cache, eps: float
    ) -> None:
        loaded = library()
        assert isinstance(loaded, ctypes.CDLL), loaded
        batch, heads, room, dim = cache.keys[0].shape
        self.library, self.cache = loaded, cache
        self.calls: list[list[Call]] = []  # ctypes keeps what pointers point to only for some of them
        self.layers = (_Layer * len(cache.keys))()
        for number, layer in enumerate(self.layers):
            name, calls = f"blocks.{number}.", []
            for kind in MATRICES:
                matrix = matrices[f"{name}{kind}.weight"]
                assert isinstance(matrix, SparseMatrix), kind
                calls.append(matrix.call(vectors.get(f"{name}{kind}.bias")))
            layer.qkv, layer.proj, layer.up, layer.down = map(ctypes.pointer, calls)
            self.calls.append(calls)
            for norm in ("ln_1", "ln_2"):
                setattr(layer, norm, vectors[f"{name}{norm}.weight"].data_ptr())
                bias = vectors.get(f"{name}{norm}.bias")
                setattr(layer, f"{norm}_bias", None if bias is None else bias.data_ptr())
            layer.keys, layer.values = cache.keys[number].data_ptr(), cache.values[number].data_ptr()
        self.step = _Step(
            layers=self.layers, n_layers=len(self.layers), batch=batch, heads=heads, dim=dim, room=room, eps=eps
        )

    def __call__(self, x: torch.Tensor) -> None:
        """Compute the blocks in place, for x (batch, n_embd), and store keys and values at the cache's length."""
        step, cache = self.step, self.cache
        assert x.is_contiguous() and x.dtype == torch.float32, (x.stride(), x.dtype)
        seen = None if cache.visible is None else cache.visible[:-1].contiguous()  # without its own position
        step.x, step.length, step.threads = x.data_ptr(), cache.length, torch.get_num_threads()
        step.visible = None if seen is None else seen.data_ptr()
        step.n_visible = -1 if seen is None else seen.shape[0]
        self.library.sm_step(ctypes.byref(step))


def can_fuse(matrices: Mapping[str, Matrix]) -> bool:
    """Return whether all matrices of the blocks are sparse and there is a compiled kernel."""
    blocks = (matrix for name, matrix in matrices.items() if name.startswith("blocks."))
    return all(isinstance(matrix, SparseMatrix) for matrix in blocks) and not isinstance(library(), str)
