"""Bits are stored as numpy.packbits stores them, and applied exactly."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mst_scale.mixed_growing import packed_bits
from tests.support.triton_interpreter import interpret

CPU = torch.device("cpu")
LENGTHS = [0, 1, 7, 8, 9, 1000, packed_bits.CPU_SPAN - 3, packed_bits.CPU_SPAN + 13]


def random_flags(length: int, density: float = 0.3) -> np.ndarray:
    return np.random.default_rng(length).random(length) < density


@pytest.mark.parametrize("length", LENGTHS)
def test_pack_is_numpys(length: int):
    flags = random_flags(length)
    packed = packed_bits.pack(torch.from_numpy(flags))
    assert np.array_equal(packed.numpy(), np.packbits(flags))
    assert np.array_equal(packed_bits.unpack(packed, length).numpy(), flags)
    assert packed_bits.count(packed) == flags.sum()
    assert np.array_equal(packed_bits.indices(packed, length).numpy(), np.flatnonzero(flags))
    assert np.array_equal(packed_bits.complement(packed, length).numpy(), np.packbits(~flags))
    assert np.array_equal(packed_bits.ones(length, CPU).numpy(), np.packbits(np.ones(length, bool)))


def test_pack_takes_any_view():
    flags = torch.from_numpy(random_flags(1000))
    for view in (flags[3:], flags[::2], flags[5:105]):
        assert np.array_equal(packed_bits.pack(view).numpy(), np.packbits(view.numpy()))


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.integers(0, 200), st.data())
def test_cut_and_join_at_any_offset(length: int, data: st.DataObject):
    flags = random_flags(length)
    packed = packed_bits.pack(torch.from_numpy(flags))
    ends = sorted(data.draw(st.lists(st.integers(0, length), max_size=4)))
    borders = [0, *ends, length]
    pieces = [(packed_bits.cut(packed, a, b), b - a) for a, b in pairwise(borders)]
    for (piece, n), a in zip(pieces, borders, strict=False):
        assert np.array_equal(piece.numpy(), np.packbits(flags[a : a + n]))
    assert torch.equal(packed_bits.join(pieces, CPU), packed)


def test_tests_and_adds_single_bits():
    flags = random_flags(100)
    packed = packed_bits.pack(torch.from_numpy(flags))
    where = torch.tensor([99, 0, 50, 7, 8])
    assert np.array_equal(packed_bits.test(packed, where).numpy(), flags[where.numpy()])
    clear = torch.from_numpy(np.flatnonzero(~flags)[[1, 2, 3, 30, 40]])
    for index_type in (torch.int64, torch.int32):
        added = packed.clone()
        packed_bits.add_(added, clear.to(index_type))
        expected = flags.copy()
        expected[clear.numpy()] = True
        assert np.array_equal(added.numpy(), np.packbits(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("length", LENGTHS)
def test_retain_writes_exact_zeros_over_anything(length: int, dtype: torch.dtype):
    flags = torch.from_numpy(random_flags(length))
    values = torch.randn(length, dtype=torch.float64).to(dtype)
    values[0::5], values[1::5], values[2::5] = float("nan"), float("-inf"), -0.0
    expected = torch.where(flags, values, torch.zeros((), dtype=dtype))
    whole = torch.cat([torch.ones(3, dtype=dtype), values])  # a view that starts inside a buffer, as a shard does
    packed_bits.retain_(whole[3:], packed_bits.pack(flags))
    assert torch.equal(whole[3:].isnan(), expected.isnan())
    kept = ~expected.isnan()
    assert torch.equal(whole[3:][kept], expected[kept])
    assert not torch.signbit(whole[3:][~flags]).any(), "the zeros are +0"


def test_retain_reaches_a_leaf_that_requires_grad():
    values = torch.ones(9, requires_grad=True)
    packed_bits.retain_(values, packed_bits.pack(torch.arange(9) % 2 == 0))
    assert values.tolist() == [1, 0, 1, 0, 1, 0, 1, 0, 1]


def test_unpacking_by_shifts_is_unpacking():
    """What a GPU does, on the CPU."""
    packed = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(packed_bits._unpack_by_shifts(packed), packed_bits.unpack(packed, 2048))


@pytest.mark.parametrize("length", LENGTHS)
def test_packing_and_counting_on_a_gpu_are_numpys(length: int):
    flags = random_flags(length)
    packed = packed_bits._pack_by_multiplication(torch.from_numpy(flags))
    assert np.array_equal(packed.numpy(), np.packbits(flags))
    assert packed_bits._count_by_table(packed) == flags.sum()


def test_the_zeroing_kernel_is_retain():
    pytest.importorskip("triton")
    lengths, dtypes = (0, 1, 9, 4095, 4096, 10_001), ("float32", "float16", "bfloat16")
    cases = [{"dtype": dtype, "length": length} for dtype in dtypes for length in lengths]
    found = json.loads(interpret(["-m", "tests.support.interpret_zeroing"], cases))
    assert found == [0] * len(cases)


def test_the_zeroing_kernel_compiles_for_a100_and_h100():
    pytest.importorskip("triton")
    from mst_scale.benchmarks.compiled import cases

    for case in cases(["_zero_inactive"]):
        built = case.build()
        assert built.stack == 0 and built.shared == 0 and built.atomics == 0, case
        assert built.registers * 32 * built.warps <= 65536 and "ld.global" in built.ptx
