"""Compares the ranks with each other, and measures how fast they reach each other.

The measured collectives are the small all-reduces of topology steps and ZeRO's all-gathers. Every time is that of the
slowest rank, and the values that arrive are checked.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mst_scale.comm import Ranks
from mst_scale.comm.exchange import Exchange
from mst_scale.doctor.findings import Finding, describe_ranks, look, ok, skip, wrong
from mst_scale.doctor.machine import PACKAGE, device
from mst_scale.machine import installed
from mst_scale.randomness import counter_hash

PACKAGES = ("torch", "deepspeed", "triton", "numpy", "safetensors")
APART = 2.0  # seconds between clocks
KNOWN_HASH = 0xF5491B1680F5B426  # of ("doctor", 7, -1)
LAYERS = 49  # of GPT-2 small: a topology step's all-reduces have a row for each
LARGE = 4 << 20  # float32 numbers: 16 MiB
SLOW = 0.010  # seconds for a small all-reduce
NARROW = 0.1  # GB/s
NETWORK = "NCCL_DEBUG=INFO (GPUs) shows which network is used; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose it"


@dataclass(frozen=True)
class Facts:
    """What a rank reports about itself."""

    host: str
    software: dict[str, str | None]  # versions, and the digest of our sources
    hash: int
    threads: int
    cores: tuple[int, ...]  # that this process may use
    device: str
    types: tuple[str, ...]  # half types that the device computes in


def check_ranks(ranks: Ranks) -> list[Finding]:
    """Compare software, clocks, hashes, threads and devices; called on every rank, with the same result."""
    everyone = Exchange(ranks.control)
    of: list[Facts] = everyone.all(ranks.agree(_facts))
    hosts = Counter(fact.host for fact in of)
    listed = ", ".join(f"{host} ({count})" for host, count in list(hosts.items())[:8]) + " …" * (len(hosts) > 8)
    place = ok("ranks", f"{len(of)} on {len(hosts)} machine{'s' * (len(hosts) > 1)}: {listed}")
    everyone.all(None)  # the ranks meet, and read their clocks as nearly at one moment as they can
    clocks = everyone.all(time.time())
    alike = [compare_software(of), compare_clocks(clocks, of)] if len(of) > 1 else []
    return [place, *alike, check_hashes(of), check_threads(of), compare_devices(of)]


def _facts() -> Facts:
    from mst_scale.zero_shards.start import half_types  # imports DeepSpeed

    sources = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        sources.update(str(path.relative_to(PACKAGE)).encode() + path.read_bytes())
    versions = {name: installed(name) for name in PACKAGES}
    return Facts(
        host=socket.gethostname(),
        software={"python": platform.python_version(), **versions, "sources": sources.hexdigest()[:16]},
        hash=counter_hash("doctor", 7, -1),
        threads=torch.get_num_threads(),
        cores=tuple(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)),
        device=torch.cuda.get_device_name() if device() == "cuda" else "CPU",
        types=half_types(),
    )


def compare_software(of: Sequence[Facts]) -> Finding:
    """Compare versions and sources."""
    for name in of[0].software:
        if difference := _difference(of, [f"{name} {fact.software[name]}" for fact in of]):
            return wrong("same software", difference, "use one environment and one clone on all machines")
    return ok("same software", "the same versions and the same sources on all ranks")


def check_hashes(of: Sequence[Facts]) -> Finding:
    """Check that the hash behind random growth gives the known number."""
    if differing := [rank for rank, fact in enumerate(of) if fact.hash != KNOWN_HASH]:
        message = f"{_describe(differing, of)}: counter_hash gives other numbers, so masks would differ between ranks"
        return wrong("random numbers", message, "reinstall mst_scale and Python there")
    return ok("random numbers", "counter_hash gives the known number")


def compare_clocks(times: Sequence[float], of: Sequence[Facts]) -> Finding:
    """Compare the clocks of the ranks."""
    apart, middle = max(times) - min(times), statistics.median_low(times)
    if apart > APART:
        farthest = max(range(len(times)), key=lambda rank: abs(times[rank] - middle))
        message = f"{apart:.1f} s apart, the farthest is {_describe([farthest], of)}: logs and file times mislead"
        return look("clocks", message, "let ntpd or chrony set them", seconds=apart)
    return ok("clocks", f"{apart:.3f} s apart at most", seconds=apart)


def check_threads(of: Sequence[Facts]) -> Finding:
    """Check that ranks have equally many threads, and machines no more threads than cores."""
    fix = "set OMP_NUM_THREADS to the cores of a machine divided by its ranks"
    if difference := _difference(of, [str(fact.threads) for fact in of]):
        return look("threads", f"{difference}: all wait for the slowest", fix)
    for host in dict.fromkeys(fact.host for fact in of):
        here = [fact for fact in of if fact.host == host]
        threads, cores = sum(fact.threads for fact in here), len({core for fact in here for core in fact.cores})
        if threads > cores:
            return look("threads", f"the ranks of {host} have {threads} threads together on {cores} cores", fix)
    cores = len(of[0].cores)
    return ok("threads", f"{of[0].threads} per rank, {cores} core{'s' * (cores != 1)}")


def compare_devices(of: Sequence[Facts]) -> Finding:
    """Compare devices and the types that they compute in."""
    types = [" ".join(["fp32", *fact.types]) for fact in of]
    if difference := _difference(of, [fact.device for fact in of]):
        fix = "ask for machines of one kind, and check their drivers"
        if any(fact.device == "CPU" for fact in of):
            return wrong("devices", difference, fix)
        return look("devices", f"{difference}: all wait for the slowest", fix)
    if difference := _difference(of, types):
        return wrong("devices", difference, "train in a type that all ranks have: bf16.enabled, fp16.enabled")
    return ok("devices", f"{of[0].device}, {types[0]}")


def _difference(of: Sequence[Facts], values: Sequence[str]) -> str | None:
    """Describe the ranks whose value differs from that of rank 0; None if there are none."""
    differing = [rank for rank, value in enumerate(values) if value != values[0]]
    if not differing:
        return None
    return f"{_describe(differing, of)}: {values[differing[0]]}, and rank 0 {values[0]}"


def _describe(ranks: Sequence[int], of: Sequence[Facts]) -> str:
    return describe_ranks(ranks, [fact.host for fact in of])


# --- collectives ---


def check_collectives(ranks: Ranks) -> list[Finding]:
    """Measure small all-reduces and large all-gathers; called on every rank."""
    if ranks.world_size == 1:
        return [skip("collectives", "one process: there is nothing to measure")]
    place = torch.device("cuda", torch.cuda.current_device()) if device() == "cuda" else torch.device("cpu")
    everyone = Exchange(dist.group.WORLD, place)
    return [_all_reduce(everyone), _all_gather(everyone, place)]


def _all_reduce(everyone: Exchange) -> Finding:
    name, world = "small all-reduce", everyone.ranks
    counts = torch.arange(LAYERS) + everyone.rank
    expected = torch.arange(LAYERS) * world + world * (world - 1) // 2
    times = _slowest(everyone, lambda: everyone.sum(counts), expected, rounds=40)
    if times is None:
        return _garbled(name)
    low, middle, high = (1e3 * seconds for seconds in statistics.quantiles(times, n=4))
    message = f"{middle:.2f} ms ({low:.2f} to {high:.2f}) between {world} ranks"
    if middle > 1e3 * SLOW:
        return look(name, f"{message}: slow; a topology step needs some tens of these", NETWORK, ms=middle)
    return ok(name, message, ms=middle)


def _all_gather(everyone: Exchange, place: torch.device) -> Finding:
    name, world, each = "all-gather", everyone.ranks, LARGE // everyone.ranks
    part = torch.full((each,), float(everyone.rank + 1), device=place)
    expected = torch.arange(1.0, world + 1, device=place).repeat_interleave(each)

    def gather() -> torch.Tensor:
        out = torch.empty_like(expected)
        dist.all_gather_into_tensor(out, part)
        return out

    times = _slowest(everyone, gather, expected, rounds=7)
    if times is None:
        return _garbled(name)
    sent = each * 4 * (world - 1) / 1e9  # by each rank, in a ring
    low, middle, high = (sent / seconds for seconds in reversed(statistics.quantiles(times, n=4)))
    message = f"{middle:.2f} GB/s per rank ({low:.2f} to {high:.2f}), {each * world * 4 >> 20} MiB"
    if middle < NARROW:
        return look(name, f"{message}: ZeRO would wait for it", NETWORK, gb_per_s=middle)
    return ok(name, message, gb_per_s=middle)


def _garbled(name: str) -> Finding:
    fix = "try another network or backend, and check the driver and NCCL's version"
    return wrong(name, "the values that arrived are not those that were sent", fix)


def _slowest(
    everyone: Exchange, work: Callable[[], torch.Tensor], expected: torch.Tensor, rounds: int
) -> list[float] | None:
    """Return the seconds of each round on the slowest rank; None if wrong values arrived anywhere.

    The first rounds, which open connections, are left out.
    """
    times, wrong_values = [], 0
    for _ in range(2 + rounds):
        began = time.perf_counter()
        arrived = work()
        if arrived.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        wrong_values += not torch.equal(arrived, expected)
    slowest = everyone.max(torch.tensor(times[2:], dtype=torch.float64)).tolist()
    return None if int(everyone.sum(torch.tensor(wrong_values))) else slowest
