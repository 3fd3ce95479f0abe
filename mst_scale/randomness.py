"""Makes every random decision a hash of what is being decided, never a step of a generator.

`counter_hash(seed, step, name, …)` is a 64-bit number that is the same in any process, on any device, in any order of
evaluation. So the sample order and the random part of Mixed-Growing do not depend on the number of ranks and are exact
after a resume.
"""

from __future__ import annotations

MASK64 = (1 << 64) - 1
GOLDEN64 = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: Weyl increment that keeps successive counters far apart


def mix64(x: int) -> int:
    """A bijection on 64-bit integers in which every input bit changes every output bit half of the time."""
    x &= MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def counter_hash(*words: int | str) -> int:
    """One 64-bit number from integers and names; the order of the words matters."""
    state = len(words)
    for word in words:
        for value in _as_integers(word):
            state = mix64((state ^ value) + GOLDEN64)
    return state


def _as_integers(word: int | str) -> list[int]:
    if isinstance(word, int):
        return [word & MASK64]
    data = word.encode()
    chunks = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    return [len(data), *chunks]  # the length in front keeps ("ab", "c") and ("a", "bc") apart
