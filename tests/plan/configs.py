"""Small runs on 2 ranks whose tensors and collectives are measured."""

from __future__ import annotations

from typing import Any

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
