"""Run in a process of its own under TRITON_INTERPRET=1: errors of the Triton kernels on the cases given as JSON.

Its own process because the variable must be set before triton is first imported, and would then hold for every user of
triton in the process, torch.compile included.
"""

from __future__ import annotations

import json
import sys

import torch

from mst_scale.hybrid_sparse_attention import Pattern, attention
from tests.hybrid_sparse_attention.oracle import differentiate, inputs, raised, reference, relative_errors


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
    print(json.dumps(unseen()), flush=True)


def unseen() -> dict[str, float]:
    """Keys of -inf: rows 0, 1, 2 see nothing else. Their out and dv, and whether all is finite."""
    from mst_scale.hybrid_sparse_attention import triton_kernel

    q, k, v, dout = inputs((1, 1, 40, 16), 1, torch.float32)
    q, k = q.abs(), k.clone()
    k[:, :, :3] = -torch.inf
    how = {"pattern": Pattern("strided", 8), "causal": True, "scale": 0.5}
    out, *rows = triton_kernel.forward(q, k, v, **how)
    assert bool((rows[0][0, 0, :3] == -torch.inf).all())
    _, _, dv = triton_kernel.backward(q, k, v, out, *rows, dout=dout, **how)
    largest = max(float(x[0, 0, :3].abs().max()) for x in (out, dv))
    return {"unseen": largest, "finite": float(out.isfinite().all() and dv.isfinite().all())}


if __name__ == "__main__":
    main()
