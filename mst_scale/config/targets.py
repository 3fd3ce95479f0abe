"""The block `mst.targets`: a user's choice of the parameters that may become sparse."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from mst_scale.errors import UserError


@dataclass(frozen=True)
class TargetsConfig:
    """Which parameters may become sparse: globs on their names. Norms, biases, embeddings and adapters never do."""

    include: list[str] = field(default_factory=lambda: ["*"])
    exclude: list[str] = field(default_factory=list)
    lm_head: bool = True  # the head too, even where it is tied to the embedding (the paper's 4x needs it)

    def choose(self, names: Collection[str]) -> list[str]:
        """The names of matrices that match an `include` glob and no `exclude` glob, in the given order."""
        if not names:
            raise UserError(
                "the model has no matrix that can become sparse (norms, biases and embeddings never do): use method "
                "dense, or leave the mst block out"
            )
        for glob in self.include + self.exclude:
            if not any(fnmatchcase(name, glob) for name in names):
                near = difflib.get_close_matches(glob, names, n=1, cutoff=0.0)[0]
                raise UserError(
                    f"mst.targets: {glob!r} matches no parameter that can be sparse; the nearest is {near!r}"
                )
        chosen = [
            name
            for name in names
            if any(fnmatchcase(name, glob) for glob in self.include)
            and not any(fnmatchcase(name, glob) for glob in self.exclude)
        ]
        if not chosen:
            raise UserError("mst.targets: every parameter that could be sparse is excluded; use method dense instead")
        return chosen
