"""How do masks ride in a DeepSpeed checkpoint?

    <tag>/mst/rank_00000.safetensors    this rank's shards: for every sparse parameter its packed bits (and the bits of
                                        what was ever active), with {shape, start, numel, active} and a digest beside
    client_state["mst"]                 step, seed, number of files, and the digest of every whole mask

Shards are in flattened-parameter coordinates, so another number of ranks or another ZeRO stage re-slices them by range.
Nothing is guessed: a checkpoint without masks, a file that is missing, short, altered or of another run is refused by
name. The files hold no pickles.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mst_scale.mixed_growing.exchange import Exchange
from mst_scale.mixed_growing.masks import MaskSet, Shard

FOLDER = "mst"
FORMAT = "mst_scale masks 1"


class Rider(Protocol):
    """What of a controller rides along."""

    masks: MaskSet
    exchange: Exchange
    seed: int
    settled: int
    digests: list[int]


def ride_along(engine: Any, rider: Rider) -> None:
    """From now on `engine.save_checkpoint` and `engine.load_checkpoint` carry the masks."""
    save, load = engine.save_checkpoint, engine.load_checkpoint

    def save_checkpoint(
        save_dir: str, tag: str | None = None, client_state: Mapping[str, Any] | None = None, **others: Any
    ) -> Any:
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        # before DeepSpeed's own files, so that its `latest` never names a checkpoint without masks
        write(Path(save_dir) / tag, rider, engine.global_rank)
        state = {**(client_state or {}), "mst": describe(rider)}
        return save(save_dir, tag=tag, client_state=state, **others)

    def load_checkpoint(load_dir: str, tag: str | None = None, **others: Any) -> Any:
        path, state = load(load_dir, tag=tag, **others)
        if path is not None:
            folder = Path(load_dir) / (tag if tag is not None else (Path(load_dir) / "latest").read_text().strip())
            restore(folder, rider, (state or {}).get("mst"))
        return path, state

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


def describe(rider: Rider) -> dict[str, Any]:
    """The scalars; the same on every rank."""
    files = 1 if rider.exchange.group is None else rider.exchange.ranks
    return {
        "format": FORMAT,
        "settled": rider.settled,
        "seed": rider.seed,
        "files": files,
        "names": rider.masks.names,
        "digests": list(rider.digests),
    }


def write(checkpoint: Path, rider: Rider, rank: int) -> None:
    """This rank's file. Under ZeRO-0 every rank holds the same masks and rank 0 writes them."""
    if rider.exchange.group is None and rank != 0:
        return
    tensors: dict[str, torch.Tensor] = {}
    entries: dict[str, Any] = {}
    for name, shard in rider.masks.shards().items():
        entries[name] = {
            "shape": list(shard.shape),
            "start": shard.start,
            "numel": shard.numel,
            "active": shard.active,
            "dense": shard.bits is None,
            "counted": shard.ever is not None,
        }
        for what, bits in (("bits", shard.bits), ("ever", shard.ever)):
            if bits is not None:
                tensors[f"{name}:{what}"] = bits
    path = file_of(checkpoint, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"format": FORMAT, "step": rider.settled, "layers": entries, "sha256": digest_of(entries, tensors)}
    save_file(tensors, path, metadata={"mst": json.dumps(head)})


def restore(checkpoint: Path, rider: Rider, state: Mapping[str, Any] | None) -> None:
    """Take the masks of a checkpoint, re-sliced to this rank."""
    if state is None:
        raise ValueError(
            f"{checkpoint} holds no masks: it was saved without sparse training; start anew from its weights with "
            "load_module_only, or continue it with --method dense"
        )
    if list(state["names"]) != rider.masks.names:
        raise ValueError(f"{checkpoint} holds masks of other parameters: mst.targets or the model has changed")
    rider.masks.load([read(file_of(checkpoint, rank)) for rank in range(state["files"])])
    rider.settled = int(state["settled"])
    rider.digests = rider.masks.digests(rider.exchange)
    for name, found, expected in zip(rider.masks.names, rider.digests, state["digests"], strict=True):
        if found != expected:
            raise ValueError(f"{checkpoint / FOLDER}: the mask of {name} is not the one this checkpoint was saved with")


def read(path: Path) -> dict[str, Shard]:
    """The shards in a file, checked against its own digest."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: copy the checkpoint again with its {FOLDER} folder")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
            head = json.loads((file.metadata() or {}).get("mst", "null"))
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged or cut short ({error})") from None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise ValueError(f"{path} is not a mask file of this version ({FORMAT})")
    if head["sha256"] != digest_of(head["layers"], tensors):
        raise ValueError(f"{path} is damaged: its contents do not match its digest")
    return {
        name: Shard(
            tuple(entry["shape"]),
            entry["start"],
            entry["numel"],
            entry["active"],
            None if entry["dense"] else tensors[f"{name}:bits"],
            tensors[f"{name}:ever"] if entry["counted"] else None,
        )
        for name, entry in head["layers"].items()
    }


def file_of(checkpoint: Path, rank: int) -> Path:
    return checkpoint / FOLDER / f"rank_{rank:05d}.safetensors"


def digest_of(entries: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(entries, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()
