"""Masks that a run is given and keeps (method "fixed"): the zeros of its weights, or those of a file."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from mst_scale import zero_shards
from mst_scale.checkpoints.open_masks import OpenMasks
from mst_scale.distributed import logger
from mst_scale.engine.adapters import base_name
from mst_scale.errors import UserError

ZEROS = "zeros"


class GivenMasks:
    """What `mst.masks` names, for the sparse parameters of this rank."""

    def __init__(self, stated: str, parameters: Collection[str], targets: Collection[str]):
        self.stated = stated
        self.file = None if stated == ZEROS else OpenMasks(Path(stated))
        if self.file is None:
            return
        bases = {base_name(name) for name in parameters}
        for name in self.file.names:
            if name not in parameters and name not in bases:
                near = difflib.get_close_matches(name, parameters, n=1, cutoff=0.0)
                raise UserError(
                    f"{self.file.path} has a mask for {name!r}, which is no parameter of this model: the nearest is "
                    f"{near[0] if near else 'none'!r}"
                )
        followed = {self._in_the_file(name) for name in targets}
        ignored = [name for name in self.file.names if name not in followed]
        if ignored:
            logger.warning(
                "%s: %d masks are of parameters that mst.targets leaves out (%s) and are not applied",
                self.file.path, len(ignored), ignored[0],
            )  # fmt: skip
        missing = [name for name in targets if self._in_the_file(name) is None]
        if missing:
            logger.warning(
                "%s: it has no mask for %d matrices (%s), which stay dense", self.file.path, len(missing), missing[0]
            )

    def of(self, shards: zero_shards.Shards, i: int) -> Tensor:
        """True where a weight of this rank's slice is kept."""
        part, weight = shards.slices[i], shards.weight(i)
        if self.file is None:
            return weight != 0
        if (name := self._in_the_file(part.name)) is None:
            return (weight == weight).fill_(True)  # noqa: PLR0124  (true, in its shape and on its device)
        whole = self.file.mask(name, part.shape).view(-1)
        return whole[part.logical(torch.arange(part.length))].to(weight.device)

    def _in_the_file(self, parameter: str) -> str | None:
        """The name under which the file has the mask of a parameter: its own, or that before peft has wrapped it."""
        assert self.file is not None
        return next((name for name in (parameter, base_name(parameter)) if name in self.file.names), None)

    def in_words(self) -> str:
        return "the zeros of its weights" if self.file is None else f"the masks of {self.file.path}"
