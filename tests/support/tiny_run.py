"""A pretraining run small enough for tests: its config, its corpus, the environment of its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mst_scale.comm import free_port  # noqa: F401  (tests take it from here)

ROOT = Path(__file__).parents[2]
CONTEXT = 32


def corpus(folder: Path, tokens: int = 20_000, vocab: int = 64) -> Path:
    """A bare nanoGPT corpus: a noisy walk over the vocabulary, so that there is something to learn."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(5)
    walk = (np.cumsum(rng.integers(0, 3, tokens)) % vocab).astype(np.uint16)
    walk.tofile(folder / "train.bin")
    walk[: tokens // 10].tofile(folder / "val.bin")
    return folder


def config(folder: Path, **blocks: Any) -> Path:
    """A config file; a block is merged into the default one."""
    raw: dict[str, Any] = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "tensorboard": {"enabled": False},
        "model": {"n_layer": 1, "n_head": 2, "n_embd": 16, "seq_length": CONTEXT, "vocab_size": 64},
        "data": {"dir": str(folder / "corpus")},
        "training": {
            "steps": 12, "warmup": 2, "min_lr": 1e-3, "log_every": 1,
            "eval_every": 6, "eval_sequences": 8, "save_every": 4,
        },
    }  # fmt: skip
    for name, block in blocks.items():
        raw[name] = {**raw[name], **block} if isinstance(raw.get(name), dict) and isinstance(block, dict) else block
    if not (folder / "corpus").exists():
        corpus(folder / "corpus")
    path = folder / "config.json"
    path.write_text(json.dumps(raw))
    return path


def assert_continued(out: Path, original: Path, step: int) -> None:
    """Check that a copy of a run was started once more, from this step."""
    first, again = (json.loads((folder / "run.json").read_text())["starts"] for folder in (original, out))
    assert len(again) > len(first) and again[len(first)]["from_step"] == step, [one["from_step"] for one in again]


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def environment(**more: str) -> dict[str, str]:
    """Of a child process: this source tree, one thread, no accelerator, quiet."""
    path = os.pathsep.join([str(ROOT), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": path,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        **more,
    }


def rank_environment(rank: int, world: int, port: int | str) -> dict[str, str]:
    """What a launcher on one machine tells a rank, which computes on the CPU."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
    }  # fmt: skip


def wait_for(moment: Callable[[], Any], processes: Iterable[Any] = (), seconds: float = 120.0) -> None:
    """Wait until `moment()` is true; none of the processes (of subprocess or multiprocessing) may end before."""
    deadline = time.monotonic() + seconds
    while not moment():
        codes = [p.poll() if isinstance(p, subprocess.Popen) else p.exitcode for p in processes]
        assert codes == [None] * len(codes), f"a process ended by itself: {codes}"
        assert time.monotonic() < deadline, f"it has not happened within {seconds:.0f} s"
        time.sleep(0.01)
