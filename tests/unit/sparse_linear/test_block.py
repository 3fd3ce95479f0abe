"""The Triton block kernels: interpreted on CPU, and run on a GPU (marker gpu)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from mst_scale.errors import UserError  # noqa: E402
from mst_scale.sparse_linear import block, dispatch  # noqa: E402
from tests.support import triton_interpreter  # noqa: E402
from tests.support.block_cases import TOLERANCE, errors, mask_of  # noqa: E402
from tests.support.quick import selected  # noqa: E402

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
KINDS = ("some", "empty rows", "one", "all", "none")


def case(**changes: Any) -> dict[str, Any]:
    usual = {"outputs": 70, "inputs": 100, "tokens": 40, "side": 16, "kind": "some", "dtype": "float32"}
    return {**usual, "bias": True, "dense": False, "transposed": False, **changes}


INTERPRETED = [
    *(case(kind=kind) for kind in KINDS),
    *(case(side=side, tokens=70) for side in (32, 64, 128)),  # one tile of tokens and a cut one; one block for 128
    case(outputs=64, inputs=96, bias=False),  # whole blocks
    case(outputs=1, inputs=1, tokens=1),
    case(tokens=0),
    case(tokens=1300, outputs=16, inputs=40),  # tokens are split
    case(dtype="float16", tokens=70, side=32),
    case(dtype="float16", kind="empty rows", transposed=True),
    case(dense=True),
    case(transposed=True, bias=False),
]


def interpret(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    said = triton_interpreter.interpret(["-m", "tests.support.interpret_block"], cases)
    lines = [line.removeprefix("result ") for line in said.splitlines() if line.startswith("result ")]
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    cases = INTERPRETED if selected(request, test_interpreted) else []
    training = [{"stage": 3}] if selected(request, test_training_with_the_kernels) else []
    return interpret([{"poisoned": True}, *cases, *training])


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(INTERPRETED)), ids=lambda i: "-".join(map(str, INTERPRETED[i].values())))
def test_interpreted(interpreted: list[dict[str, Any]], index: int) -> None:
    allowed = TOLERANCE[getattr(torch, INTERPRETED[index]["dtype"])]
    found = interpreted[1 + index]
    assert set(found) == {"y", "dx", "dw"} | ({"db"} if INTERPRETED[index]["bias"] else set())
    for name, error in found.items():
        assert error <= allowed, name


@pytest.mark.full
def test_training_with_the_kernels(interpreted: list[dict[str, Any]]) -> None:
    """Ten steps at ZeRO-3, three of them topology steps; 4 layers and the tied head.

    Losses near 4 are alike to their last bits: an error of 1e-4 in every product moves them by 2.5e-5.
    """
    assert interpreted[-1]["difference"] < 5e-6
    assert interpreted[-1]["indexed"] == 5


def test_what_is_not_finite_goes_where_active_weights_lead_it(interpreted: list[Any]) -> None:
    assert len(interpreted[0]) == 10 and [name for name, held in interpreted[0].items() if not held] == []


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_mask_of_single_weights_is_refused():
    active = mask_of(64, 64, 16, "some")
    active[3, 5] ^= True
    with pytest.raises(UserError, match="16 × 16"):
        block.BlockIndex(active, 16)
    with pytest.raises(UserError, match="32 × 32"):
        block.BlockIndex(mask_of(70, 100, 16, "some"), 32)


@pytest.mark.parametrize(
    ("device", "dtype", "side", "reason"),
    [
        ("cpu", torch.float32, 16, "CUDA"),
        ("cuda", torch.float32, 1, "single weights"),
        ("cuda", torch.float32, 8, "16, 32, 64, 128"),
        ("cuda", torch.float64, 16, "torch.float64"),
    ],
)
def test_why_not(device: str, dtype: torch.dtype, side: int, reason: str):
    assert reason in str(dispatch.unsupported_reason("block", device, dtype, (64, 64), side))


def test_why():
    assert dispatch.unsupported_reason("block", "cuda", torch.bfloat16, (64, 64), 16) is None
    assert "32-bit" in str(dispatch.unsupported_reason("block", "cuda", torch.bfloat16, (1 << 17, 1 << 14), 16))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("side", block.SIDES)
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(dtype: str, side: int, kind: str) -> None:
    found = errors(case(dtype=dtype, side=side, kind=kind, outputs=777, inputs=1030, tokens=3000), "cuda")
    # float32 sums of a thousand terms; in dW of three thousand
    assert max(found.values()) <= 2 * TOLERANCE[getattr(torch, dtype)], found


@pytest.mark.gpu
@needs_gpu
def test_the_same_bits_each_time() -> None:
    active = mask_of(1024, 1024, 32, "some").cuda()
    x, weight, dy = (torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    index = block.BlockIndex(active, 32)
    for product in (
        lambda: index.forward(x, weight[:1024], None),
        lambda: index.input_gradient(dy, weight[:1024]),
        lambda: index.weight_gradient(x, dy),
    ):
        assert torch.equal(product(), product())
