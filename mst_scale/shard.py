"""A shard: the part of a logical matrix that a rank, or a file, holds.

Whatever cuts a matrix up, a shard says three things of its part: whose it is, which shape the whole has, and which of
its weights are here. The last as pieces, in the order in which they lie in memory; each is a range of the flattened
matrix. ZeRO and checkpoints give every part in one piece, maybe an empty one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Piece(NamedTuple):
    """Weights [start, start + numel) of a flattened matrix."""

    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Shard:
    """Part of one logical matrix."""

    name: str
    shape: tuple[int, ...]
    """Of the whole matrix."""
    pieces: tuple[Piece, ...]

    @classmethod
    def of_range(cls, name: str, shape: Sequence[int], start: int, length: int) -> Shard:
        return cls(name, tuple(shape), (Piece(start, length),))

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> Shard:
        return cls.of_range(name, shape, 0, math.prod(shape))

    @property
    def numel(self) -> int:
        """Weights of the whole matrix."""
        return math.prod(self.shape)

    @property
    def length(self) -> int:
        """Weights that are here."""
        return sum(piece.numel for piece in self.pieces)

    @property
    def start(self) -> int:
        """Where the only piece begins."""
        (piece,) = self.pieces
        return piece.start

    @property
    def stop(self) -> int:
        """Where the only piece ends."""
        (piece,) = self.pieces
        return piece.stop

    def __post_init__(self) -> None:
        for piece in self.pieces:
            if piece.numel and not 0 <= piece.start < piece.stop <= self.numel:
                raise ValueError(
                    f"{self.name}: slice [{piece.start}, {piece.stop}) lies outside its {self.numel} weights"
                )
