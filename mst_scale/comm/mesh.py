"""Arranges the ranks of a run as a mesh of pipeline, data, sequence and tensor parallelism.

A rank's number is ((stage · data + replica) · sequence + part) · tensor + slice. Ranks that share a layer have
consecutive numbers, so a launcher that fills one node after the other keeps them within a node. A mesh implements
DeepSpeed's mpu interface.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mst_scale.comm.groups import new_group
from mst_scale.comm.ranks import select_device
from mst_scale.errors import UserError


@dataclass(frozen=True)
class ParallelDims:
    """The size of each kind of model parallelism; 1 means that it is not used."""

    tensor: int = 1
    """Ranks that share the matrices of a layer."""
    sequence: int = 1
    """Ranks that share a sequence."""
    pipeline: int = 1
    """Pipeline stages, each with some of the layers."""

    @property
    def model(self) -> int:
        """The number of ranks that share one replica of the model."""
        return self.tensor * self.sequence * self.pipeline

    def data(self, world: int) -> int:
        """Return the number of data-parallel replicas among `world` ranks.

        Args:
            world: number of all ranks.

        Raises:
            UserError: if `world` is not a multiple of `model`.
        """
        if world % self.model:
            raise UserError(
                f"{world} ranks cannot be divided into groups of {self.describe()}: "
                f"start a multiple of {self.model} ranks"
            )
        return world // self.model

    def describe(self) -> str:
        """Describe the sizes above 1, for messages."""
        cuts = {"tensor": self.tensor, "sequence": self.sequence, "pipeline": self.pipeline}
        return " × ".join(f"{what} {size}" for what, size in cuts.items() if size > 1) or "one rank"


class Mesh:
    """This rank's position among the ranks of a run, and its process groups. Create it on all ranks.

    It makes the rank's accelerator the current one, as DeepSpeed's engine does later: a model that is split needs it
    before.

    It can be passed as the `mpu` of `initialize`. `replica` (of `data`) is the data-parallel position, `part` the part
    of each sequence, `stage` the pipeline stage and `slice` the tensor-parallel position of this rank.
    """

    def __init__(self, sizes: ParallelDims):
        import torch.distributed as dist

        if not dist.is_initialized():
            raise UserError("Mesh() requires a process group: call deepspeed.init_distributed() first")
        select_device()
        self.sizes = sizes
        rank, world = dist.get_rank(), dist.get_world_size()
        self.data = sizes.data(world)
        axes = (sizes.pipeline, self.data, sizes.sequence, sizes.tensor)
        self.stage, self.replica, self.part, self.slice = _place(rank, axes)
        self.tensor_group = _group("tensor", axes, (3,))
        self.sequence_group = _group("sequence", axes, (2,))
        self.same_weights_group = _group("same weights", axes, (1, 2))
        """Ranks that hold the same weights: ZeRO partitions them over these."""

    # --- DeepSpeed's mpu interface ---

    def get_model_parallel_group(self) -> Any:
        """Return the tensor-parallel group."""
        return self.tensor_group

    def get_model_parallel_world_size(self) -> int:
        """Return the tensor-parallel size."""
        return self.sizes.tensor

    def get_model_parallel_rank(self) -> int:
        """Return this rank's tensor-parallel position."""
        return self.slice

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank

    def get_data_parallel_world_size(self) -> int:
        """Return the number of replicas."""
        return self.data

    def get_data_parallel_rank(self) -> int:
        """Return the number of this rank's replica."""
        return self.replica

    def get_sequence_parallel_group(self) -> Any:
        """Return the sequence-parallel group."""
        return self.sequence_group

    def get_sequence_parallel_world_size(self) -> int:
        """Return the sequence-parallel size."""
        return self.sizes.sequence

    def get_sequence_parallel_rank(self) -> int:
        """Return this rank's sequence-parallel position."""
        return self.part

    def get_sequence_data_parallel_group(self) -> Any:
        """Return the group of ranks that hold the same weights, over which DeepSpeed partitions and numbers files."""
        return self.same_weights_group

    get_data_parallel_group = get_sequence_data_parallel_group

    def get_sequence_data_parallel_world_size(self) -> int:
        """Return the number of ranks that hold the same weights."""
        return self.data * self.sizes.sequence

    def get_sequence_data_parallel_rank(self) -> int:
        """Return this rank's position among the ranks that hold the same weights."""
        return self.replica * self.sizes.sequence + self.part


def _place(rank: int, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the coordinates of a rank in a mesh of these sizes."""
    place = []
    for size in reversed(axes):
        rank, at = divmod(rank, size)
        place.append(at)
    return tuple(reversed(place))


def _group(name: str, axes: tuple[int, ...], along: tuple[int, ...]) -> Any:
    """Return this rank's group of ranks that differ in the axes `along` only; all ranks create all groups in order."""
    import torch.distributed as dist

    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(axes)):
        fixed = tuple(at for axis, at in enumerate(_place(rank, axes)) if axis not in along)
        groups.setdefault(fixed, []).append(rank)
    mine = None
    for ranks in groups.values():
        made = new_group(name, ranks)
        if dist.get_rank() in ranks:
            mine = made
    return mine
