"""Digests change with every bit, do not depend on how a tensor lies in memory, and are those of their definition."""

import pytest
import torch

from mst_scale.verification import digest, digests
from mst_scale.verification.tensor_digest import CHUNK, WORD, _hashes

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
LENGTHS = [0, 1, 7, 1000, CHUNK * 2 + 13, 3 * CHUNK + CHUNK // 2 + 1]


def made(dtype: torch.dtype, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(2, (length,), generator=generator).bool()
    raw = torch.randint(256, (length * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype) if length else torch.zeros(0, dtype=dtype)


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Flip a bit of a contiguous tensor in place."""
    data = tensor.view(-1).view(torch.uint8)
    data[bit // 8] ^= 1 << bit % 8


def by_definition(tensor: torch.Tensor) -> int:
    """The sum of the module's docstring, in Python's integers."""
    data = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    words = [
        int.from_bytes(data[i : i + WORD].ljust(WORD, b"\0"), "little", signed=True) for i in range(0, len(data), WORD)
    ]
    positions = torch.arange(CHUNK)
    of_words, of_chunks = (_hashes(seed, positions).tolist() for seed in (1, 2))
    total = len(data) * 0x2545F4914F6CDD1D
    total += sum(word * of_words[i % CHUNK] * of_chunks[i // CHUNK] for i, word in enumerate(words))
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_digest_is_its_definition(dtype, length):
    tensor = made(dtype, length)
    assert int(digest(tensor)) == by_definition(tensor)


@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=str)
def test_every_flipped_bit_changes_it(dtype):
    tensor = made(dtype, CHUNK * 8 // dtype.itemsize + 37)
    before, bits = int(digest(tensor)), tensor.numel() * dtype.itemsize * 8
    generator = torch.Generator().manual_seed(1)
    chosen = [0, bits - 1, *range(bits - 70, bits), *torch.randint(bits, (400,), generator=generator).tolist()]
    for bit in chosen:
        flip(tensor, bit)
        assert int(digest(tensor)) != before, bit
        flip(tensor, bit)
    assert int(digest(tensor)) == before


def test_no_flip_of_a_small_tensor_has_the_digest_of_another():
    tensor = made(torch.float32, 33)
    found = {int(digest(tensor))}
    for bit in range(33 * 32):
        flip(tensor, bit)
        found.add(int(digest(tensor)))
        flip(tensor, bit)
    assert len(found) == 33 * 32 + 1


def test_changes_of_two_words_do_not_cancel():
    """Every sign, for example: a sum of 64-bit words sees no even number of flips of their highest bits."""
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.ones(64, dtype=dtype)
        seen = set()
        for i in range(64):
            for j in range(i):
                tensor[[i, j]] = -1
                seen.add(int(digest(tensor)))
                tensor[[i, j]] = 1
        assert len(seen | {int(digest(tensor)), int(digest(-tensor))}) == 64 * 63 // 2 + 2


def test_places_count():
    tensor = torch.zeros(4 * CHUNK, dtype=torch.int64)
    seen = set()
    for place in (0, 1, CHUNK - 1, CHUNK, 2 * CHUNK, 4 * CHUNK - 1):
        tensor[place] = 5
        seen.add(int(digest(tensor)))
        tensor[place] = 0
    assert len(seen) == 6
    swapped = made(torch.int64, 100)
    before = int(digest(swapped))
    swapped[[3, 70]] = swapped[[70, 3]]
    assert int(digest(swapped)) != before


def test_lengths_count():
    assert len({int(digest(torch.zeros(n))) for n in range(5)}) == 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start", [1, 2, 3])
def test_neither_address_nor_strides_count(dtype, start):
    tensor = made(dtype, CHUNK * 8 // dtype.itemsize + 50)
    part = tensor[start:]
    assert int(digest(part)) == int(digest(part.clone()))
    matrix = tensor[:24].view(4, 6)
    assert int(digest(matrix.t())) == int(digest(matrix.t().contiguous()))


def test_blocks_do_not_count(monkeypatch):
    tensor = made(torch.bfloat16, 5 * CHUNK * 4 + 3)
    whole = int(digest(tensor))
    monkeypatch.setitem(digest.__globals__["_BLOCK"], "cpu", CHUNK)
    assert int(digest(tensor)) == whole


def test_values_that_are_equal_but_not_the_same_bits_differ():
    assert int(digest(torch.tensor([0.0]))) != int(digest(torch.tensor([-0.0])))
    nan = torch.tensor([float("nan")])
    assert int(digest(nan)) == int(digest(nan.clone()))


def test_several_at_once():
    tensors = [made(dtype, 100) for dtype in DTYPES]
    assert digests(tensors) == [int(digest(tensor)) for tensor in tensors] and digests([]) == []
    assert digest(torch.tensor(3.0, requires_grad=True)).dtype == torch.int64
