"""Reports on the masks of a checkpoint, layer by layer.

Only the mask files are read: no model is built, and no pickle is opened. The digest of a layer is the SHA-256 of its
whole mask, one bit per weight in flattened-parameter order (`numpy.packbits`), so that it is the same for any number of
ranks and any ZeRO stage. A file that is missing, damaged or of another checkpoint is rejected by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mst_scale.checkpoints import finding, manifests, mask_files
from mst_scale.comm import Damaged
from mst_scale.errors import UserError
from mst_scale.mixed_growing.masks import StoredMask, assemble, ever_active, sha256


@dataclass(frozen=True)
class LayerReport:
    """The mask of one matrix."""

    name: str
    shape: tuple[int, ...]
    active: int
    density: float
    ever_active: float | None
    """Share of weights that were active at any time; None where it was not counted, as in a run that starts dense."""
    sha256: str


@dataclass(frozen=True)
class Report:
    """The masks of one checkpoint."""

    checkpoint: Path
    step: int
    phase: str
    """Phase of the next step, as in `metrics.jsonl`."""
    sparsity: float
    """Share of the sparse parameters' weights that are not active."""
    target_sparsity: float
    granularity: dict[str, int] | str | None
    """Which weights are masked as a whole: "element", or {"block": B, "min_blocks": m}; None if trained dense."""
    layers: list[LayerReport]
    dead_units: dict[str, list[int]] = field(default_factory=dict)
    """[dead, all] units by kind, counted when the checkpoint was saved; empty if they were not counted."""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON takes it."""
        return {**asdict(self), "checkpoint": str(self.checkpoint)}


def inspect(path: Path) -> Report:
    """Return the report on a checkpoint, or on the newest complete one of a run."""
    checkpoint = finding.locate(path)
    manifest = manifests.head(checkpoint)
    folder = f"{mask_files.FOLDER}/"
    if manifest is not None:
        faults = manifests.damage(checkpoint, within=folder)
        if faults:
            raise Damaged(f"{checkpoint}: {faults[0]}; copy it again or use another checkpoint")
        if not any(name.startswith(folder) for name in manifest["files"]):
            if (checkpoint / folder).exists():
                raise Damaged(f"{checkpoint / folder} was not saved with this checkpoint: its manifest has no masks")
            return Report(checkpoint, manifest["step"], "dense", 0.0, 0.0, None, [])
    elif not (checkpoint / folder).exists():
        raise UserError(f"{checkpoint} holds no masks: it was trained without mst_scale, or densely in your own loop")
    masks = mask_files.read_all(checkpoint)
    try:
        layers = [report(name, masks.shards(name)) for name in masks.head["names"]]
    except (UserError, Damaged) as error:
        raise Damaged(f"{checkpoint}: {error}") from None
    weights, active = sum(math.prod(layer.shape) for layer in layers), sum(layer.active for layer in layers)
    sparsity = 1 - active / weights if weights else 0.0
    head = masks.head
    granularity = head.get("granularity", "element")
    return Report(
        checkpoint,
        head["step"],
        head["phase"],
        sparsity,
        head["target_sparsity"],
        granularity,
        layers,
        head.get("units", {}),
    )


def report(name: str, shards: Sequence[StoredMask]) -> LayerReport:
    """Return the report on one matrix from all shards of its mask."""
    whole = assemble(shards, name)  # rejects gaps, and bits that do not add up to the stored count
    shape, active = shards[0].shard.shape, shards[0].active
    ever = ever_active(shards)
    share = None if ever is None else ever / math.prod(shape)
    return LayerReport(name, shape, active, active / math.prod(shape), share, sha256(whole))
