"""Counter-based random numbers: every random decision is a hash of its inputs, so there is no generator state.

`counter_hash(seed, step, name, …)` is the same 64-bit number in any process, on any device and in any order of
evaluation. The sample order and the random part of Mixed-Growing therefore do not depend on the number of ranks and
are reproduced exactly after a resume.
"""

from __future__ import annotations

MASK64 = (1 << 64) - 1
GOLDEN64 = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: Weyl increment that keeps successive counters far apart


def mix64(x: int) -> int:
    """Apply a bijection on 64-bit integers in which every input bit flips every output bit half of the time."""
    x &= MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def counter_hash(*inputs: int | str) -> int:
    """Return the 64-bit hash of integers and names; their order matters."""
    state = len(inputs)
    for each in inputs:
        for value in _as_integers(each):
            state = mix64((state ^ value) + GOLDEN64)
    return state


def _as_integers(value: int | str) -> list[int]:
    if isinstance(value, int):
        return [value & MASK64]
    data = value.encode()
    chunks = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    return [len(data), *chunks]  # the length makes ("ab", "c") differ from ("a", "bc")
