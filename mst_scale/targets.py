"""Which parameters become sparse, and along which schedule? From the words of a config to names and values."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase

from torch import nn

from mst_scale.config import MSTConfig, TargetsConfig
from mst_scale.distributed import logger
from mst_scale.sparsity_variation import Variation
from mst_scale.zero_shards import is_matrix


def choose_targets(model: nn.Module, targets: TargetsConfig) -> dict[str, nn.Parameter]:
    """Matrices whose name matches an `include` glob and no `exclude` glob, in parameter order.

    Vectors, norms and embeddings never do. The head does if `lm_head` says so, also where it is the token embedding.
    """
    head = _head_of(model)
    if head is None and not targets.lm_head:
        logger.info("the model has no get_output_embeddings: mst.targets.lm_head finds no head, use exclude")
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    norms = {id(p) for m in model.modules() if "norm" in type(m).__name__.lower() for p in m.parameters(recurse=False)}
    matrices = {
        name: p
        for name, p in model.named_parameters()  # a tied tensor is listed once
        if p.requires_grad and is_matrix(p) and id(p) not in norms
        if (targets.lm_head if p is head else id(p) not in embeddings)
    }
    for glob in targets.include + targets.exclude:
        if not any(fnmatchcase(name, glob) for name in matrices):
            near = difflib.get_close_matches(glob, matrices, n=1, cutoff=0.0)
            raise ValueError(
                f"mst.targets: {glob!r} matches no parameter that can be sparse; the nearest is "
                f"{near[0] if near else 'none: the model has no matrices'!r}"
            )
    chosen = {
        name: p
        for name, p in matrices.items()
        if any(fnmatchcase(name, glob) for glob in targets.include)
        and not any(fnmatchcase(name, glob) for glob in targets.exclude)
    }
    if not chosen:
        raise ValueError("mst.targets: every parameter that could be sparse is excluded; use method dense instead")
    return chosen


def variation_of(mst: MSTConfig) -> Variation:
    """The schedule that a config states."""
    s, t = mst.sparsity, mst.topology
    return Variation(
        pattern=s.variation,
        max_sparsity=s.max,
        warmup=s.warmup,
        ultra=s.ultra,
        restore=s.restore,
        stages=s.stages,
        warmup_shape=s.warmup_moves,
        restore_shape=s.restore_moves,
        turn=s.turn,
        interval=t.interval,
        update=t.update_schedule,
        update_fraction=t.update_fraction,
        update_decay=t.update_decay,
    )


def _head_of(model: nn.Module) -> nn.Parameter | None:
    """The weight of the output projection, by the convention of Hugging Face's models and ours."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    return getattr(output, "weight", None)
