"""Digests the bits of a tensor in integer arithmetic: exact, fast, and equal on every device.

A tensor is read as signed 32-bit words x[c, i], in chunks c of `CHUNK` words; the last one is filled up with zeros:

    digest = Σ_c v[c] · Σ_i w[i] · x[c, i]  +  u · bytes        (mod 2^64)

All factors are odd 64-bit hashes of their position. An odd number is invertible modulo 2^64, so a change of any one
word, by any number of bits, changes the digest for certain. Several words that change, or swap their places, keep it
with a probability of at most 2^-32: a sum of 64-bit words would not see that two of them change their highest bits.
Integer sums do not depend on their order, so digests do not depend on how a device adds up. They protect from
accidents, not from an adversary who chooses values with the same digest.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from mst_scale.mixed_growing.random_k import mix64
from mst_scale.randomness import GOLDEN64

CHUNK = 1 << 14
"""Words of a chunk: with their factors they fit into a core's cache."""
WORD = 4  # bytes
_BLOCK = {"cpu": 1 << 16, "cuda": 1 << 25}  # words that are widened to 64 bits at a time: in the cache, or 256 MiB
_SEEDS = (1, 2)  # of the factors of words and of chunks
_OF_LENGTH = 0x2545F4914F6CDD1D


def digest(tensor: Tensor) -> Tensor:
    """Return the digest of a tensor's bits as a 0-dimensional int64 tensor on its device."""
    data = tensor.detach().contiguous().view(-1)
    if data.dtype == torch.bool:
        data = data.view(torch.uint8)
    size = data.element_size()
    whole = data.numel() * size // WORD * WORD // size  # elements in whole words
    total = torch.full((), _signed(data.numel() * size * _OF_LENGTH), dtype=torch.int64, device=data.device)
    block = _BLOCK.get(data.device.type, _BLOCK["cuda"]) * WORD // size
    for start in range(0, whole, block):
        words = _words(data[start : min(start + block, whole)])
        total += _digest_words(words, start * size // WORD)
    if whole < data.numel():
        rest = torch.zeros(WORD // size, dtype=data.dtype, device=data.device)
        rest[: data.numel() - whole] = data[whole:]
        total += _digest_words(_words(rest), whole * size // WORD)
    return total


def digests(tensors: Iterable[Tensor]) -> list[int]:
    """Return the digests of several tensors; the devices are waited for once."""
    found = [digest(tensor) for tensor in tensors]
    values = dict.fromkeys(range(len(found)), 0)
    for device in {one.device for one in found}:
        here = [i for i, one in enumerate(found) if one.device == device]
        values.update(zip(here, torch.stack([found[i] for i in here]).tolist(), strict=True))
    return list(values.values())


def _words(data: Tensor) -> Tensor:
    """View contiguous elements as words; those that do not start at the address of one are copied."""
    if data.storage_offset() * data.element_size() % WORD or data.data_ptr() % WORD:
        data = data.clone()
    return data.view(torch.int32)


def _digest_words(words: Tensor, first: int) -> Tensor:
    """Return the sum of words times their factors; `first` is the number of the first word in the tensor."""
    words, factors = words.to(torch.int64), _factors(_SEEDS[0], 0, CHUNK, words.device)
    chunk, place = divmod(first, CHUNK)
    if place or words.numel() < CHUNK:  # within one chunk
        return (words * factors[place : place + words.numel()]).sum() * _factors(_SEEDS[1], chunk, 1, words.device)[0]
    whole = words.numel() // CHUNK
    chunks = words[: whole * CHUNK].view(whole, CHUNK)
    # torch has integer matrix products on CPUs alone, where they are twice as fast
    of_chunks = chunks @ factors if words.device.type == "cpu" else (chunks * factors).sum(1)
    total = (of_chunks * _factors(_SEEDS[1], chunk, whole, words.device)).sum()
    if words.numel() > whole * CHUNK:
        total += _digest_words(words[whole * CHUNK :], (chunk + whole) * CHUNK)
    return total


@functools.lru_cache(maxsize=8)
def _fixed_factors(seed: int, device: torch.device) -> Tensor:
    return _hashes(seed, torch.arange(CHUNK, dtype=torch.int64, device=device))


def _factors(seed: int, first: int, count: int, device: torch.device) -> Tensor:
    """Return the odd factors of positions `first` and the `count - 1` that follow."""
    if first + count <= CHUNK:
        return _fixed_factors(seed, device)[first : first + count]
    return _hashes(seed, torch.arange(first, first + count, dtype=torch.int64, device=device))


def _hashes(seed: int, positions: Tensor) -> Tensor:
    return mix64((positions + (seed << 48)) * _signed(GOLDEN64)) | 1


def _signed(number: int) -> int:
    """Return a number modulo 2^64 as the int64 with its bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
