"""Writes and reads the mask files in a DeepSpeed checkpoint.

    <tag>/mst/rank_00000.safetensors    a rank's shards: for every sparse parameter its packed bits (and the bits of
                                        what was ever active), with {shape, start, numel, active}, and {rows, columns}
                                        where tensor parallelism has split it; and a head:
                                        step, phase, number of files, digests of the whole masks, dead units, own digest
    client_state["mst"]                 the same head, so that masks and weights of two checkpoints cannot be mixed

Shards record which weights of the logical parameter they hold, so they can be resliced for a different number of ranks,
ZeRO stage or split of the model. Files are numbered by the ranks that write one: at stage 0, those of the first
replica. Nothing is guessed: a checkpoint without masks, and a file that is missing, truncated, altered or of another
run, is rejected by name. The files hold no pickles, so that `mst inspect` runs nothing that a checkpoint may carry.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from mst_scale import snapshot, tensor_files
from mst_scale.checkpoint_folders import is_universal
from mst_scale.checkpoints import manifests
from mst_scale.checkpoints.mask_state import MaskState
from mst_scale.comm import Damaged
from mst_scale.errors import UserError
from mst_scale.mixed_growing import packed_bits
from mst_scale.mixed_growing.masks import StoredMask, assemble
from mst_scale.shard import Cut, Shard
from mst_scale.sparsity_variation import PHASES, Schedule

FOLDER = "mst"
FORMAT = "mst_scale masks 1"
Wanted = Mapping[str, Shard]
"""Shards of parameters, by name."""


# --- writing ---


def save(checkpoint: Path, state: MaskState, step: int, units: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Write the masks into a checkpoint's folder, on all ranks together.

    Args:
        checkpoint: the folder of the checkpoint.
        state: the masks of this rank.
        step: finished optimizer steps.
        units: (dead, all) units by kind, for `mst inspect`.

    Returns:
        The head of the files, which belongs into the checkpoint's client_state.
    """
    files, number = state.number_files()
    head = describe(state, step, state.gather_digests(), files, units)

    def write_mine() -> None:
        if number is not None:
            write(checkpoint, state, number, head)

    state.everyone.agree(write_mine)
    return head


def describe(
    state: MaskState, step: int, digests: Mapping[str, int], files: int, units: Mapping[str, tuple[int, int]]
) -> dict[str, Any]:
    """Return the head of the mask files, which is the same on all ranks."""
    point = state.schedule.at(step)
    return {
        "format": FORMAT,
        "step": step,
        "settled": state.settled,
        "phase": str(point.phase),
        "target_sparsity": state.sparsity if state.given else point.sparsity,
        "seed": state.seed,
        "schedule": schedule_to_json(state.schedule),
        "granularity": state.granularity,
        "files": files,
        "names": list(digests),
        "digests": list(digests.values()),
        "units": {kind: list(counts) for kind, counts in units.items()},
    }


def write(checkpoint: Path, state: MaskState, rank: int, head: Mapping[str, Any]) -> None:
    """Write this rank's file; its head is the same on all ranks."""
    tensors: dict[str, torch.Tensor] = {}
    entries: dict[str, Any] = {}
    for name, mask in state.masks.stored().items():
        entries[name] = {
            "shape": list(mask.shard.shape),
            "start": mask.shard.start,
            "numel": mask.shard.length,
            "active": mask.active,
            "dense": mask.bits is None,
            "counted": mask.ever is not None,
        }
        if not mask.shard.cut.is_whole:
            entries[name] |= {"rows": mask.shard.cut.rows, "columns": mask.shard.cut.columns}
        for what, bits in (("bits", mask.bits), ("ever", mask.ever)):
            if bits is not None:
                tensors[f"{name}:{what}"] = bits
    path = file_of(checkpoint, rank)
    mine = {**head, "rank": rank, "layers": entries}
    snapshot.save_tensors(tensors, path, {"mst": json.dumps({**mine, "sha256": digest_of(mine, tensors)})})


def file_of(checkpoint: Path, rank: int) -> Path:
    """Return the path of the mask file of one rank."""
    return checkpoint / FOLDER / f"rank_{rank:05d}.safetensors"


def digest_of(head: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of a file's head and tensors, independent of the order of the tensors."""
    digest = hashlib.sha256(json.dumps(head).encode())  # a JSON round trip keeps the order of keys
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()


# --- reading ---


@dataclass(frozen=True)
class Masks:
    """All masks of a checkpoint, as its ranks wrote them."""

    head: dict[str, Any]
    ranks: list[dict[str, StoredMask]]

    def shards(self, name: str) -> list[StoredMask]:
        """Return the shards of a parameter, in rank order."""
        return [shards[name] for shards in self.ranks if name in shards]  # a stage of a pipeline has its layers only

    def whole(self, name: str) -> torch.Tensor:
        """Return the mask of a parameter, as bool in its shape."""
        shards = self.shards(name)
        shape = shards[0].shard.shape
        return packed_bits.unpack(assemble(shards, name), math.prod(shape)).view(shape)


def are_expected(checkpoint: Path) -> bool:
    """Return whether a checkpoint was saved with masks, as its manifest says; True if it has none."""
    manifest = manifests.head(checkpoint)
    return manifest is None or any(name.startswith(f"{FOLDER}/") for name in manifest["files"])


def restore(checkpoint: Path, state: MaskState, saved: Mapping[str, Any] | None) -> None:
    """Take the masks of a checkpoint, re-sliced to this rank, on all ranks together.

    Args:
        checkpoint: the folder of the checkpoint.
        state: the masks of this rank, which are replaced.
        saved: what the checkpoint's client_state says of its masks; None if it has none.

    Raises:
        UserError: if the checkpoint has no masks, or masks of another run.
        Damaged: if a mask file is missing or altered.
    """
    names = state.gather_digests()

    def load() -> None:
        found = _fitting(checkpoint, state, saved, names)
        mine = set(state.masks.names)  # of a pipeline's masks those of this stage
        state.masks.load([{name: mask for name, mask in shards.items() if name in mine} for shards in found.ranks])

    state.everyone.agree(load)
    assert saved is not None
    state.settled = int(saved["settled"])
    state.refresh()
    digests = dict(zip(saved["names"], saved["digests"], strict=True))

    def check_digests() -> None:
        for name, now in zip(state.masks.names, state.digests, strict=True):
            if now != digests[name]:
                raise UserError(
                    f"{checkpoint / FOLDER}: the mask of {name} is not the one this checkpoint was saved with"
                )

    state.everyone.agree(check_digests)


def _fitting(checkpoint: Path, state: MaskState, saved: Mapping[str, Any] | None, names: Collection[str]) -> Masks:
    """Return the masks of a checkpoint if they belong to this run."""
    if saved is None:
        raise UserError(
            f"{checkpoint} has no masks: it was saved without sparse training. Start a new run from its weights "
            "(--init RUN with another --out; in your own loop mst_scale.warm_start(engine, CHECKPOINT, "
            "weights_only=True)), or continue it with method dense"
        )
    source = _with_masks(checkpoint, saved)
    found = read_all(source, {mask.name: mask.shard for mask in state.masks})
    if found.head != dict(saved):
        raise UserError(f"{checkpoint / FOLDER} belongs to another checkpoint: copy the checkpoint again as a whole")
    if sorted(found.head["names"]) != sorted(names):
        raise UserError(f"{checkpoint} has masks for other parameters: restore mst.targets and the model")
    before = {"granularity": "element", **found.head}  # files from before there were blocks do not say
    same = {
        "schedule": is_same_until(before["schedule"], state.schedule, int(found.head["step"])),
        "seed": before["seed"] == state.seed,
        "granularity": before["granularity"] == state.granularity,
    }
    course, step = schedule_from_json(before["schedule"]), int(found.head["step"])
    if not same["schedule"] and course is not None:
        with_its_interval = replace(state.schedule, interval=course.interval)
        if is_same_until(before["schedule"], with_its_interval, step):
            raise UserError(
                f"{checkpoint} was trained with a topology step every {course.interval} steps, and this run would have "
                f"one every {state.schedule.interval}: set mst.topology.interval to {course.interval}"
            )
    for what, fits in same.items():
        if not fits:
            old = ", with mst.sparsity.sparse_tokens=null for a run of mst-best from before 0.2"
            limit = old if what == "schedule" else ""
            raise UserError(
                f"{checkpoint} was trained with another {what} of the masks: restore training.steps, the seed and the "
                f"mst block{limit}, or start a new run from its weights (--init RUN with another --out; in your own "
                "loop mst_scale.warm_start(engine, CHECKPOINT))"
            )
    return found


def _with_masks(checkpoint: Path, state: Mapping[str, Any]) -> Path:
    """Return the folder that holds a checkpoint's masks: its own, or that of the checkpoint it was made from.

    DeepSpeed's ds_to_universal does not copy masks. Masks next to its copy, or in a folder above it, are recognized by
    their head.
    """
    if (checkpoint / FOLDER).is_dir() or not is_universal(checkpoint):
        return checkpoint
    for folder in (checkpoint.parent, *sorted(checkpoint.parent.iterdir())):
        if not file_of(folder, 0).is_file():
            continue
        # a damaged file is another checkpoint's
        with contextlib.suppress(Damaged), tensor_files.opened(file_of(folder, 0)) as file:
            head = tensor_files.head_of(file)
            if isinstance(head, dict) and all(head.get(key) == value for key, value in state.items()):
                return folder
    raise UserError(
        f"{checkpoint} has no masks, because DeepSpeed's ds_to_universal does not copy them: convert the original "
        "checkpoint with mst reshape CHECKPOINT OUT instead"
    )


def read_all(checkpoint: Path, wanted: Wanted | None = None) -> Masks:
    """Return the contents of all ranks' files, after checking that each is complete and all are of the same save.

    With `wanted`, only rank 0's file and the files that hold some of these shards are read, and one file with each of
    these parameters, even if this rank holds no part of it; otherwise each of a thousand ranks would read a thousand
    files. Together the ranks read every file, and the digests of whole masks cover them all.
    """
    head, shards = read(file_of(checkpoint, 0))
    ranks, named = [shards], set(shards)
    for rank in range(1, head["files"]):
        path = file_of(checkpoint, rank)
        if wanted is not None and not _holds(path, wanted, named):
            continue
        other, shards = read(path)
        if other != head:
            raise Damaged(f"{path} belongs to another run or step than {file_of(checkpoint, 0).name}")
        ranks.append(shards)
        named |= shards.keys()
    return Masks(head, ranks)


def _holds(path: Path, wanted: Wanted, named: Collection[str]) -> bool:
    """Return whether a file may hold some of these shards, or the first part of a parameter that is not in `named`.

    A file with an unclear head is read, and then rejected.
    """
    with tensor_files.opened(path) as file:
        head = tensor_files.head_of(file)
    try:
        entries = {name: head["layers"][name] for name in wanted if name in head["layers"]}
        return any(name not in named or wanted[name].overlaps(_shard(name, entry)) for name, entry in entries.items())
    except (KeyError, TypeError, ValueError):
        return True


def read(path: Path) -> tuple[dict[str, Any], dict[str, StoredMask]]:
    """Return the head and the shards of a file, after checking its digest and its name."""
    with tensor_files.opened(path) as file:
        head, tensors = tensor_files.head_of(file), tensor_files.tensors_of(file)
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise Damaged(f"{path} is not a mask file of this version ({FORMAT})")
    if head.pop("sha256", None) != digest_of(head, tensors):
        raise Damaged(f"{path} is damaged: its contents do not match its checksum")
    rank, layers = head.pop("rank"), head.pop("layers")
    if path.name != file_of(path, rank).name:
        raise Damaged(f"{path} contains the masks of rank {rank}: it was renamed or copied from elsewhere")
    return head, {
        name: StoredMask(
            _shard(name, entry),
            entry["active"],
            None if entry["dense"] else tensors[f"{name}:bits"],
            tensors[f"{name}:ever"] if entry["counted"] else None,
        )
        for name, entry in layers.items()
    }


def _shard(name: str, entry: Mapping[str, Any]) -> Shard:
    cut = Cut.whole(entry["shape"])
    if "rows" in entry:
        rows, columns = (tuple((int(a), int(b)) for a, b in entry[axis]) for axis in ("rows", "columns"))
        cut = Cut(cut.shape, rows, columns)
    return Shard(name, cut, entry["start"], entry["numel"])


# --- the schedule in a file ---


def schedule_to_json(schedule: Schedule) -> dict[str, Any]:
    """Return a schedule in the form in which JSON returns it: with lists instead of tuples."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(schedule)))
    return found


def schedule_from_json(value: Any) -> Schedule | None:
    """Return the schedule in a file, also of version 0.1; None if there is none, or one that cannot be right."""
    if isinstance(value, str):
        value = _from_text(value)
    try:
        schedule = TypeAdapter(Schedule).validate_json(json.dumps(value), strict=True)
    except (ValidationError, ValueError, TypeError, RecursionError):
        return None
    return schedule if _is_sound(schedule) else None


def is_same_until(value: Any, schedule: Schedule, step: int) -> bool:
    """Return whether the schedule in a file makes the same masks as ours until `step`, as a longer run's may.

    The step after `step` is compared too, because its work is prepared in advance. Before version 0.2, the schedule of
    a policy without swaps had an update fraction, which moved nothing.
    """
    before = schedule_from_json(value)
    if before is not None and not schedule.update_fraction:
        before = replace(before, update_fraction=0.0)
    return before is not None and (before == schedule or before.parts_from(schedule, step + 1) is None)


def _from_text(text: str) -> dict[str, Any] | None:
    """Read the repr of 0.1's dataclass, in which phases were pieces and the end of the run was stated twice."""
    try:
        values: dict[str, Any] = {k.arg: k.value for k in ast.parse(text, mode="eval").body.keywords}  # type: ignore[attr-defined]
        pieces = [{k.arg: ast.literal_eval(k.value) for k in piece.keywords} for piece in values.pop("pieces").elts]
        del values["update_until"]
        return {
            **{key: ast.literal_eval(value) for key, value in values.items()},
            "phases": [{"name": piece.pop("phase"), **piece} for piece in pieces],
        }
    except (SyntaxError, ValueError, TypeError, AttributeError, KeyError, RecursionError, MemoryError):
        return None  # ast reports what is nested too deep as MemoryError


def _is_sound(schedule: Schedule) -> bool:
    """Return whether the numbers can form a schedule, and the phases cover the run without gaps."""
    whole = [*schedule.cosine_bounds, *(n for phase in schedule.phases for n in (phase.start, phase.stages))]
    shares = (schedule.max_sparsity, schedule.update_fraction, schedule.update_decay)
    if schedule.interval < 1 or min(whole, default=0) < 0 or not all(0 <= share <= 1 for share in shares):
        return False
    ends = [0, *(phase.stop for phase in schedule.phases)]
    starts = [*(phase.start for phase in schedule.phases), schedule.total_steps]
    named = all(phase.name in PHASES for phase in schedule.phases)
    return named and ends == starts and all(before < after for before, after in pairwise(ends)) and len(ends) > 1
