"""Lists the methods that consist of data: a sparsity schedule, a policy for the masks, and an attention pattern.

    constant    one sparsity from the first step to the last       static, rigl, set, mest, snfs, fixed
    then_dense  fixed masks for most of the run, then dense        spdf
    ablation    Mixed-Growing under another schedule               sparse, sd, dsd, gd

Hybrid sparse attention belongs to `mst`; all other methods are compared without it.
"""

from __future__ import annotations

from typing import Any

from mst_scale.methods.method import Method
from mst_scale.sparsity_variation import DURATIONS

NO_HSA = {"pattern": "dense"}
NO_HEAD = {"lm_head": False}  # a tied head is an embedding too
VARIATIONS = tuple(DURATIONS)
STILL: dict[str, Any] = {"update_schedule": "constant", "update_fraction": 0.0}  # no swaps at constant sparsity


def constant(policy: str, sparsity: float = 0.8, **topology: Any) -> dict[str, Any]:
    """Return a preset of one sparsity from the first step to the last."""
    return {
        "sparsity": {"variation": "sparse", "max": sparsity},
        "topology": {"policy": policy, "random_ratio": None, "update_schedule": "1-cosine", **topology},
        "attention": NO_HSA,
    }


def then_dense(sparsity: float, share: float, **more: Any) -> dict[str, Any]:
    """Return a preset of fixed masks for this fraction of the run, followed by dense training."""
    return {
        "sparsity": {"variation": "sd", "max": sparsity, "warmup": 0, "ultra": share, **more},
        "topology": {"policy": "static", "random_ratio": None, **STILL},
        "attention": NO_HSA,
        "targets": NO_HEAD,
    }


def _ablation(about: str, variation: str) -> Method:
    topology = {"policy": "mst", "random_ratio": None}
    preset = {"sparsity": {"variation": variation}, "topology": topology, "attention": NO_HSA}
    return Method(f"{about}, by Mixed-Growing", preset)


DENSE = {"sparsity": {"variation": "dense"}, "attention": NO_HSA}

PRESETS: dict[str, Method] = {
    "mst": Method(
        "Sparsity Variation, Mixed-Growing and Hybrid Sparse Attention",
        {"sparsity": {"variation": "sv"}, "topology": {"policy": "mst", "random_ratio": None}},
        "Hu et al. 2024, Mixed Sparsity Training: Achieving 4x FLOP Reduction for Transformer Pretraining, "
        "arXiv 2408.11746",
    ),
    # Ablations of Sparsity Variation.
    "sparse": _ablation("one sparsity to the end", "sparse"),
    "sd": _ablation("sparse, then dense", "sd"),
    "dsd": _ablation("dense, sparse, dense", "dsd"),
    "gd": _ablation("gradually less sparse, then dense", "gd"),
    # Dense training.
    "dense": Method("no weight is masked", DENSE),
    "dense-short": Method("dense, for as many steps as the FLOPs of mst.like, or of method mst, pay for", DENSE),
    "tiny": Method(
        "the paper's small dense model instead of the config's",
        DENSE,
        model={"n_layer": 6, "n_head": 12, "n_embd": 384, "preset": "tiny", "d_ff": None},
    ),
    # Masks that never change.
    "static": Method(
        "a random topology that never changes",
        constant("static", **STILL),
        "Evci et al. 2020, Rigging the Lottery, arXiv 1911.11134 (as a baseline)",
    ),
    "fixed": Method(
        "the masks of mst.masks, kept (to train a pruned model further)",
        {"masks": "zeros", **constant("static", 0.5, **STILL)},
    ),
    # All layers of the blocks have the same sparsity, and embeddings and head are dense, as in the paper. The paper's
    # dense phase is fine-tuning on another task; ours continues on the same text.
    "spdf": Method(
        "a random topology that never changes, then dense",
        then_dense(0.75, 11 / 14, distribution="uniform"),
        "Thangarasa et al. 2023, SPDF: Sparse Pre-training and Dense Fine-tuning for Large Language Models, "
        "arXiv 2303.10464",
    ),
    # Dynamic sparse training.
    "rigl": Method(
        "prune by |w|, grow by |g|",
        constant("rigl"),
        "Evci et al. 2020, Rigging the Lottery: Making All Tickets Winners, arXiv 1911.11134",
    ),
    "set": Method(
        "prune by |w|, grow at random",
        constant("set", grown_moments="active_mean"),
        "Mocanu et al. 2018, Scalable training of artificial neural networks with adaptive sparse connectivity, "
        "arXiv 1707.04780",
    ),
    "mest": Method(
        "prune by |w| + λ|g|, grow at random",
        constant("mest", grown_moments="active_mean"),
        "Yuan et al. 2021, MEST: Accurate and Fast Memory-Economic Sparse Training Framework on the Edge, "
        "arXiv 2110.14032",
    ),
    "snfs": Method(
        "prune by |w|, grow by |momentum|",
        constant("snfs"),
        "Dettmers, Zettlemoyer 2019, Sparse Networks from Scratch: Faster Training without Losing Performance, "
        "arXiv 1907.04840",
    ),
    # Pruning during training.
    "gmp": Method(
        "prune by |w| along a cubic, grow nothing",
        {
            "sparsity": {"variation": "gmp", "max": 0.8, "start": 0.25, "warmup": 0.5},
            "topology": {"policy": "gmp", "random_ratio": None, **STILL},
            "attention": NO_HSA,
        },
        "Zhu, Gupta 2017, To prune, or not to prune, arXiv 1710.01878",
    ),
    # Each sparse phase keeps the largest weights of the dense phase before it, layer by layer. The last sparse phase is
    # longer, and its result is a sparse model. Where a dense phase begins, momentum is reset, as in the paper.
    "acdc": Method(
        "alternating sparse and dense phases, sparse at the end",
        {
            "sparsity": {"variation": "acdc", "max": 0.8, "initial": "magnitude"},
            "topology": {"policy": "static", "random_ratio": None, "reset_momentum": True, **STILL},
            "attention": NO_HSA,
        },
        "Peste et al. 2021, AC/DC: Alternating Compressed/DeCompressed Training of Deep Neural Networks, "
        "arXiv 2106.12379",
    ),
}
