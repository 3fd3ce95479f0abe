"""Run in a process of its own under TRITON_INTERPRET=1: errors of the block kernels on the cases given as JSON.

Its own process because the variable must be set before triton is first imported, and would then hold for every user of
triton in the process.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from tests.support.block_cases import errors, poisoned, second_derivatives


def trained(stage: int) -> dict[str, Any]:
    """A tiny GPT, every layer and the tied head in blocks, trained for some steps: against masked dense products."""
    import mst_scale
    from mst_scale import comm
    from mst_scale.config.blocks import ModelConfig
    from tests.ranks.sparse_linear.test_training import build, config, tokens

    comm.init()
    shape = ModelConfig(n_layer=1, n_head=2, n_embd=40, seq_length=8, vocab_size=70, vocab_multiple=1, bias=True)
    losses: dict[str, list[float]] = {}
    indexed = 0
    for backend in ("dense", "block"):
        raw = config(stage, 1, backend)
        raw["mst"]["topology"]["granularity"] = {"block": 16, "min_blocks": 1}
        engine = build(raw, shape)
        losses[backend] = []
        for step in range(10):
            loss = engine(*tokens(step, 0))
            engine.backward(loss)
            engine.step()
            losses[backend].append(float(loss.detach()))
        indexed = sum(p.index is not None for p in engine.mst.compute.layers.products.values())
    difference = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    assert mst_scale and torch.isfinite(torch.tensor(difference))
    return {"difference": difference, "indexed": indexed}


def main() -> None:
    for case in json.loads(sys.stdin.read()):
        if "stage" in case:
            found: Any = trained(case["stage"])
        elif "twice" in case:
            found = second_derivatives()
        else:
            found = poisoned() if "poisoned" in case else errors(case)
        print("result", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
