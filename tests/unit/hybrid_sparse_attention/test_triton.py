"""The Triton kernels: interpreted on CPU, and run on a GPU (marker gpu)."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
from typing import Any

import pytest
import torch

from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention import Pattern, attention, tiles
from tests.support import triton_interpreter
from tests.support.attention_oracle import TOLERANCE, check, inputs
from tests.support.quick import selected

triton = pytest.importorskip("triton")

from mst_scale.hybrid_sparse_attention import triton_kernel  # noqa: E402

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

# (kind, stride, length, causal, heads, kv_heads, head_dim, dtype): tiles are 32 rows in float32, 64 in float16
INTERPRETED: list[tuple[str, int, int, bool, int, int, int, str]] = [
    ("strided", 16, 70, True, 2, 1, 20, "float32"),
    ("strided", 16, 70, False, 2, 2, 20, "float32"),
    ("strided", 3, 70, True, 2, 1, 8, "float32"),  # 24 rows per residue, residues cut by tiles
    ("strided", 40, 37, True, 1, 1, 16, "float32"),  # l > n: every pair
    ("strided", 1, 37, False, 1, 1, 16, "float32"),
    ("strided", 16, 1, True, 1, 1, 16, "float32"),
    ("strided", 33, 100, True, 2, 1, 64, "float16"),
    ("fixed", 16, 70, True, 2, 1, 20, "float32"),
    ("fixed", 16, 70, False, 2, 1, 20, "float32"),
    ("fixed", 33, 100, True, 1, 1, 64, "float16"),
    ("dense", 1, 40, True, 1, 1, 16, "float32"),
    ("strided", 24, 70, True, 2, 1, 128, "float32"),
    ("fixed", 24, 70, False, 1, 1, 128, "float16"),
    ("strided", 24, 70, True, 2, 1, 160, "float32"),  # 16 rows of queries
    ("fixed", 24, 70, False, 1, 1, 160, "float32"),
    # tiles that are seen as a whole, between cut ones
    ("strided", 110, 230, True, 2, 1, 16, "float32"),
    ("strided", 100, 230, False, 1, 1, 16, "float32"),
    ("strided", 2, 201, True, 1, 1, 16, "float32"),
    ("fixed", 4, 201, True, 2, 1, 16, "float32"),
    ("fixed", 100, 201, False, 1, 1, 16, "float32"),
    ("dense", 1, 150, True, 1, 1, 16, "float32"),
]
# the same with scores of 65,536 and a few more or less
RAISED: list[tuple[str, int, int, bool, int, int, int, str]] = [
    ("strided", 16, 70, True, 1, 1, 16, "float32"),
    ("fixed", 16, 70, False, 1, 1, 16, "float32"),
]


def test_a_sequence_whose_offsets_do_not_fit_32_bits_is_rejected():
    """Not read and written elsewhere."""
    q = torch.empty(1, 64, 1 << 18, 128, device="meta", dtype=torch.bfloat16)
    with pytest.raises(UserError, match="sequence_parallel"):
        triton_kernel.forward(q, q, q, pattern=Pattern("strided", 256), causal=True, scale=1.0)


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> list[dict[str, float]]:
    """What the process says: a line for each case, those of `INTERPRETED` only if their tests run, and four more."""
    names = ("kind", "stride", "length", "causal", "heads", "kv_heads", "dim", "dtype")
    cases: list[dict[str, Any]] = [dict(zip(names, case, strict=True)) for case in INTERPRETED + RAISED]
    for index, case in enumerate(cases):
        case["shape"] = (1, case["heads"], case["length"], case["dim"])
        case["raised"] = index >= len(INTERPRETED)
    if not selected(request, test_interpreted):
        del cases[: len(INTERPRETED)]
    said = triton_interpreter.interpret(["-m", "tests.support.interpret_triton"], cases, seconds=900)
    return [json.loads(line) for line in said.splitlines()]


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(INTERPRETED)), ids=lambda i: "-".join(map(str, INTERPRETED[i])))
def test_interpreted(interpreted: list[dict[str, float]], index: int) -> None:
    allowed = TOLERANCE[getattr(torch, INTERPRETED[index][-1])]
    for name, error in interpreted[index].items():
        # p and ds are rounded to the storage type for the matrix unit: for half types one more rounding, of terms
        # that are at most as large as the result
        assert error <= (2 if "16" in INTERPRETED[index][-1] else 1) * allowed["out" if name == "out" else "grads"]


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(RAISED)), ids=lambda i: "-".join(map(str, RAISED[i])))
def test_interpreted_large_scores_cost_no_digits(interpreted: list[dict[str, float]], index: int) -> None:
    for name, error in interpreted[index - len(RAISED) - 4].items():
        assert error <= TOLERANCE[torch.float32]["out" if name == "out" else "grads"], name


@pytest.mark.full
def test_interpreted_rows_with_nothing_to_attend_are_zero(interpreted: list[dict[str, float]]) -> None:
    assert interpreted[-1] == {"unseen": 0.0, "finite": 1.0}


@pytest.mark.full
def test_interpreted_tiles_are_said_to_be_seen_where_all_their_pairs_are(interpreted: list[Any]) -> None:
    counts = interpreted[-4]
    assert len(counts) == 16 and {key: wrong for key, (wrong, _) in counts.items() if wrong} == {}
    parts = {key.split()[0] for key, (_, whole) in counts.items() if whole}
    assert parts == {"0", "1", "2", "3"}, "no such tile in some part"


@pytest.mark.full
def test_interpreted_tuning_restores_the_inputs_of_a_launch(interpreted: list[dict[str, float]]) -> None:
    """A second launch adds to what the first has left; run five times, it must add once."""
    restoring, not_restoring = interpreted[-3], interpreted[-2]
    for name, error in restoring.items():
        assert error <= TOLERANCE[torch.float32]["out" if name == "out" else "grads"], name
    assert all(error > 0.01 for error in not_restoring.values()), "this test would not have seen it"


@pytest.mark.parametrize("kernel", tiles.KERNELS)
def test_tuning_restores_the_tensors_that_a_kernel_reads_and_writes(kernel: str) -> None:
    """Tensors by name, in the source: read in any way, and stored."""
    source = ast.parse(inspect.getsource(getattr(triton_kernel, kernel).fn))
    loads, stores = (
        {
            node.id
            for call in ast.walk(source)
            if isinstance(call, ast.Call) and ast.unparse(call.func) in functions
            for node in ast.walk(call.args[0])
            if isinstance(node, ast.Name)
        }
        for functions in (("_load", "tl.load", "_softmax"), ("_store", "tl.store"))
    )
    tensors = set(getattr(triton_kernel, kernel).arg_names)
    assert loads & stores & tensors == set(triton_kernel.CONTINUED[kernel])


PATTERNS = [("strided", 256), ("strided", 24), ("fixed", 100), ("strided", 5000)]
TYPES = (torch.float32, torch.float16, torch.bfloat16)
# each is compiled anew, which takes half a minute for all parts of a type: the others are marked slow
QUICK = {*itertools.product((torch.float32, torch.bfloat16), PATTERNS, (True, False), [64]),
         (torch.float16, ("strided", 256), True, 64),
         *itertools.product((torch.float32, torch.bfloat16), [("strided", 24)], [True], (80, 128, 256))}  # fmt: skip
ON_A_GPU = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
    for case in itertools.product(TYPES, PATTERNS, (True, False), (64, 80, 128, 256))
]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("dtype", "pattern", "causal", "dim"), ON_A_GPU)
def test_on_a_gpu(dtype: torch.dtype, pattern: tuple[str, int], causal: bool, dim: int) -> None:
    check("triton", inputs((2, 4, 777, dim), 2, dtype, "cuda"), Pattern(*pattern), causal, slack=2.0)


@pytest.mark.gpu
@needs_gpu
def test_auto_selects_triton_on_a_gpu() -> None:
    q, k, v, _ = inputs((1, 2, 600, 64), 2, torch.bfloat16, "cuda")
    pattern = Pattern("strided", 64)
    assert torch.equal(attention(q, k, v, pattern), attention(q, k, v, pattern, backend="triton"))
