"""A study of tiny runs, and rows as its runs would leave them."""

from mst_scale.benchmarks.studies import outcome, records

from mst_scale.flops.ledger import UPDATE_FLOPS

TINY = {
    "question": "Is it quick?",
    "success": "It ends.",
    "config": {
        "train_batch_size": 4, "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 0}, "tensorboard": {"enabled": False},
        "model": {"n_head": 2, "seq_length": 32, "vocab_size": 257, "vocab_multiple": 1}, "data": {"dir": "corpus"},
        "training": {
            "lr_schedule": "wsd", "warmup": 2, "decay": 0.25, "eval_sequences": 4, "histogram_every": 0,
            "async_save": False,
        },
        "mst": {"method": "dense"},
    },
    "seeds": [1, 2], "rates": [1e-3, 1e-2], "tokens_per_parameter": [1],
    "sizes": {"tiny": {"model": {"n_layer": 1, "n_embd": 16}, "small": {"n_embd": 8}}},
    "variants": {
        "dense": {"shares": [0.5, 1.0]},
        "dense-short": {"as_long_as": "mst"},
        "mst": {
            "method": "mst", "rates": [1e-2],
            "set": {"mst.sparsity.max": 0.5, "mst.attention.pattern": "dense", "mst.topology.interval": 1},
        },
    },
}  # fmt: skip


def row(one, loss: float, status: str = records.FINISHED, **more):
    """A run that has spent `one.flops` in all, a tenth of it in topology steps."""
    flops = one.flops
    counted = 0.9 * flops - UPDATE_FLOPS * one.experiment.model.weights * one.steps
    reported = {"val_loss": loss, "flops": counted, "flops_causal": counted - 0.1 * flops, "flops_dense": 2 * flops}
    versions = {"python": "3", "torch": "2", "deepspeed": "0"}
    same = {"corpus": "c", "commit": None, "versions": versions, "flops_topology": 0.1 * flops}
    return {**records.about(one, status), "seconds": 20.0, "steps_run": one.steps, **reported, **same, **more}


def everything(plan, losses):
    """Rows of every run that the plan comes to want."""
    rows = {}
    while todo := [one for one in outcome.wanted(plan, rows, "c")[0] if one.digest not in rows]:
        rows |= {one.digest: row(one, losses(one)) for one in todo}
    return rows
