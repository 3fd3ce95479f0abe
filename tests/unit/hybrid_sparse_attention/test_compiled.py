"""The attention kernels as compiled for an A100 and an H100, with no GPU at hand."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from mst_scale.benchmarks.ahead import A100, H100, KIB, TARGETS, Built, Target
from mst_scale.benchmarks.compiled import BLOCK, LAST, RESIDUES, WINDOW, Case, cases

from mst_scale.hybrid_sparse_attention import tiles, triton_kernel

L40S = Target("L40S", 89, 100 * KIB, 99 * KIB)  # 8.6 and 12 have as much shared memory
TENSOR_CORES = {A100: "mma.sync", H100: "wgmma.mma_async"}


def check(case: Case) -> Built:
    """Within registers and shared memory, on tensor cores, copies of 16 bytes, no atomics.

    Nothing is spilled by Triton 3.7, four numbers of a thread by 3.6, of 255.
    """
    built = case.build()
    assert built.stack <= 16 and built.shared <= case.target.largest and built.programs >= 1, built.limits
    assert built.instruction == TENSOR_CORES[case.target]
    assert 16 in built.copies and set(built.copies) <= {4, 8, 16}, "less than 16 are numbers by row"
    assert built.atomics == 0
    return built


def of_parts(kernel: str, target: Target, dim: int, parts: tuple[int, ...]) -> list[Case]:
    """The first tile of the list, causal."""
    found = [case for case in cases([kernel], [target]) if case.size == dim]
    chosen = [dict(case.constants) | {"case": case} for case in found if case.line == found[0].line]
    return [c["case"] for c in chosen if c["PART"] in parts and c["CAUSAL"]]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("kernel", tiles.KERNELS)
def test_some_tiles(kernel: str, target: Target) -> None:
    for case in [*of_parts(kernel, target, 64, (WINDOW, LAST))[:2], *of_parts(kernel, target, 128, (RESIDUES,))]:
        check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(cases(tiles.KERNELS)), ids=lambda case: "-".join(map(str, case.line)))
def test_every_tile(case: Case) -> None:
    check(case)


def first_tile(kernel: str, target: Target, dtype: str, dim: int, **launch: int) -> Built:
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    tile = tiles.tiles_of(kernel, target.capability, kind, dim)[0]
    sizes = (("QUERIES", tile.queries), ("KEYS", tile.keys))
    constants = {"FIRST": True, "CAUSAL": True, "GROUP": 2, "SKIP": tile.skip, **launch}
    return Case(kernel, target, dim, sizes, tile.warps, tile.stages, tuple(constants.items()), dtype).build()


@pytest.mark.full
@pytest.mark.parametrize("kernel", tiles.KERNELS)
@pytest.mark.parametrize(
    ("part", "dtype", "dim"), [(0, "bf16", 256), (1, "fp16", 80), (0, "fp32", 64), (3, "fp32", 128), (1, "fp32", 160)]
)
def test_inputs_without_tuning(kernel: str, part: int, dtype: str, dim: int) -> None:
    """Shared memory within that of smaller GPUs; heads of 256 may spill, and float32 is multiplied as float32."""
    built = first_tile(kernel, H100, dtype, dim, PART=part)
    assert (built.instruction == "none") == (dtype == "fp32")
    tuned = dtype != "fp32" and dim <= 128  # on smaller GPUs, the tuner leaves out tiles that do not fit
    assert built.shared <= (A100 if tuned else L40S).largest and built.atomics == 0


@pytest.mark.slow
@pytest.mark.parametrize("target", [A100, L40S, H100], ids=lambda target: target.name)
@pytest.mark.parametrize("kernel", tiles.KERNELS)
def test_float32_heads_of_256(kernel: str, target: Target) -> None:
    """Every launch fits into the shared memory of smaller GPUs and spills four numbers of a thread at most."""
    launches = [(part, first, True) for part in (WINDOW, RESIDUES, BLOCK, LAST) for first in (True, False)]
    for part, first, causal in (*launches, (WINDOW, True, False), (WINDOW, False, False)):
        built = first_tile(kernel, target, "fp32", 256, PART=part, FIRST=first, CAUSAL=causal, GROUP=1)
        assert built.shared <= L40S.largest and built.stack <= 16, (part, first, causal)


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_every_gpu_has_tiles(capability: int) -> None:
    for kernel in tiles.KERNELS:
        for dim in (8, 64, 80, 128, 256):
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                assert tiles.tiles_of(kernel, capability, dtype, dim)
    assert len(tiles.tiles_of("_forward", 0, torch.float16, 64)) == 1  # the interpreter


def test_lengths_within_a_factor_of_four_share_their_choice() -> None:
    assert [tiles.size_class(n) for n in (0, 1, 2, 4, 5, 16, 17, 128, 256, 257, 1024)] == [
        0,
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        4,
        4,
        5,
    ]


@pytest.mark.parametrize("name", tiles.KERNELS)
def test_tuning_results_are_cached_by_their_inputs(name):
    """The tuner leaves out names that a kernel does not have, and launches of all kinds would share a choice."""
    tuned = triton_kernel._tuned(name, tiles.tiles_of(name, 90, torch.bfloat16, 64), ())
    assert tuned.cache_results and set(tuned.keys) == set(triton_kernel.TUNED_BY)
    assert set(tuned.keys) <= set(tuned.arg_names)
