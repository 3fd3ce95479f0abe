"""Runs as they lie on disk, made up: their rows follow a real schedule, their losses a formula."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from mst_scale.config import load, to_dict
from mst_scale.run_logging import snapshots

KINDS = ("attention.qkv", "attention.proj", "mlp.up", "mlp.down")


def config(method: str = "mst", *, steps: int = 600, seed: int = 1, blocks: int = 3, width: int = 64) -> dict[str, Any]:
    raw = {
        "train_batch_size": 8,
        "model": {"n_layer": blocks, "n_head": 2, "n_embd": width, "seq_length": 32, "vocab_size": 64},
        "training": {"steps": steps, "seed": seed, "log_every": 10},
        "mst": {"method": method, "attention": {"stride": 8}} if method == "mst" else {"method": method},
    }
    return json.loads(json.dumps(to_dict(load(raw))))


def write(folder: Path, method: str = "mst", *, until: int | None = None, **about: Any) -> Path:
    """A whole run, or its first `until` steps."""
    resolved = config(method, **about)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(resolved))
    steps = resolved["training"]["steps"]
    with (folder / "metrics.jsonl").open("w") as file:
        for row in rows(resolved, until or steps):
            file.write(json.dumps(row) + "\n")
    for snapshot in pictures(resolved):
        if snapshot.step <= (until or steps):
            snapshots.save(folder, snapshot)
    return folder


def rows(resolved: dict[str, Any], until: int, every: int = 10):
    experiment = load(resolved)
    schedule = experiment.schedule
    attention = experiment.attention_schedule
    rng = np.random.default_rng(experiment.training.seed)
    names = layer_names(resolved)
    flops = dense = 0.0
    for step in range(every, until + 1, every):
        point, pattern = schedule.at(step), attention.pattern_at(step)
        flops, dense = flops + (1 - 0.9 * point.sparsity) * 1e12, dense + 1e12
        row = {
            "step": step,
            "tokens": step * 256,
            "loss": 2 + 4 * math.exp(-step / 100) + 0.05 * rng.standard_normal(),
            "lr": 1e-3,
            "grad_norm": float(np.exp(0.1 * rng.standard_normal())) * (20 if step == 400 else 1),
            "phase": point.phase,
            "target_sparsity": point.sparsity,
            "sparsity": point.sparsity,
            "update_fraction": point.update_fraction,
            "attention": pattern.kind,
            "attention_stride": pattern.stride,
            "flops": flops,
            "flops_dense": dense,
            "flops_causal": 0.9 * flops,
            "flops_dense_causal": 0.8 * dense,
            "tokens_per_s": 5000 + 100 * rng.standard_normal(),
            "step_ms": 51.2,
            "seconds": 0.06 * step,  # evaluations and saves too
            "peak_memory_bytes": 3 * 2**30,
            "state_bytes": 2 * 2**30,
            "comm_bytes": 150 * 2**20,
        }
        if method_is_sparse(resolved):
            dead = {"mlp": int(20 * point.sparsity), "value": 2, "query_key": 0}
            row["units"] = {kind: {"dead": n, "all": 100} for kind, n in dead.items()}
            row["dead_units"] = sum(dead.values())
        if step % 100 == 0 or step == until:
            row["val_loss"] = 2 + 4 * math.exp(-step / 100) + 0.01 * experiment.training.seed
        if schedule.is_topology_step(step):
            row["layers"] = {name: layer(1 - point.sparsity, rng) for name in names}
        yield row


def method_is_sparse(resolved: dict[str, Any]) -> bool:
    return resolved["mst"]["method"] != "dense"


def layer(density: float, rng: np.random.Generator) -> dict[str, Any]:
    counts = rng.integers(1, 500, 3).tolist()
    return {
        "density": density, "pruned": counts[0], "grown": counts[1], "regrown": counts[2],
        "churn": float(rng.uniform(1e-4, 0.1)), "ever_active": min(1.0, density + 0.3),
    }  # fmt: skip


def layer_names(resolved: dict[str, Any]) -> list[str]:
    blocks = resolved["model"]["n_layer"]
    return ["wte.weight", *(f"blocks.{i}.{kind}.weight" for i in range(blocks) for kind in KINDS)]


def pictures(resolved: dict[str, Any]):
    experiment = load(resolved)
    schedule = experiment.schedule
    rng = np.random.default_rng(7)
    names, width = layer_names(resolved), resolved["model"]["n_embd"]
    for step in (0, *(piece.stop - 1 for piece in schedule.phases[:-1]), schedule.total_steps):
        point = schedule.at(max(0, step - 1))
        matrices = [
            snapshots.Matrix(name, (width, width), width, 0.0, 0.02, 0.5 / width + 0.01 * i, 0.2)
            for i, name in enumerate(names)
        ]
        active = {n: (rng.random((48, 32)) >= point.sparsity).astype(float) for n in snapshots.pictured(names)}
        weights = {n: cells * np.abs(rng.standard_normal(cells.shape)) * 0.05 for n, cells in active.items()}
        yield snapshots.Snapshot(step, point.phase, point.sparsity, 12 * width**2, matrices, weights, active)
