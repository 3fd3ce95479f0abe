"""Holds the masks of this rank's slices of the sparse parameters, packed into bits.

A `LayerMask` is this rank's shard of the mask of one parameter, with one bit per weight (parameters/8/ranks bytes). A
layer whose weights are all active has no bits. A `MaskSet` contains all of them, in parameter order, and implements the
operations that checkpoints and the drift check need.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mst_scale.comm.exchange import Exchange, Exchanges
from mst_scale.errors import Damaged, UserError
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.random_k import mix64
from mst_scale.randomness import counter_hash
from mst_scale.shard import Shard


@dataclass
class LayerMask:
    """The mask of this rank's slice of one parameter. A new mask is dense."""

    shard: Shard
    device: torch.device
    bits: Tensor | None = None
    """uint8, ⌈length/8⌉ bytes; None if all weights of the parameter, on all ranks, are active."""
    ever: Tensor | None = None
    """ITOP: weights that were active at any time since counting began; None if they are not counted."""
    active: int = field(init=False)
    """Number of active weights on all ranks together."""
    length: int = field(init=False)
    """Number of weights in the slice."""

    def __post_init__(self) -> None:
        self.length = self.shard.length  # cached, as every step reads it
        self.active = self.numel

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.shard.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return self.shard.shape

    @property
    def numel(self) -> int:
        """The number of weights in the whole parameter."""
        return self.shard.numel

    @property
    def dense(self) -> bool:
        """Whether all weights of the parameter are active."""
        return self.bits is None

    def packed(self) -> Tensor:
        """Return the slice's bits; all ones for a dense layer."""
        return packed_bits.ones(self.length, self.device) if self.bits is None else self.bits

    def flags(self) -> Tensor:
        """Return the slice as a temporary bool tensor."""
        return packed_bits.unpack(self.packed(), self.length)

    def set_flags(self, flags: Tensor, active: int) -> None:
        """Set the slice from a bool tensor; `active` counts over all ranks."""
        assert flags.numel() == self.length
        self.set_bits(packed_bits.pack(flags.view(-1)), active)

    def set_bits(self, packed: Tensor, active: int) -> None:
        """Set the slice's bits (they are dropped if the layer is dense); `active` counts over all ranks."""
        assert packed.numel() == packed_bits.byte_count(self.length) and 0 <= active <= self.numel
        if self.ever is not None:
            self.ever |= packed
        self.bits = None if active == self.numel else packed
        self.active = active

    def track_ever(self) -> None:
        """Start to record which weights are ever active."""
        self.ever = self.packed().clone()

    def forget(self) -> None:
        """Make the mask dense, as a new one is."""
        self.bits, self.active = None, self.numel
        if self.ever is not None:
            self.track_ever()

    def count(self) -> int:
        """Return the number of active weights in the slice."""
        return self.length if self.bits is None else packed_bits.count(self.bits)

    def retain_(self, *values: Tensor) -> None:
        """Write exact zeros at the inactive weights (over NaN too) of flat views of this slice."""
        if self.bits is not None:
            for flat in values:
                packed_bits.retain_(flat, self.bits)

    def count_inactive(self, values: Tensor) -> int:
        """Count the values of this slice that are not 0 at inactive weights."""
        return 0 if self.bits is None else packed_bits.count_outside(values, self.bits)

    def whole(self, exchange: Exchange) -> Tensor:
        """Return the mask of the matrix that this rank multiplies by, from the slices of all ranks of ZeRO.

        The result is a temporary bool tensor. Each rank contributes its bits at their positions. No two ranks set the
        same bit, so sums of bytes never carry.
        """
        start, numel = self.shard.start, self.shard.local_numel
        joined = packed_bits.zeros(numel + 8, self.device)
        if self.length:
            placed = packed_bits.moved(self.packed(), start % 8)
            joined[start // 8 : start // 8 + placed.numel()] = placed
        joined = exchange.sum_here(joined[: packed_bits.byte_count(numel)]).to(self.device)
        return packed_bits.unpack(joined, numel).view(self.shard.cut.local_shape)

    def digest(self) -> int:
        """Return Σ v_j · h(name, j) mod 2^64 over the parameter's 32-bit words v_j; 0 for a dense layer.

        It is linear in the bits, so the digests of slices add up to the same number for any split, even inside a word.
        """
        if self.bits is None:
            return 0
        key = counter_hash("mask", self.name) >> 2  # leaves room for word numbers below 2^63
        start, total = self.shard.in_a_row, 0
        if start is None:
            return self._digest_of_scattered(key)
        first = start // 32
        before = self.bits.new_zeros(start % 32 // 8)
        aligned = torch.cat([before, packed_bits.moved(self.bits, start % 8)])
        words = torch.cat([aligned, aligned.new_zeros(-aligned.numel() % 4)]).view(torch.int32)
        for a, b in packed_bits.spans(words.numel(), self.device):
            weights = mix64(torch.arange(first + a + key, first + b + key, device=self.device))
            total += int(((words[a:b].to(torch.int64) & 0xFFFF_FFFF) * weights).sum())  # wraps mod 2^64
        return total % 2**64

    def _digest_of_scattered(self, key: int) -> int:
        """Compute the digest bit by bit, for a slice that is not contiguous in the parameter."""
        assert self.bits is not None
        total = 0
        for a, b in packed_bits.spans(self.length, self.device):
            index = self.shard.logical(packed_bits.positions(packed_bits.unpack_span(self.bits, a, b)) + a)
            value = 1 << ((index % 32 // 8) * 8 + 7 - index % 8)
            total += int((value * mix64(index // 32 + key)).sum())
        return total % 2**64


@dataclass(frozen=True)
class StoredMask:
    """The mask of a shard as checkpoints store it; `bits` is None for a dense layer."""

    shard: Shard
    active: int
    bits: Tensor | None
    ever: Tensor | None = None


class MaskSet:
    """The masks of all sparse parameters on this rank, in parameter order."""

    def __init__(self, layers: Iterable[LayerMask]):
        given = list(layers)
        self._layers = {layer.name: layer for layer in given}
        if len(self._layers) != len(given):
            raise UserError("two sparse parameters share a name: list a tied tensor only once")

    def __iter__(self) -> Iterator[LayerMask]:
        return iter(self._layers.values())

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, name: str) -> LayerMask:
        return self._layers[name]

    @property
    def names(self) -> list[str]:
        """The names of the sparse parameters."""
        return list(self._layers)

    @property
    def dense(self) -> bool:
        """Whether all layers are dense."""
        return all(layer.dense for layer in self)

    def stored(self) -> dict[str, StoredMask]:
        """Return this rank's masks on the CPU, for a checkpoint."""

        def at_rest(packed: Tensor | None) -> Tensor | None:
            return None if packed is None else packed.detach().cpu().clone()

        return {m.name: StoredMask(m.shard, m.active, at_rest(m.bits), at_rest(m.ever)) for m in self}

    def load(self, ranks: Sequence[Mapping[str, StoredMask]]) -> None:
        """Load masks written by any number of ranks, resliced to the shards of this rank.

        Raises:
            UserError: if the masks belong to another model.
            Damaged: if the masks are incomplete or inconsistent.
        """
        foreign = sorted({name for shards in ranks for name in shards} - set(self.names))
        if foreign:
            raise UserError(f"the masks contain {foreign[0]}, which is not a sparse parameter of this model")
        fresh = {}
        for layer in self:
            pieces = [shards[layer.name] for shards in ranks if layer.name in shards]
            fresh[layer.name] = _reslice(layer, pieces)
        for layer in self:
            counting = layer.ever is not None
            layer.active, layer.bits, layer.ever = fresh[layer.name]
            if counting and layer.ever is None:  # the run that wrote the mask did not count them
                layer.track_ever()

    def digests(self, exchange: Exchange | Exchanges) -> list[int]:
        """Return the digest of each whole mask, equal for any number of ranks; sends 16 bytes per layer."""
        local = [layer.digest() for layer in self]
        halves = torch.tensor([[d & 0xFFFF_FFFF, d >> 32] for d in local], dtype=torch.int64).view(-1, 2)
        return [(low + (high << 32)) % 2**64 for low, high in exchange.sum(halves).tolist()]

    def check_drift(
        self, expected: Sequence[int], exchange: Exchange | Exchanges, replicas: Exchange | None = None
    ) -> None:
        """Check that no mask has changed since `digests` returned `expected`.

        Args:
            expected: the digests after the last topology step.
            exchange: the ranks that hold each mask together.
            replicas: ranks whose masks must be equal, if they are to be compared too.

        Raises:
            RuntimeError: on all ranks, if a mask has changed.
        """
        found = self.digests(exchange)
        wrong = torch.tensor([int(a != b) for a, b in zip(found, expected, strict=True)], dtype=torch.int64)
        if replicas is not None:
            now = torch.tensor([d >> 1 for d in found], dtype=torch.int64)  # 63 bits fit
            differ = (replicas.max(now) != -replicas.max(-now)).to(torch.int64)
            wrong = replicas.max(torch.maximum(wrong, differ))
        drifted = [name for name, bad in zip(self.names, wrong.tolist(), strict=True) if bad]
        if drifted:
            raise RuntimeError(
                f"the mask of {drifted[0]} drifted: {len(drifted)} of {len(self)} layers differ from the last topology "
                "step or between ranks. Resume from the last checkpoint"
            )


def assemble(shards: Sequence[StoredMask], name: str = "mask") -> Tensor:
    """Return the packed bits of a whole parameter, from the shards of all ranks.

    Raises:
        Damaged: if shards are missing, or their bits do not have the stored count.
    """
    whole = _whole(shards, name)
    if whole.count() != whole.active:
        raise Damaged(f"the mask of {name} is damaged: it has {whole.count()} active weights instead of {whole.active}")
    return whole.packed()


def ever_active(shards: Sequence[StoredMask]) -> int | None:
    """Count the weights of a parameter that were ever active, from the shards of all ranks; None if not counted."""
    ever = _whole(shards, "mask").ever
    return None if ever is None else packed_bits.count(ever)


def _whole(shards: Sequence[StoredMask], name: str) -> LayerMask:
    shape = shards[0].shard.shape if shards else (0, 0)
    whole = LayerMask(Shard.whole(name, shape), torch.device("cpu"))
    whole.active, whole.bits, whole.ever = _reslice(whole, shards)
    return whole


def sha256(packed: Tensor) -> str:
    """Return the SHA-256 of a whole mask's bits, in `numpy.packbits` order."""
    return hashlib.sha256(packed.cpu().numpy().tobytes()).hexdigest()


def _reslice(layer: LayerMask, pieces: Sequence[StoredMask]) -> tuple[int, Tensor | None, Tensor | None]:
    """Return (active, bits, ever) of the layer's slice, from pieces that cover it and may overlap."""
    if not pieces:
        raise UserError(f"the checkpoint has no mask of {layer.name}: it is of another model, or a file is missing")
    for piece in pieces:
        if piece.shard.shape != layer.shape:
            raise UserError(f"the mask of {layer.name} has shape {piece.shard.shape}, but the model has {layer.shape}")
        if (piece.active, piece.bits is None) != (pieces[0].active, pieces[0].bits is None):
            raise Damaged(f"the masks of {layer.name} are from different steps: their active counts differ")
    bits = None if pieces[0].bits is None else _gather(layer, [(p.shard, p.bits) for p in pieces])
    counted = all(p.ever is not None for p in pieces)
    ever = _gather(layer, [(p.shard, p.ever) for p in pieces]) if counted else None
    return pieces[0].active, bits, ever


def _gather(layer: LayerMask, pieces: Sequence[tuple[Shard, Tensor | None]]) -> Tensor:
    """Return the bits of the layer's slice, from pieces that cover it."""
    given = []
    for shard, packed in pieces:
        if packed is None or packed.numel() != packed_bits.byte_count(shard.length):
            raise Damaged(f"the mask of {layer.name} at weight {shard.start} is truncated")
        given.append((shard, packed))
    scattered = any(shard.in_a_row is None for shard in (layer.shard, *(shard for shard, _ in given)))
    return _gather_scattered(layer, given) if scattered else _gather_ranges(layer, given)


def _gather_ranges(layer: LayerMask, pieces: Sequence[tuple[Shard, Tensor]]) -> Tensor:
    """Gather from ranges of the flattened parameter; at each position, use the piece that reaches furthest."""
    position = layer.shard.in_a_row or 0
    end = position + layer.length
    taken: list[tuple[Tensor, int]] = []
    while position < end:
        reach = [
            (start + shard.length, start, packed)
            for shard, packed in pieces
            if (start := shard.in_a_row or 0) <= position < start + shard.length
        ]
        if not reach:
            raise Damaged(f"the mask of {layer.name} lacks weight {position}: a rank's file is missing")
        until, start, packed = max(reach, key=lambda piece: piece[0])
        until = min(until, end)
        taken.append((packed_bits.cut(packed, position - start, until - start), until - position))
        position = until
    return packed_bits.join(taken, layer.device)


def _gather_scattered(layer: LayerMask, pieces: Sequence[tuple[Shard, Tensor]]) -> Tensor:
    """Gather from any pieces through the whole parameter, with one byte per weight; 2 marks a weight of no piece."""
    whole = torch.full((layer.numel,), 2, dtype=torch.uint8)
    for shard, packed in pieces:
        for a, b in packed_bits.spans(shard.length, whole.device):
            whole[shard.logical(torch.arange(a, b))] = packed_bits.unpack_span(packed.cpu(), a, b).to(torch.uint8)
    bits = []
    for a, b in packed_bits.spans(layer.length, whole.device):
        index = layer.shard.logical(torch.arange(a, b))
        found = whole[index]
        if (found == 2).any():
            first = int(index[found == 2][0])
            raise Damaged(f"the mask of {layer.name} lacks weight {first}: a rank's file is missing")
        bits.append(packed_bits.pack(found.bool()))
    return (torch.cat(bits) if bits else packed_bits.zeros(0, whole.device)).to(layer.device)
