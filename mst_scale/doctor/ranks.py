"""Compares the ranks with each other, and measures how fast they reach each other.

The measured collectives are the small all-reduces of topology steps and ZeRO's large pieces. Every time is that of the
slowest rank, and the values that arrive are checked.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mst_scale import shipped
from mst_scale.comm import Ranks
from mst_scale.comm.exchange import Exchange
from mst_scale.doctor.findings import Finding, describe_ranks, look, ok, skip, wrong
from mst_scale.doctor.machine import device, installed
from mst_scale.randomness import counter_hash

PACKAGES = ("torch", "deepspeed", "triton", "numpy", "safetensors")
APART = 2.0  # seconds between clocks
READINGS = 3  # of the clocks; the closest counts, because a rank may have been busy
KNOWN_HASH = 0xF5491B1680F5B426  # of ("doctor", 7, -1)
SMALL_ROUNDS, LARGE_ROUNDS = 40, 7
LAYERS = 49  # of GPT-2 small: a topology step's all-reduces have a row for each
LARGE = 4 << 20  # float32 numbers: 16 MiB
SLOW = 0.010  # seconds for a small all-reduce
NARROW = 0.1  # GB/s
NETWORK = "NCCL_DEBUG=INFO (GPUs) shows which network is used; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose it"


@dataclass(frozen=True)
class Facts:
    """What a rank reports about itself."""

    host: str
    versions: dict[str, str | None]
    code: str  # digest of the sources of mst_scale
    hash: int
    threads: int
    cores: int  # that this process may use
    device: str
    types: tuple[str, ...]  # half types that the device computes in


def check_ranks(ranks: Ranks) -> list[Finding]:
    """Compare software, clocks, hashes, threads and devices; called on every rank, with the same result."""
    everyone = Exchange(ranks.control)
    mine = ranks.agree(_facts)
    facts: list[Facts] = everyone.all(mine)
    clocks = [_read_clocks(everyone) for _ in range(READINGS)]
    alike = [compare_software(facts), compare_clocks(clocks, facts)] if len(facts) > 1 else []
    return [_hosts(facts), *alike, check_hashes(facts), check_threads(facts), compare_devices(facts)]


def _facts() -> Facts:
    from mst_scale.zero_shards.half_types import half_types  # imports DeepSpeed

    sources = hashlib.sha256()
    for path in sorted(shipped.PACKAGE.rglob("*.py")):
        sources.update(str(path.relative_to(shipped.PACKAGE)).encode() + path.read_bytes())
    return Facts(
        host=socket.gethostname(),
        versions={"python": platform.python_version(), **{name: installed(name) for name in PACKAGES}},
        code=sources.hexdigest()[:16],
        hash=counter_hash("doctor", 7, -1),
        threads=torch.get_num_threads(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        device=torch.cuda.get_device_name() if device() == "cuda" else "CPU",
        types=half_types(),
    )


def _read_clocks(everyone: Exchange) -> list[float]:
    """The clock of each rank at one moment, as nearly as ranks can meet in one."""
    everyone.all(None)
    return everyone.all(time.time())


def _hosts(of: Sequence[Facts]) -> Finding:
    counted = {fact.host: sum(other.host == fact.host for other in of) for fact in of}
    each = ", ".join(f"{host} ({count})" for host, count in list(counted.items())[:8]) + " …" * (len(counted) > 8)
    return ok("ranks", f"{len(of)} on {len(counted)} machine{'s' * (len(counted) > 1)}: {each}", hosts=counted)


def compare_software(of: Sequence[Facts]) -> Finding:
    """Compare versions and sources."""
    fix = "use one environment and one clone on all machines"
    for name in of[0].versions:
        if odd := _others(of, [fact.versions.get(name) for fact in of]):
            theirs, ours = of[odd[0]].versions.get(name), of[0].versions[name]
            return wrong("same software", f"{_who(odd, of)}: {name} {theirs}, and rank 0 {ours}", fix)
    if odd := _others(of, [fact.code for fact in of]):
        return wrong("same software", f"{_who(odd, of)}: other sources of mst_scale than rank 0", fix)
    return ok("same software", "the same versions and the same sources on all ranks")


def check_hashes(of: Sequence[Facts]) -> Finding:
    """Check that the hash behind random growth gives the known number."""
    if odd := [rank for rank, fact in enumerate(of) if fact.hash != KNOWN_HASH]:
        said = f"{_who(odd, of)}: counter_hash gives other numbers, so masks would differ between ranks"
        return wrong("random numbers", said, "reinstall mst_scale and Python there")
    return ok("random numbers", f"counter_hash is as it should be{' on all ranks' * (len(of) > 1)}")


def compare_clocks(readings: Sequence[Sequence[float]], of: Sequence[Facts]) -> Finding:
    """Compare clocks by the closest of several readings."""
    times = min(readings, key=lambda times: max(times) - min(times))
    apart = max(times) - min(times)
    if apart > APART:
        middle = sorted(times)[(len(times) - 1) // 2]
        odd = max(range(len(times)), key=lambda rank: abs(times[rank] - middle))
        said = f"{apart:.1f} s apart, the farthest is {_who([odd], of)}: logs and file times mislead"
        return look("clocks", said, "let ntpd or chrony set them", seconds=apart)
    return ok("clocks", f"{apart:.3f} s apart at most", seconds=apart)


def check_threads(of: Sequence[Facts]) -> Finding:
    """Check that ranks have equally many threads, and machines no more threads than cores."""
    fix = "set OMP_NUM_THREADS to the cores of a machine divided by its ranks"
    if odd := _others(of, [fact.threads for fact in of]):
        said = f"{_who(odd, of)}: {of[odd[0]].threads}, and rank 0 {of[0].threads}: the slowest sets the pace"
        return look("threads", said, fix)
    for fact in of:
        wanted = sum(other.threads for other in of if other.host == fact.host)
        if wanted > fact.cores * max(1, sum(other.host == fact.host and other.cores < fact.cores for other in of)):
            said = f"the ranks of {fact.host} have {wanted} threads together on {fact.cores} cores"
            return look("threads", said, fix, threads=wanted, cores=fact.cores)
    said = f"{of[0].threads} per rank, {of[0].cores} cores"
    return ok("threads", said, threads=of[0].threads, cores=of[0].cores)


def compare_devices(of: Sequence[Facts]) -> Finding:
    """Compare devices and the types that they compute in."""
    types = [" ".join(["fp32", *fact.types]) for fact in of]
    if odd := _others(of, [fact.device for fact in of]):
        said = f"{_who(odd, of)}: {of[odd[0]].device}, and rank 0 {of[0].device}"
        fix = "ask for machines of one kind, and check their drivers"
        mixed = "CPU" in {fact.device for fact in of}
        return wrong("devices", said, fix) if mixed else look("devices", f"{said}: the slowest sets the pace", fix)
    if odd := _others(of, types):
        said = f"{_who(odd, of)}: {types[odd[0]]}, and rank 0 {types[0]}"
        return wrong("devices", said, "train in a type that all ranks have: bf16.enabled, fp16.enabled")
    return ok("devices", f"{of[0].device}, {types[0]}", device=of[0].device, types=list(of[0].types))


def _others(of: Sequence[Facts], values: Sequence[Any]) -> list[int]:
    """The ranks whose value differs from that of rank 0."""
    return [rank for rank in range(len(of)) if values[rank] != values[0]]


def _who(ranks: Sequence[int], of: Sequence[Facts]) -> str:
    return describe_ranks(ranks, [fact.host for fact in of])


# --- collectives ---


def check_collectives(ranks: Ranks) -> list[Finding]:
    """Measure small all-reduces, all-gathers and reduce-scatters; called on every rank."""
    if ranks.world_size == 1:
        return [skip("collectives", "one process: there is nothing to measure")]
    place = torch.device("cuda", torch.cuda.current_device()) if device() == "cuda" else torch.device("cpu")
    everyone = Exchange(dist.group.WORLD, place)
    return [_small(everyone), *(_large(name, everyone, place) for name in ("all-gather", "reduce-scatter"))]


def _small(everyone: Exchange) -> Finding:
    name, world = "small all-reduce", everyone.ranks
    counts = torch.arange(LAYERS) + everyone.rank
    expected = torch.arange(LAYERS) * world + world * (world - 1) // 2
    times = _slowest(everyone, lambda: everyone.sum(counts), expected, SMALL_ROUNDS)
    if times is None:
        return _garbled(name)
    low, middle, high = statistics.quantiles(times, n=4)
    said = f"{middle * 1e3:.2f} ms ({low * 1e3:.2f} to {high * 1e3:.2f}) between {world} ranks"
    numbers = {"ms": middle * 1e3, "range_ms": [low * 1e3, high * 1e3], "world": world}
    if middle > SLOW:
        return look(name, f"{said}: slow; a topology step needs some tens of these", NETWORK, **numbers)
    return ok(name, said, **numbers)


def _large(name: str, everyone: Exchange, place: torch.device) -> Finding:
    world = everyone.ranks
    each = LARGE // world
    part = torch.full((each,), float(everyone.rank + 1), device=place)
    whole = torch.arange(1.0, world + 1, device=place).repeat_interleave(each)

    def gather() -> torch.Tensor:
        out = torch.empty_like(whole)
        dist.all_gather_into_tensor(out, part)
        return out

    def scatter() -> torch.Tensor:
        out = torch.empty_like(part)
        dist.reduce_scatter_tensor(out, whole)
        return out

    work, expected = (gather, whole) if name == "all-gather" else (scatter, part * world)
    times = _slowest(everyone, work, expected, LARGE_ROUNDS)
    if times is None:
        return _garbled(name)
    sent = each * 4 * (world - 1) / 1e9  # by each rank, in a ring
    low, middle, high = (sent / seconds for seconds in reversed(statistics.quantiles(times, n=4)))
    said = f"{middle:.2f} GB/s per rank ({low:.2f} to {high:.2f}), {each * world * 4 >> 20} MiB"
    numbers = {"gb_per_s": middle, "range_gb_per_s": [low, high]}
    if middle < NARROW:
        return look(name, f"{said}: ZeRO would wait for it", NETWORK, **numbers)
    return ok(name, said, **numbers)


def _garbled(name: str) -> Finding:
    fix = "try another network or backend, and check the driver and NCCL's version"
    return wrong(name, "the values that arrived are not those that were sent", fix)


def _slowest(
    everyone: Exchange, work: Callable[[], torch.Tensor], expected: torch.Tensor, rounds: int
) -> list[float] | None:
    """Seconds of each round on the slowest rank; None if wrong values arrived anywhere.

    The first rounds, which open connections, are left out.
    """
    times, right = [], True
    for _ in range(2 + rounds):
        began = time.perf_counter()
        arrived = work()
        if arrived.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        right = right and torch.equal(arrived, expected)
    slowest: list[float] = everyone.max(torch.tensor(times[2:], dtype=torch.float64)).tolist()
    return None if int(everyone.sum(torch.tensor(int(not right)))) else slowest
