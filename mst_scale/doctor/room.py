"""Looks for what a run would run out of: memory, disk, and locks that would be waited for without end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from mst_scale.compiled import build_locks, cache_folder
from mst_scale.doctor.finding import Finding, each, look, ok, wrong
from mst_scale.doctor.versions import device

MB, GB = 1_000_000, 1_000_000_000
FULL = 100 * MB  # of a disk: nothing can be written there to the end
CACHE = 1 * GB  # DeepSpeed's operators for a GPU take some hundred MB
CHECKPOINT = 5 * GB  # three of GPT-2 small with Adam
SHARED = 256 * MB  # DeepSpeed's buffers between ranks on the CPU take 69 MB a rank
MEMORY, LITTLE_MEMORY = 1 * GB, 4 * GB  # importing torch and DeepSpeed takes half of the first
CGROUP = Path("/sys/fs/cgroup")


def found() -> list[Finding]:
    checks: dict[str, Callable[[], Finding]] = {
        "memory": memory,
        "disk, this folder": lambda: disk("disk, this folder", Path.cwd(), CHECKPOINT),
        "disk, kernels": lambda: disk("disk, kernels", cache_folder(), CACHE, "set MST_SCALE_CACHE to"),
        "disk, DeepSpeed": lambda: disk(
            "disk, DeepSpeed", build_locks.extensions_folder(), CACHE, "set TORCH_EXTENSIONS_DIR to"
        ),
        "shared memory": shared_memory,
    }
    if device() == "cuda":
        checks["GPU memory"] = gpu_memory
    return each(checks)


def locks() -> Finding:
    """Before anything is built here: a stale lock goes, as at the start of every run."""
    folder, name = build_locks.extensions_folder(), "build locks"
    verdicts = {lock: build_locks.stale(lock) for lock in build_locks.locks(folder)}
    gone = [lock for lock, verdict in verdicts.items() if verdict]
    for lock in gone:
        lock.unlink(missing_ok=True)
    if gone:
        said = f"removed {', '.join(map(str, gone))}, left by a killed build: every start would have waited for it"
        return look(name, said, "nothing: it is gone, as at the start of every run", removed=list(map(str, gone)))
    young = [lock for lock, verdict in verdicts.items() if verdict is None]
    if young:
        cure = "wait for that build; if there is none, remove the lock"
        return look(name, f"{young[0]} is held: a build is under way, or was killed just now", cure)
    return ok(name, f"none is stale in {folder}")


def memory() -> Finding:
    free, total = free_memory()
    said = f"{in_words(free)} free of {in_words(total)}"
    if free < MEMORY:
        cure = "end what else runs here, or ask for more"
        return wrong("memory", f"{said}: too little for torch and DeepSpeed", cure, free=free, total=total)
    if free < LITTLE_MEMORY:
        cure = "`mst plan` says what a model takes"
        return look("memory", f"{said}: enough for small models only", cure, free=free, total=total)
    return ok("memory", said, free=free, total=total)


def free_memory() -> tuple[int, int]:
    """(free, all) bytes of this machine, or of the part of it that this process may use."""
    lines = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
    known = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}
    free, total = known["MemAvailable"], known["MemTotal"]
    most, used = (number_in(CGROUP / f"memory.{name}") for name in ("max", "current"))
    if most is not None and used is not None and most < total:
        free, total = min(free, max(0, most - used)), most
    return free, total


def number_in(path: Path) -> int | None:
    """None where there is no such file, or no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def gpu_memory() -> Finding:
    import torch

    free, total = torch.cuda.mem_get_info(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    said = f"{in_words(free)} free of {in_words(total)}"
    if free < total // 2:
        cure = "nvidia-smi shows who uses it"
        return look("GPU memory", f"{said}: somebody else computes there", cure, free=free, total=total)
    return ok("GPU memory", said, free=free, total=total)


def disk(name: str, place: Path, least: int, elsewhere: str = "work in") -> Finding:
    """Of the folder, or of the one that it would be made in."""
    there = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    said = f"{in_words(free)} free for {place}"
    cure = f"make room, or {elsewhere} a folder with more"
    if not os.access(there, os.W_OK):
        return wrong(name, f"{there} cannot be written", f"{elsewhere} a folder of yours", free=free)
    if free < FULL:
        return wrong(name, f"{said}: full", cure, free=free)
    return look(name, f"{said}: little", cure, free=free) if free < least else ok(name, said, free=free)


def shared_memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free
    said = f"{in_words(free)} free in /dev/shm"
    if free < SHARED:
        cure = "containers: docker run --shm-size=8g"
        return look("shared memory", f"{said}: several ranks or loaders would run out of it", cure, free=free)
    return ok("shared memory", said, free=free)


def in_words(size: int) -> str:
    return f"{size / GB:,.1f} GB" if size >= GB else f"{size / MB:,.0f} MB"
