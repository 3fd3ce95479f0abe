"""Short runs whose numbers must not change when code is only moved: record them at two commits, and compare.

    python -m tests.support.golden record before.json      at the old commit
    python -m tests.support.golden compare before.json     at the new one: the first difference and 1, or "equal"

Every ZeRO stage, several methods, both models, on two processes of this machine: every metric that is no time, bit for
bit, and the digest of every mask. It asks nothing but the command line, so that it can look at any commit.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

TIMES = ("seconds", "tokens_per_s", "step_ms", "save_s", "peak_memory_bytes", "state_bytes", "comm_bytes")
MST = {"sparsity": {"max": 0.8}, "topology": {"interval": 2}}
BASE: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "torch_adam": True}},
    "gradient_clipping": 1.0,
    "tensorboard": {"enabled": False},
    "model": {"n_layer": 2, "n_head": 2, "n_embd": 32, "seq_length": 32, "vocab_size": 64},
    "training": {"steps": 28, "warmup": 2, "log_every": 1, "eval_every": 14, "eval_sequences": 8, "save_every": 10},
    "mst": {"method": "mst", **MST, "attention": {"pattern": "strided", "stride": 8}},
}
CASES: dict[str, dict[str, Any]] = {
    **{f"mst, stage {stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)},
    "mst, bf16, stage 2": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    "blocks": {"mst": {**MST, "method": "mst", "topology": {"interval": 2, "granularity": {"block": 4}}}},
    **{
        name: {"mst": {"method": name, **MST, "topology": {"interval": 3}}, "zero_optimization": {"stage": 1}}
        for name in ("rigl", "mest", "snfs", "gmp")
    },
    "bert": {"model": {**BASE["model"], "arch": "bert"}, "zero_optimization": {"stage": 1}},
    "dense": {"mst": {"method": "dense"}},
}


def run(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """The metrics and masks of one case, and of its last third resumed by a second start."""
    config, out = folder / "config.json", folder / "out"
    config.write_text(json.dumps({**BASE, **case, "data": {"dir": str(folder.parent / "corpus")}}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mst_scale.pretrain", "--deepspeed_config", str(config), "--out", str(out)]
    ranks = [
        subprocess.Popen(
            command,
            env={
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
                "DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            },
            stdout=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]  # fmt: skip
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise RuntimeError(f"the run in {folder} failed")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    masks = {}
    for checkpoint in sorted((out / "checkpoints").glob("step*")) if (out / "checkpoints").is_dir() else []:
        if (checkpoint / "mst").is_dir():
            inspect = [sys.executable, "-m", "mst_scale", "inspect", str(checkpoint), "--json"]
            found = json.loads(subprocess.run(inspect, capture_output=True, text=True, check=True).stdout)
            masks[checkpoint.name] = {layer["name"]: layer["sha256"] for layer in found["layers"]}
    return {"rows": [{k: v for k, v in row.items() if k not in TIMES} for row in rows], "masks": masks}


def record() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "corpus").mkdir()
        walk = (np.cumsum(np.random.default_rng(5).integers(0, 3, 20_000)) % 63).astype(np.uint16)
        walk.tofile(folder / "corpus" / "train.bin")
        walk[:2_000].tofile(folder / "corpus" / "val.bin")
        found = {}
        for i, (what, case) in enumerate(CASES.items()):
            (folder / str(i)).mkdir()
            found[what] = run(folder / str(i), case)
            print(f"{i + 1}/{len(CASES)} {what}: loss {found[what]['rows'][-1]['loss']:.6f}", flush=True)
    return found


def difference(before: Any, now: Any, where: str = "") -> str | None:
    """The first place where two recordings differ; keys that only one of them has count too."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            if key not in before or key not in now:
                return f"{where}/{key} is only in the {'new' if key in now else 'old'} one"
            if found := difference(before[key], now[key], f"{where}/{key}"):
                return found
        return None
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = enumerate(zip(before, now, strict=True))
        return next((found for i, (a, b) in pairs if (found := difference(a, b, f"{where}[{i}]"))), None)
    return None if before == now else f"{where}: {before!r} before, {now!r} now"


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("record", "compare"):
        sys.exit(__doc__)
    recorded = record()
    if sys.argv[1] == "record":
        Path(sys.argv[2]).write_text(json.dumps(recorded))
    else:
        found = difference(json.loads(Path(sys.argv[2]).read_text()), json.loads(json.dumps(recorded)))
        print(found or "equal")
        sys.exit(found is not None)
