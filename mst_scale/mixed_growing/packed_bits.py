"""Stores, reads and applies one bit per weight.

Bit j of a shard is in byte j >> 3, highest bit first: the order of `numpy.packbits`. Bits past the end are 0. All
functions work in spans that stay in cache, so a mask is never unpacked as a whole: temporaries take a few MB on a CPU.
There, numpy packs, counts, compares and finds flags in a half to a tenth of the time that torch takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

_PACK = -0x7FBFDFEFF7FBFDFF  # 0x8040201008040201 as int64: moves byte i's lowest bit to bit 63 - i
log = logging.getLogger("mst_scale")
INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
CPU_SPAN = 1 << 20  # weights per span, 4 MB of float32; smaller spans are no faster and start more threads
DEVICE_SPAN = 1 << 24  # 64 MB, because launches cost more than memory traffic


def spans(length: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield [begin, end) pieces of a flat slice that begin at byte borders."""
    span = CPU_SPAN if device.type == "cpu" else DEVICE_SPAN
    for begin in range(0, length, span):
        yield begin, min(begin + span, length)


def byte_count(length: int) -> int:
    """Return the number of bytes of `length` bits."""
    return (length + 7) // 8


def zeros(length: int, device: torch.device) -> Tensor:
    """Return `length` clear bits."""
    return torch.zeros(byte_count(length), dtype=torch.uint8, device=device)


def ones(length: int, device: torch.device) -> Tensor:
    """Return `length` set bits."""
    return _clear_tail_(torch.full((byte_count(length),), 255, dtype=torch.uint8, device=device), length)


def _clear_tail_(bits: Tensor, length: int) -> Tensor:
    """Clear the bits past the end, as the format requires."""
    if length % 8 and bits.numel():
        bits[-1] &= 0xFF << (8 - length % 8) & 0xFF
    return bits


def pack(flags: Tensor) -> Tensor:
    """Pack bool (n,) into uint8 (⌈n/8⌉,)."""
    if flags.device.type == "cpu":
        return torch.from_numpy(np.packbits(flags.numpy()))
    return _pack_by_multiplication(flags)


def _pack_by_multiplication(flags: Tensor) -> Tensor:
    """Pack on a GPU, eight flags at a time."""
    if flags.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=flags.device)
    if flags.numel() % 8:
        flags = torch.cat([flags, flags.new_zeros(8 - flags.numel() % 8)])
    if flags.storage_offset() % 8 or not flags.is_contiguous():
        flags = flags.clone(memory_format=torch.contiguous_format)
    eights = flags.view(torch.int64)  # one 0/1 byte per weight
    return ((eights * _PACK) >> 56).to(torch.uint8)


def pack_rows(rows: Callable[[int, int], Tensor], width: int, start: int, length: int, device: torch.device) -> Tensor:
    """Pack the range [start, start + length) of a flattened matrix.

    `rows(first, last)` returns some of its rows, each of `width` flags.
    """
    packed = []
    for a, b in spans(length, device):
        first, last = (start + a) // width, -(-(start + b) // width)
        begin = start + a - first * width
        packed.append(pack(rows(first, last).view(-1)[begin : begin + b - a]))
    return torch.cat(packed) if packed else zeros(0, device)


def unpack(bits: Tensor, length: int) -> Tensor:
    """Unpack uint8 (⌈n/8⌉,) into bool (n,), a temporary of one byte per weight."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(bits.numpy(), count=length)).view(torch.bool)
    return _unpack_by_shifts(bits)[:length]


def _unpack_by_shifts(bits: Tensor) -> Tensor:
    """Unpack on a GPU, where shifts are far faster than table look-ups."""
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=bits.device)
    return ((bits[:, None] >> shifts) & 1).view(torch.bool).view(-1)


def unpack_span(bits: Tensor, begin: int, end: int) -> Tensor:
    """Return bits [begin, end) as bool; `begin` is a multiple of 8."""
    return unpack(bits[begin // 8 : byte_count(end)], end - begin)


def complement(bits: Tensor, length: int) -> Tensor:
    """Return the inverted bits."""
    return _clear_tail_(~bits, length)


def count(bits: Tensor) -> int:
    """Return the number of set bits."""
    if bits.device.type == "cpu":
        array, whole = bits.numpy(), bits.numel() // 8 * 8
        counts = np.bitwise_count(array[:whole].view(np.uint64)), np.bitwise_count(array[whole:])
        return sum(int(of.sum(dtype=np.int64)) for of in counts)
    return _count_by_table(bits)


def _count_by_table(bits: Tensor) -> int:
    """Count on a GPU, where each byte looks up its number of bits."""
    table = _count_table(bits.device)
    total = 0
    for begin, end in spans(bits.numel(), bits.device):
        total += int(table.index_select(0, bits[begin:end].to(torch.int32)).sum(dtype=torch.int64))
    return total


def positions(flags: Tensor) -> Tensor:
    """Return the positions of the True in a flat bool tensor in ascending order, int64."""
    if flags.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(flags.numpy()))
    return flags.nonzero().view(-1)


def below(values: Tensor, limit: int) -> Tensor:
    """Return as bool which of these integers are less than `limit`."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.less(values.numpy(), limit))
    return values < limit


def indices(bits: Tensor, length: int) -> Tensor:
    """Return the positions of the set bits in ascending order, int64."""
    found = [positions(unpack_span(bits, a, b)) + a for a, b in spans(length, bits.device)]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=bits.device)


def test(bits: Tensor, where: Tensor) -> Tensor:
    """Return as bool whether the bits at these positions are set."""
    byte = bits.index_select(0, where >> 3).to(torch.int32)
    return ((byte >> (7 - (where & 7))) & 1).to(torch.bool)


def add_(bits: Tensor, where: Tensor) -> None:
    """Set the bits at distinct positions, all of which must be clear."""
    bits.index_add_(0, where >> 3, (128 >> (where & 7)).to(torch.uint8))


def cut(bits: Tensor, begin: int, end: int) -> Tensor:
    """Return bits [begin, end) as a separate shard, for any `begin`."""
    source, by = bits[begin // 8 : byte_count(end)], begin % 8
    if by and source.numel():
        source = (source << by) | (torch.cat([source[1:], source.new_zeros(1)]) >> (8 - by))
    return _clear_tail_(source[: byte_count(end - begin)].clone(), end - begin)


def moved(bits: Tensor, by: int) -> Tensor:
    """Return the bits shifted towards the end by `by` (0 to 7) positions, with one more byte."""
    spilled = torch.cat([bits, bits.new_zeros(1)])
    return spilled if by == 0 else (spilled >> by) | (spilled.roll(1) << (8 - by))


def join(pieces: list[tuple[Tensor, int]], device: torch.device) -> Tensor:
    """Concatenate shards (bits, length)."""
    length = sum(n for _, n in pieces)
    joined, position = zeros(length + 8, device), 0
    for bits, n in pieces:
        placed = moved(bits.to(device), position % 8)
        joined[position // 8 : position // 8 + placed.numel()] |= placed
        position += n
    return joined[: byte_count(length)]


def retain_(values: Tensor, bits: Tensor) -> None:
    """Write exact zeros into the flat `values` where a bit is clear, over NaN too.

    This takes one pass: each byte of bits selects 8 words of all ones or all zeros, which are ANDed into the values. On
    a GPU, where such look-ups are slow, a Triton kernel stores the zeros (`zero_inactive`); without Triton, torch does.
    """
    assert values.dim() == 1 and values.is_contiguous() and bits.numel() == byte_count(values.numel())
    if values.device.type != "cpu":
        values = values.detach()
        if (kernel := _gpu_kernel()) is not None and values.is_cuda:
            kernel(values, bits)
            return
        for begin, end in spans(values.numel(), values.device):
            values[begin:end].masked_fill_(~unpack_span(bits, begin, end), 0)
        return
    words = values.detach().view(INTEGER_OF_SIZE[values.element_size()])
    table = _word_table(words.dtype, words.device)
    for begin, end in spans(values.numel(), values.device):
        keep = table.index_select(0, bits[begin // 8 : byte_count(end)].to(torch.int32)).view(-1)
        words[begin:end].bitwise_and_(keep[: end - begin])


@cache
def _gpu_kernel() -> Callable[[Tensor, Tensor], None] | None:
    """Return the Triton kernel that zeroes inactive values; None if Triton is not installed."""
    try:
        from mst_scale.mixed_growing.zero_inactive import zero_inactive_
    except ImportError as error:
        log.info("masks are applied without a Triton kernel (%s), which is several times slower", error)
        return None
    return zero_inactive_


def count_outside(values: Tensor, bits: Tensor) -> int:
    """Count the values that are not 0 where a bit is clear; NaN is not 0."""
    assert values.dim() == 1 and bits.numel() == byte_count(values.numel())
    counts = [
        (values[begin:end].detach().ne(0) & ~unpack_span(bits, begin, end)).count_nonzero()
        for begin, end in spans(values.numel(), values.device)
    ]
    return int(torch.stack(counts).sum()) if counts else 0


def _bit_table() -> Tensor:
    """Return (256, 8) int64: the bits of each byte, highest first."""
    return (torch.arange(256)[:, None] >> torch.arange(7, -1, -1)) & 1


@cache
def _word_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    return (-_bit_table()).to(dtype).contiguous().to(device)


@cache
def _count_table(device: torch.device) -> Tensor:
    return _bit_table().sum(dim=1).to(torch.uint8).to(device)
