"""Measures how fast the ranks reach each other: the small all-reduces of topology steps, and ZeRO's large pieces.

Every measure is that of the slowest rank, and what arrives is checked.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from mst_scale.comm import Ranks
from mst_scale.comm.exchange import Exchange
from mst_scale.doctor.finding import Finding, look, ok, skip, wrong
from mst_scale.doctor.versions import device

SMALL_ROUNDS, LARGE_ROUNDS = 40, 7
LAYERS = 49  # of GPT-2 small: what a topology step's all-reduces have a row for
LARGE = 4 << 20  # float32 numbers: 16 MiB
SLOW = 0.010  # seconds for a small all-reduce
NARROW = 0.1  # GB/s
SMALL_NAME, LARGE_NAMES = "small all-reduce", ("all-gather", "reduce-scatter")
NETWORK = "NCCL_DEBUG=INFO (GPUs) shows which network is used; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose it"


def found(ranks: Ranks) -> list[Finding]:
    """Every rank calls it."""
    if ranks.world_size == 1:
        return [skip("collectives", "one process: there is nothing to measure")]
    place = torch.device("cuda", torch.cuda.current_device()) if device() == "cuda" else torch.device("cpu")
    everyone = Exchange(dist.group.WORLD, place)
    return [small(everyone), *(large(name, everyone, place) for name in LARGE_NAMES)]


def small(everyone: Exchange) -> Finding:
    counts = torch.arange(LAYERS) + everyone.rank
    expected = torch.arange(LAYERS) * everyone.ranks + everyone.ranks * (everyone.ranks - 1) // 2
    times, right = slowest(everyone, lambda: everyone.sum(counts), expected, SMALL_ROUNDS)
    if not right:
        return garbled(SMALL_NAME)
    low, middle, high = middle_half(times)
    said = f"{middle * 1e3:.2f} ms ({low * 1e3:.2f} to {high * 1e3:.2f}) between {everyone.ranks} ranks"
    numbers = {"ms": middle * 1e3, "range_ms": [low * 1e3, high * 1e3], "world": everyone.ranks}
    if middle > SLOW:
        return look(SMALL_NAME, f"{said}: slow; a topology step takes some tens of these", NETWORK, **numbers)
    return ok(SMALL_NAME, said, **numbers)


def large(name: str, everyone: Exchange, place: torch.device) -> Finding:
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

    gathers = name == "all-gather"
    expected = whole if gathers else part * world
    times, right = slowest(everyone, gather if gathers else scatter, expected, LARGE_ROUNDS)
    if not right:
        return garbled(name)
    sent = each * 4 * (world - 1) / 1e9  # by each rank, in a ring
    low, middle, high = (sent / seconds for seconds in reversed(middle_half(times)))
    said = f"{middle:.2f} GB/s a rank ({low:.2f} to {high:.2f}), {each * world * 4 >> 20} MiB"
    numbers = {"gb_per_s": middle, "range_gb_per_s": [low, high]}
    if middle < NARROW:
        return look(name, f"{said}: ZeRO would wait for it", NETWORK, **numbers)
    return ok(name, said, **numbers)


def garbled(name: str) -> Finding:
    return wrong(name, "what arrived is not what was sent", "another network or backend; the driver and NCCL's version")


def slowest(
    everyone: Exchange, work: Callable[[], torch.Tensor], expected: torch.Tensor, rounds: int
) -> tuple[list[float], bool]:
    """Seconds of each round on the rank that took longest, and whether what arrived is right everywhere.

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
    of_all: list[float] = everyone.max(torch.tensor(times[2:], dtype=torch.float64)).tolist()
    return of_all, not int(everyone.sum(torch.tensor(int(not right))))


def middle_half(times: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(times, n=4)
    return low, middle, high
