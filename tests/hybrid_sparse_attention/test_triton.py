"""The Triton kernels: interpreted on CPU, compiled for a GPU that need not be there, and run on one (marker gpu)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from mst_scale.hybrid_sparse_attention import Pattern, attention
from tests.hybrid_sparse_attention.oracle import TOLERANCE, check, inputs
from tests.support import triton_interpreter

triton = pytest.importorskip("triton")
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
]
# the same with scores of 65,536 and a few more or less
RAISED: list[tuple[str, int, int, bool, int, int, int, str]] = [
    ("strided", 16, 70, True, 1, 1, 16, "float32"),
    ("fixed", 16, 70, False, 1, 1, 16, "float32"),
]


def test_a_sequence_whose_offsets_do_not_fit_32_bits_is_refused():
    """Not read and written elsewhere."""
    from mst_scale.hybrid_sparse_attention import triton_kernel

    q = torch.empty(1, 64, 1 << 18, 128, device="meta", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="sequence_parallel"):
        triton_kernel.forward(q, q, q, pattern=Pattern("strided", 256), causal=True, scale=1.0)


@pytest.fixture(scope="module")
def interpreted() -> list[dict[str, float]]:
    names = ("kind", "stride", "length", "causal", "heads", "kv_heads", "dim", "dtype")
    cases: list[dict[str, Any]] = [dict(zip(names, case, strict=True)) for case in INTERPRETED + RAISED]
    for index, case in enumerate(cases):
        case["shape"] = (1, case["heads"], case["length"], case["dim"])
        case["raised"] = index >= len(INTERPRETED)
    said = triton_interpreter.interpret(["-m", "tests.hybrid_sparse_attention.interpret_triton"], cases)
    return [json.loads(line) for line in said.splitlines()]


@pytest.mark.parametrize("index", range(len(INTERPRETED)), ids=lambda i: "-".join(map(str, INTERPRETED[i])))
def test_interpreted(interpreted: list[dict[str, float]], index: int) -> None:
    allowed = TOLERANCE[getattr(torch, INTERPRETED[index][-1])]
    for name, error in interpreted[index].items():
        # p and ds are rounded to the storage type for the matrix unit: for half types one more rounding, of terms
        # that are at most as large as the result
        assert error <= (2 if "16" in INTERPRETED[index][-1] else 1) * allowed["out" if name == "out" else "grads"]


@pytest.mark.parametrize("index", range(len(RAISED)), ids=lambda i: "-".join(map(str, RAISED[i])))
def test_interpreted_large_scores_cost_no_digits(interpreted: list[dict[str, float]], index: int) -> None:
    for name, error in interpreted[len(INTERPRETED) + index].items():
        assert error <= TOLERANCE[torch.float32]["out" if name == "out" else "grads"], name


def test_interpreted_rows_with_nothing_to_attend_are_zero(interpreted: list[dict[str, float]]) -> None:
    assert interpreted[-1] == {"unseen": 0.0, "finite": 1.0}


@pytest.mark.parametrize("kernel", ["_forward", "_backward_queries", "_backward_keys"])
@pytest.mark.parametrize(
    ("part", "dtype", "dim"),
    [
        *((part, "bfloat16", 64) for part in range(4)),
        (0, "bfloat16", 256),
        (1, "float16", 128),
        (0, "float32", 64),
    ],
)
def test_compiles_for_a_gpu(kernel: str, part: int, dtype: str, dim: int) -> None:
    """PTX and machine code for an H100, with no GPU at hand; shared memory of one block within an A100's 163 KiB."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mst_scale.hybrid_sparse_attention import triton_kernel

    function = getattr(triton_kernel, kernel)
    options = triton_kernel.tile(getattr(torch, dtype), dim)
    launch = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    constants = {**options, "GROUP": 2, "PART": part, "CAUSAL": part != 1, "FIRST": part % 2 == 0}
    kind = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}[dtype]
    pointers = dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), kind)
    pointers |= dict.fromkeys(("tops", "totals", "delta"), "*fp32")
    types = pointers | {"scale": "fp32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in function.arg_names}
    source = ASTSource(function, signature, {(function.arg_names.index(n),): value for n, value in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)
    if dtype != "float32":
        assert "wgmma" in compiled.asm["ptx"] or "mma.sync" in compiled.asm["ptx"]  # tensor cores
    assert compiled.metadata.shared <= 163 * 1024


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kind", "stride"), [("strided", 256), ("strided", 24), ("fixed", 100), ("strided", 5000)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_on_a_gpu(dtype: torch.dtype, kind: str, stride: int, causal: bool, dim: int) -> None:
    check("triton", inputs((2, 4, 777, dim), 2, dtype, "cuda"), Pattern(kind, stride), causal, slack=2.0)


@pytest.mark.gpu
@needs_gpu
def test_auto_takes_triton_on_a_gpu() -> None:
    q, k, v, _ = inputs((1, 2, 600, 64), 2, torch.bfloat16, "cuda")
    pattern = Pattern("strided", 64)
    assert torch.equal(attention(q, k, v, pattern), attention(q, k, v, pattern, backend="triton"))
