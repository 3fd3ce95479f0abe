"""Products with matrices that are stored as their nonzero values."""

import pytest
import torch

from mst_scale.generation import sparse_matrix
from mst_scale.generation.sparse_matrix import DTYPES, DenseMatrix, SparseMatrix, matrix_of
from mst_scale.mixed_growing import packed_bits

SHAPES = ((1, 1), (5, 7), (300, 257), (64, 768), (3, 3072))  # 257 and 768: a chunk of one column, and whole chunks
TOKENS = (1, 2, 4, 5, 8, 9, 16, 17, 33)  # around the widths of the kernel's tiles


def drawn(shape: tuple[int, int], sparsity: float, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape) * (torch.rand(shape) >= sparsity)).to(dtype)


def stored(weight: torch.Tensor) -> SparseMatrix:
    nonzero = weight != 0
    return SparseMatrix(weight[nonzero], packed_bits.pack(nonzero.view(-1)), tuple(weight.shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.96, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_the_dense_matrix(shape: tuple[int, int], sparsity: float, dtype: torch.dtype):
    torch.manual_seed(0)
    weight = drawn(shape, sparsity, dtype)
    matrix, bias = stored(weight), torch.randn(shape[0])
    assert torch.equal(matrix.rows(torch.arange(shape[0])), weight.float())
    for tokens in TOKENS:
        x = torch.randn(tokens, shape[1])
        exact = x.double() @ weight.double().T + bias
        # float32: each product and each addition rounds by at most 2^-24 of the sum of absolute values
        bound = (shape[1] + 3) * 2**-24 * (x.double().abs() @ weight.double().abs().T + bias.abs()) + 1e-12
        assert ((matrix.multiply(x, bias) - exact).abs() <= bound).all(), tokens
        assert torch.allclose(matrix.definition(x.double(), bias.double()), exact, rtol=1e-12, atol=1e-12)
        assert torch.allclose(matrix.multiply(x), matrix.multiply(x, torch.zeros(shape[0])))


def test_results_do_not_depend_on_the_number_of_threads():
    weight = drawn((900, 700), 0.8, torch.float32)
    matrix, before = stored(weight), torch.get_num_threads()
    try:
        for tokens in (1, 8):
            x = torch.randn(tokens, 700)
            torch.set_num_threads(1)
            one = matrix.multiply(x)
            torch.set_num_threads(3)
            assert torch.equal(matrix.multiply(x), one)
    finally:
        torch.set_num_threads(before)


def test_without_a_compiler_the_definition_computes(monkeypatch: pytest.MonkeyPatch):
    matrix, x = stored(drawn((40, 50), 0.8, torch.bfloat16)), torch.randn(3, 50)
    compiled = matrix.multiply(x)
    monkeypatch.setattr(sparse_matrix, "library", lambda: "no compiler")
    assert torch.allclose(matrix.multiply(x), compiled, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sparse_matrix_takes_the_bytes_of_its_values_and_a_byte_for_each_place(dtype: torch.dtype):
    weight = drawn((768, 768), 0.8, dtype)
    matrix = matrix_of(weight)
    assert isinstance(matrix, SparseMatrix)
    assert matrix.n_bytes <= int(weight.count_nonzero()) * (dtype.itemsize + 1) + 768 * (8 + 12 * 2) + 200
    assert isinstance(matrix_of(drawn((768, 768), 0.1, dtype)), DenseMatrix)
