"""Lists the tensors of a model by name and shape, without building it.

In the order of `named_parameters()`, which is also the order of ZeRO's flat buffers and of the masks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property

from mst_scale.config import ModelConfig, TargetsConfig

TOKEN_TYPES = 2  # of BERT
EMBEDDINGS = ("wte", "wpe", "wtt")


@dataclass(frozen=True)
class Parameter:
    name: str
    shape: tuple[int, ...]

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def is_matrix(self) -> bool:
        return len(self.shape) > 1


def parameters(model: ModelConfig) -> list[Parameter]:
    """Every parameter of a GPT or a BERT, whole."""
    return list(_parameters(model))


@cache
def _parameters(model: ModelConfig) -> tuple[Parameter, ...]:
    d, f, rows, bert = model.n_embd, model.ffw, model.padded_vocab, model.arch == "bert"

    def layer(name: str, *shape: int) -> list[Parameter]:
        bias = [Parameter(f"{name}.bias", shape[:1])] if model.bias else []
        return [Parameter(f"{name}.weight", shape), *bias]

    found = [Parameter("head_bias", (rows,))] if bert and model.bias else []
    found += [Parameter("wte.weight", (rows, d)), Parameter("wpe.weight", (model.seq_length, d))]
    if bert:
        found += [Parameter("wtt.weight", (TOKEN_TYPES, d)), *layer("ln_e", d)]
    for i in range(model.n_layer):
        block = f"blocks.{i}."
        attention = [*layer(block + "attention.qkv", 3 * d, d), *layer(block + "attention.proj", d, d)]
        mlp = [*layer(block + "mlp.up", f, d), *layer(block + "mlp.down", d, f)]
        first, second = layer(block + "ln_1", d), layer(block + "ln_2", d)
        found += [*attention, *first, *mlp, *second] if bert else [*first, *attention, *second, *mlp]
    found += [*layer("transform", d, d), *layer("ln_h", d)] if bert else layer("ln_f", d)
    if not model.tied_head:
        found.append(Parameter("lm_head.weight", (rows, d)))
    return tuple(found)


def groups(found: list[Parameter]) -> list[list[Parameter]]:
    """The optimizer's two groups: matrices (with weight decay), then vectors (without)."""
    return [[p for p in found if p.is_matrix], [p for p in found if not p.is_matrix]]


def sparse_parameters(model: ModelConfig, targets: TargetsConfig) -> list[Parameter]:
    """The parameters that may become sparse: matrices chosen by globs; an embedding only as a tied head, if asked."""
    return list(_sparse(model, tuple(targets.include), tuple(targets.exclude), targets.lm_head))


@cache
def _sparse(
    model: ModelConfig, include: tuple[str, ...], exclude: tuple[str, ...], lm_head: bool
) -> tuple[Parameter, ...]:
    head = "wte.weight" if model.tied_head else "lm_head.weight"
    candidates = {p.name: p for p in parameters(model) if p.is_matrix and not p.name.startswith(EMBEDDINGS)}
    if not lm_head:
        candidates.pop(head, None)
    elif model.tied_head:
        candidates = {p.name: p for p in parameters(model) if p.name == head} | candidates
    targets = TargetsConfig(list(include), list(exclude), lm_head)
    return tuple(candidates[name] for name in targets.choose(candidates))
