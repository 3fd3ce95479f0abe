"""Compares the ranks with each other: what is installed, clocks, hashes, threads, devices and their types."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mst_scale import shipped
from mst_scale.comm import Ranks
from mst_scale.comm.exchange import Exchange
from mst_scale.doctor.finding import Finding, look, ok, who, wrong
from mst_scale.doctor.versions import device, installed
from mst_scale.randomness import counter_hash

PACKAGES = ("torch", "deepspeed", "triton", "numpy", "safetensors")
APART = 2.0  # seconds between clocks
LOOKS = 3  # at the clocks; the closest counts, for a rank may have been busy
KNOWN_HASH = 0xF5491B1680F5B426  # of ("doctor", 7, -1)


@dataclass(frozen=True)
class Facts:
    """What one rank says of itself."""

    host: str
    versions: dict[str, str | None]
    code: str
    """Digest of our own sources."""
    hash: int
    threads: int
    cores: int
    """That this process may use."""
    device: str
    types: tuple[str, ...]
    """Half types that it computes in."""


def facts() -> Facts:
    import torch

    from mst_scale.zero_shards.half_types import half_types  # imports DeepSpeed

    return Facts(
        socket.gethostname(),
        {"python": platform.python_version(), **{name: installed(name) for name in PACKAGES}},
        digest_of_sources(),
        counter_hash("doctor", 7, -1),
        torch.get_num_threads(),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        torch.cuda.get_device_name() if device() == "cuda" else "CPU",
        half_types(),
    )


def digest_of_sources() -> str:
    total = hashlib.sha256()
    for path in sorted(shipped.PACKAGE.rglob("*.py")):
        total.update(str(path.relative_to(shipped.PACKAGE)).encode() + path.read_bytes())
    return total.hexdigest()[:16]


def found(ranks: Ranks) -> list[Finding]:
    """Every rank calls it, and comes to the same."""
    everyone = Exchange(ranks.control)
    all_facts: list[Any] = everyone.all(everyone.agree(facts))
    clocks = [times_of(everyone) for _ in range(LOOKS)]
    alike = [versions(all_facts), clock(clocks, all_facts)] if len(all_facts) > 1 else []
    return [hosts(all_facts), *alike, hashes(all_facts), threads(all_facts), devices(all_facts)]


def times_of(everyone: Exchange) -> list[float]:
    """What each rank's clock says at one moment, as nearly as ranks can meet in one."""
    everyone.all(None)
    return everyone.all(time.time())


def hosts(of: Sequence[Facts]) -> Finding:
    counted = {fact.host: sum(other.host == fact.host for other in of) for fact in of}
    each = ", ".join(f"{host} ({count})" for host, count in list(counted.items())[:8]) + " …" * (len(counted) > 8)
    return ok("ranks", f"{len(of)} on {len(counted)} machine{'s' * (len(counted) > 1)}: {each}", hosts=counted)


def versions(of: Sequence[Facts]) -> Finding:
    cure = "one environment and one clone for all machines"
    for name in of[0].versions:
        if odd := others(of, lambda fact, name=name: fact.versions.get(name)):  # type: ignore[misc]
            theirs, ours = of[odd[0]].versions.get(name), of[0].versions[name]
            return wrong("same software", f"{who(odd, names(of))}: {name} {theirs}, and rank 0 {ours}", cure)
    if odd := others(of, lambda fact: fact.code):
        return wrong("same software", f"{who(odd, names(of))}: other sources of mst_scale than rank 0", cure)
    return ok("same software", "the same versions and the same sources on all ranks")


def hashes(of: Sequence[Facts]) -> Finding:
    if odd := [rank for rank, fact in enumerate(of) if fact.hash != KNOWN_HASH]:
        said = f"{who(odd, names(of))}: counter_hash gives other numbers, so masks would differ between ranks"
        return wrong("random numbers", said, "the sources of mst_scale, and of Python, are not what they should be")
    return ok("random numbers", f"counter_hash is as it should be{' on all ranks' * (len(of) > 1)}")


def clock(looks: Sequence[Sequence[float]], of: Sequence[Facts]) -> Finding:
    times = min(looks, key=lambda times: max(times) - min(times))
    apart = max(times) - min(times)
    if apart > APART:
        middle = sorted(times)[(len(times) - 1) // 2]
        odd = max(range(len(times)), key=lambda rank: abs(times[rank] - middle))
        said = f"{apart:.1f} s apart, most {who([odd], names(of))}: logs and file times mislead"
        return look("clocks", said, "let ntpd or chrony set them", seconds=apart)
    return ok("clocks", f"{apart:.3f} s apart at most", seconds=apart)


def threads(of: Sequence[Facts]) -> Finding:
    cure = "set OMP_NUM_THREADS to the cores of a machine over its ranks"
    if odd := others(of, lambda fact: fact.threads):
        said = f"{who(odd, names(of))}: {of[odd[0]].threads}, and rank 0 {of[0].threads}: the slowest sets the pace"
        return look("threads", said, cure)
    for fact in of:
        wanted = sum(other.threads for other in of if other.host == fact.host)
        if wanted > fact.cores * max(1, sum(other.host == fact.host and other.cores < fact.cores for other in of)):
            said = f"the ranks of {fact.host} have {wanted} threads together on {fact.cores} cores"
            return look("threads", said, cure, threads=wanted, cores=fact.cores)
    return ok("threads", f"{of[0].threads} a rank, {of[0].cores} cores", threads=of[0].threads, cores=of[0].cores)


def devices(of: Sequence[Facts]) -> Finding:
    if odd := others(of, lambda fact: fact.device):
        said = f"{who(odd, names(of))}: {of[odd[0]].device}, and rank 0 {of[0].device}"
        cure = "ask for machines of one kind, and look at their drivers"
        mixed = "CPU" in {fact.device for fact in of}
        return wrong("devices", said, cure) if mixed else look("devices", f"{said}: the slowest sets the pace", cure)
    if odd := others(of, lambda fact: fact.types):
        said = f"{who(odd, names(of))}: {types(of[odd[0]])}, and rank 0 {types(of[0])}"
        return wrong("devices", said, "train in a type that all have: bf16.enabled, fp16.enabled")
    return ok("devices", f"{of[0].device}, {types(of[0])}", device=of[0].device, types=list(of[0].types))


def types(fact: Facts) -> str:
    return " ".join(["fp32", *fact.types])


def others(of: Sequence[Facts], what: Callable[[Facts], Any]) -> list[int]:
    """The ranks that say something else than rank 0."""
    return [rank for rank, fact in enumerate(of) if what(fact) != what(of[0])]


def names(of: Sequence[Facts]) -> list[str]:
    return [fact.host for fact in of]
