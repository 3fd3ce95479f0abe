"""Run in a process of its own under TRITON_INTERPRET=1: errors of the Triton kernels on the cases given as JSON.

Its own process because the variable must be set before triton is first imported, and would then hold for every user of
triton in the process, torch.compile included.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl

from mst_scale.hybrid_sparse_attention import Pattern, attention, triton_kernel
from mst_scale.hybrid_sparse_attention.tiles import Tile
from tests.support.attention_oracle import NAMES, differentiate, inputs, raised, reference, relative_errors


@triton.jit
def _tiles_seen(found, n, stride, per, ROWS: tl.constexpr, PART: tl.constexpr, CAUSAL: tl.constexpr):  # noqa: PLR0917
    """What `_all_seen` says of a tile, beside whether `_seen` holds for every pair of it."""
    first, start = tl.program_id(0) * 2 * ROWS, tl.program_id(1) * ROWS - 5  # keys do not begin at a tile's row
    query, key = first + tl.arange(0, ROWS), start + tl.arange(0, ROWS)
    said = triton_kernel._all_seen(
        first, first + ROWS - 1, start, start + ROWS - 1, n, stride, per, PART, CAUSAL, SKIP=True
    )
    real = triton_kernel._key_row(key, stride, per, PART) < n
    seen = triton_kernel._seen(query[:, None], key[None, :], stride, per, PART, CAUSAL) & real[None, :]
    at = found + 2 * (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1))
    tl.store(at, said.to(tl.int32))
    tl.store(at + 1, tl.min(tl.min(seen.to(tl.int32), 1), 0))


def all_seen() -> dict[str, list[int]]:
    """(tiles of which the two differ, tiles that are seen as a whole) by part, direction and stride."""
    counts = {}
    for part in range(4):
        for causal in (True, False):
            for stride in (4, 40):
                n, rows = 110, 8
                per = -(-n // stride)
                queries = (
                    (per * stride if part == triton_kernel.RESIDUES.value else n) // rows // 2
                )  # every second tile, whole ones
                keys = 1 + (queries if part != triton_kernel.LAST.value else -(-n // stride // rows))
                found = torch.zeros(queries, keys, 2, dtype=torch.int32)
                _tiles_seen[(queries, keys)](found, n, stride, per, ROWS=rows, PART=part, CAUSAL=causal)
                said, true = found.bool().unbind(2)
                said, true = said[:, 1:], true[:, 1:]  # the first begins before the sequence, where no walk begins
                counts[f"{part} {causal} {stride}"] = [int((said != true).sum()), int(true.sum())]
    return counts


def tuned(restoring: bool) -> dict[str, float]:
    """Worst errors when every launch tries two tiles, twice each, before it counts."""
    tiles = tuple(Tile(queries, keys, 4, 2, skip) for queries, keys, skip in ((16, 32, True), (32, 16, False)))

    def measure(run: Callable[[], None], quantiles: Any) -> list[float]:
        for _ in range(2):
            run()
        return [1.0] * 3

    worst = dict.fromkeys(NAMES, 0.0)
    continued = triton_kernel.CONTINUED if restoring else dict.fromkeys(triton_kernel.CONTINUED, ())
    with (
        mock.patch.object(triton_kernel, "tiles_of", lambda *_: tiles),
        mock.patch.object(triton_kernel, "CONTINUED", continued),
        mock.patch.object(triton, "autotune", functools.partial(triton.autotune, do_bench=measure)),
    ):
        for kind in ("strided", "fixed"):
            tensors, pattern = inputs((1, 1, 40, 16), 1, torch.float32), Pattern(kind, 12)
            results = differentiate(lambda q, k, v, p=pattern: attention(q, k, v, p, True, "triton"), *tensors)  # type: ignore[misc]
            for name, error in relative_errors(results, reference(tensors, pattern, True)).items():
                worst[name] = max(worst[name], error)
    triton_kernel._tuned.cache_clear()
    return worst


def main() -> None:
    for case in json.loads(sys.stdin.read()):
        tensors = inputs(tuple(case["shape"]), case["kv_heads"], getattr(torch, case["dtype"]))
        tensors = raised(tensors) if case["raised"] else tensors
        pattern, causal = Pattern(case["kind"], case["stride"]), case["causal"]
        results = differentiate(
            lambda q, k, v, p=pattern, c=causal: attention(q, k, v, p, c, "triton"),  # type: ignore[misc]
            *tensors,
        )
        print(json.dumps(relative_errors(results, reference(tensors, pattern, causal))), flush=True)
    for found in (all_seen(), tuned(restoring=True), tuned(restoring=False), unseen()):
        print(json.dumps(found), flush=True)


def unseen() -> dict[str, float]:
    """Keys of -inf: rows 0, 1, 2 see nothing else. Their out and dv, and whether all is finite."""
    q, k, v, dout = inputs((1, 1, 40, 16), 1, torch.float32)
    q, k = q.abs(), k.clone()
    k[:, :, :3] = -torch.inf
    how = {"pattern": Pattern("strided", 8), "causal": True, "scale": 0.5}
    out, *rows = triton_kernel.forward(q, k, v, **how)
    assert bool((rows[0][0, 0, :3] == -torch.inf).all())
    _, _, dv = triton_kernel.backward((q, k, v, out, *rows), dout, **how)
    largest = max(float(x[0, 0, :3].abs().max()) for x in (out, dv))
    return {"unseen": largest, "finite": float(out.isfinite().all() and dv.isfinite().all())}


if __name__ == "__main__":
    main()
