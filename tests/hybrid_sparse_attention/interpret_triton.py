"""Run in a process of its own under TRITON_INTERPRET=1: errors of the Triton kernels on the cases given as JSON.

Its own process because the variable must be set before triton is first imported, and would then hold for every user of
triton in the process, torch.compile included.
"""

from __future__ import annotations

import json
import sys

import torch

from mst_scale.hybrid_sparse_attention import Pattern, attention
from tests.hybrid_sparse_attention.oracle import differentiate, inputs, reference, relative_errors


def main() -> None:
    for case in json.loads(sys.stdin.read()):
        tensors = inputs(tuple(case["shape"]), case["kv_heads"], getattr(torch, case["dtype"]))
        pattern, causal = Pattern(case["kind"], case["stride"]), case["causal"]
        results = differentiate(
            lambda q, k, v, p=pattern, c=causal: attention(q, k, v, p, c, "triton"),  # type: ignore[misc]
            *tensors,
        )
        print(json.dumps(relative_errors(results, reference(tensors, pattern, causal))), flush=True)


if __name__ == "__main__":
    main()
