"""Configs and settings of the tests of plans: ready-made ones, and small runs on 2 ranks that are measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mst_scale.config import ModelConfig, load
from mst_scale.plan.gpus import machine
from mst_scale.plan.setting import setting_of
from tests.support.tiny_run import ROOT

A100 = machine("a100-80gb", 64)
MODEL = ModelConfig(n_layer=5, n_head=4, n_embd=64, seq_length=128, vocab_size=1000, bias=True)

MST = {
    "method": "mst",
    "sparsity": {"max": 0.5, "warmup": 0.5, "ultra": 0.2, "restore": 0.2},
    "topology": {"interval": 1},
}


def config(
    stage: int,
    precision: str,
    *,
    bucket: int = 20_000,
    accumulation: int = 2,
    zero: dict[str, Any] | None = None,
    mst: dict[str, Any] | None = None,
    **model: Any,
) -> dict[str, Any]:
    """`precision` is fp32, bf16, or bf16+fp32 where gradients are added up in fp32."""
    raw: dict[str, Any] = {
        "train_batch_size": 2 * accumulation,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket, **(zero or {})},
        "steps_per_print": 2**31,
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 32, "seq_length": 16, "vocab_size": 250, **model},
        "training": {"steps": 20},
        "mst": mst or {"method": "dense"},
    }
    if precision != "fp32":
        raw["bf16"] = {"enabled": True}
    if precision == "bf16+fp32":
        raw["data_types"] = {"grad_accum_dtype": "fp32"}
    return raw


def ready(name="gpt2_small", *overrides: str):
    """A ready-made config."""
    return load(ROOT / "ds_configs" / f"{name}.json", overrides)


def setting(name="gpt3_13b", gpus=64, stage=2, **sizes):
    """The setting of a ready-made config whose model is shared with these sizes, at micro-batch 1."""
    s = replace(setting_of(ready(name), gpus).at_stage(stage), **sizes, micro=1)
    return replace(s, accumulation=1024 // s.data)


def total(found):
    """The elements of these parameters."""
    return sum(p.numel for p in found)
