"""The block kernels as compiled for an A100 and an H100, with no GPU at hand."""

from __future__ import annotations

import dataclasses
import re

import pytest

pytest.importorskip("triton")

from mst_scale.benchmarks.ahead import A100, H100, TARGETS, Built, Target
from mst_scale.benchmarks.compiled import Case, cases

from mst_scale.sparse_linear import block

KERNELS = ("_product", "_weight_gradient", "_add_parts")
SIDES = (16, 32, 64, 128)
TENSOR_CORES = {A100: "mma.sync", H100: "wgmma.mma_async"}


def check(case: Case) -> Built:
    """Nothing spilled, within shared memory, on tensor cores, no atomics; all data in pieces of 16 bytes.

    x, dy and the weight, gathered as they are, go to shared memory without passing through registers, for y as well as
    for dX, which reads the weight along its other direction, and for dW, which reads x as its transpose.
    """
    built = case.build()
    assert built.stack == 0 and built.shared <= case.target.largest and built.programs >= 1, built.limits
    assert built.atomics == 0
    assert set(re.findall(r"st\.global(?:\.\w+)*", built.ptx)) <= {"st.global.v4.b32", "st.global.v2.b32"}
    if case.kernel == "_add_parts":
        return built
    assert built.instruction == TENSOR_CORES[case.target]
    assert 16 in built.copies and "ld.global.v4" not in built.ptx
    assert built.ptx.count("ld.global.b16") <= 1, "of the bias"
    return built


def some(kernel: str, target: Target, side: int) -> list[Case]:
    """The first tile of the list in every variant."""
    found = [case for case in cases([kernel], [target]) if case.size == side]
    return [case for case in found if case.line == found[0].line]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("side", [16, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_some_tiles(kernel: str, side: int, target: Target) -> None:
    for case in some(kernel, target, side):
        check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(cases(KERNELS)), ids=lambda case: "-".join(map(str, case.line)))
def test_every_tile(case: Case) -> None:
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_other_types(kernel: str, dtype: str) -> None:
    """Shared memory within an A100's; float32 is multiplied as float32."""
    for case in some(kernel, H100, 32):
        built = dataclasses.replace(case, dtype=dtype).build()
        assert (built.instruction == "none") == (dtype == "fp32" or kernel == "_add_parts")
        assert built.shared <= A100.largest and built.atomics == 0


@pytest.mark.full
def test_an_a100_copies_the_next_tile_while_it_multiplies() -> None:
    """Two buffers of x; with 4 stages, of which the lists of blocks take half, there is one."""
    case = some("_product", A100, 32)[0]
    x = 2 * dict(case.tile)["WIDTH"] * dict(case.tile)["TOKENS"]
    assert case.build().shared >= 2 * x > dataclasses.replace(case, stages=4).build().shared


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("side", SIDES)
def test_every_gpu_has_tiles(capability: int, side: int) -> None:
    assert block.product_tiles(capability, side) and block.gradient_tiles(capability, side)


@pytest.mark.parametrize(
    ("tuned", "sizes"), [(block._tuned_product, block.PRODUCT), (block._tuned_gradient, block.GRADIENT)]
)
def test_choices_are_kept_by_what_they_depend_on(tuned, sizes):
    """The tuner leaves out names that a kernel does not have, and all shapes and sides would share a choice."""
    found = tuned(tuple(sizes))
    assert found.cache_results and {"SIDE", "outputs", "inputs"} < set(found.keys) <= set(found.arg_names)
