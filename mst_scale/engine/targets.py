"""Chooses the parameters of a model that become sparse, by `mst.targets`."""

from __future__ import annotations

import re

from torch import nn

from mst_scale.comm import logger
from mst_scale.config import TargetsConfig
from mst_scale.engine.adapters import adapters_of
from mst_scale.errors import UserError
from mst_scale.sparse_linear.guarded import parameter_of
from mst_scale.zero_shards import TABLES, named_parameters, shape_of, stages_of

BIAS = re.compile(r"(^|[._])bias(_table)?$")
BARE = re.compile(r"embed|pos_emb|norm", re.IGNORECASE)  # in a parameter's path: of one that no layer multiplies by


def choose_targets(model: nn.Module, targets: TargetsConfig, frozen: bool = False) -> dict[str, nn.Parameter]:
    """Return the matrices whose name matches an `include` glob and no `exclude` glob, in parameter order.

    Vectors (also those of shape (1, n) or (n, 1, 1)), biases, norms, embeddings and adapters are never included. They
    are recognized by their modules; a parameter that is not a layer's weight, by its name. The head is included if
    `lm_head` is set, even if it is the token embedding. `frozen` includes matrices that are not trained, whose masks
    are given. Of a pipeline's stage, these are its matrices among those of the whole model: a model that does not say
    what that is (`whole_model`) joins the names of all stages (collective), so that all of them raise the same error.
    """
    if (whole_model := getattr(model, "whole_model", None)) is not None:
        chosen = choose_targets(whole_model(), targets, frozen)
        return {name: p for name, p in named_parameters(model) if name in chosen}
    head = head_of(model)
    if not hasattr(model, "get_output_embeddings") and not targets.lm_head:
        logger.info(
            "mst.targets.lm_head has no effect: the model does not define get_output_embeddings(). "
            "Exclude the head by name in mst.targets.exclude"
        )
    tables = [m for m in model.modules() if isinstance(m, TABLES)]
    embeddings = {id(p) for m in tables for p in m.parameters(recurse=False)}
    norms = {id(p) for m in model.modules() if "norm" in type(m).__name__.lower() for p in m.parameters(recurse=False)}
    layers = {id(p) for m in model.modules() for n, p in m.named_parameters(recurse=False) if n == "weight"}
    adapters = adapters_of(model)
    all_matrices = {
        name: p
        for name, p in named_parameters(model)  # a tied tensor is listed once
        if sum(side > 1 for side in shape_of(p)) > 1 and id(p) not in norms | adapters
        if not BIAS.search(name) and (id(p) in layers or not BARE.search(name))
        if (targets.lm_head if p is head else id(p) not in embeddings)
    }
    trained = stages_of(model).joined({name: p.requires_grad for name, p in all_matrices.items()})
    names = [name for name, is_trained in trained.items() if is_trained or frozen]
    if trained and not names:
        raise UserError(
            f"all {len(trained)} matrices that could be sparse are frozen (adapters are never sparse): use method "
            "fixed, which keeps the zeros of frozen weights, or unfreeze the weights"
        )
    if adapters:
        logger.info("%d parameters belong to adapters, which are never sparse", len(adapters))
    return {name: all_matrices[name] for name in targets.choose(names) if name in all_matrices}


def is_read_by_fused_layer(model: nn.Module, parameter: nn.Parameter) -> bool:
    """Return whether a layer of torch passes a parameter of its layers to a kernel of its own, in evaluation."""
    fused = [m for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer | nn.MultiheadAttention)]
    return any(p is parameter for module in fused for p in module.parameters())


def head_of(model: nn.Module) -> nn.Parameter | None:
    """Return the weight of the output projection, by the convention of Hugging Face's models and ours."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    return parameter_of(getattr(output, "weight", None))
