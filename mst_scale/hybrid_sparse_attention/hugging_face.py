"""Adds sparse attention to models of transformers.

It uses transformers' attention interface: a function registered under a name, which a model's attention layers look up
at every call. `attach` registers our function, switches the model to it and gives each layer the attributes
`mst_pattern` and `mst_backend`, which `set_pattern` assigns between steps as it does for our own layers.

    no mask, whole sequences     the kernels of `attention`: only the pattern's pairs are computed
    padding or a cache           torch's attention with (their mask ∧ the pattern): exact, at the cost of dense

If DeepSpeed's UlyssesSPAttentionHF splits sequences over ranks, the pattern applies to whole sequences, provided that
it wraps our function:

    attach(model, pattern)
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, core_attn_implementation="mst_scale", …)

GPT-2 and Llama-style models are tested, the latter with split sequences too. Models for which the result would be wrong
are not attached, and `attach` returns the reason.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mst_scale.errors import UserError
from mst_scale.hybrid_sparse_attention.dispatch import attention
from mst_scale.hybrid_sparse_attention.module import SelfAttention
from mst_scale.hybrid_sparse_attention.pattern import Pattern

NAME = "mst_scale"
# Arguments with which a layer requests more than softmax(q·k) v; None and 0 request nothing.
UNKNOWN = ("sliding_window", "softcap", "s_aux", "position_bias", "cache")
log = logging.getLogger("mst_scale")


def attach(model: nn.Module, pattern: Pattern, backend: str = "auto") -> str | None:
    """Make every attention layer of the transformers models in `model` (itself or parts of it) follow `pattern`.

    Args:
        model: a model of transformers, or a module that contains some.
        pattern: which pairs of tokens attend to each other.
        backend: as `mst.attention.backend`; "auto" selects the fastest one that can run.

    Returns:
        Why some of them stay dense, or None.
    """
    found = list(_of_transformers(model))
    if not found and not any(isinstance(module, SelfAttention) for module in model.modules()):
        return "the model has neither SelfAttention layers of mst_scale nor a transformers attention interface"
    reasons = [_attach(part, pattern, backend) for part in found]
    return next((reason for reason in reasons if reason), None)


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is a layer that uses transformers' attention interface."""
    return hasattr(module, "is_causal") and "Attention" in type(module).__name__


def _of_transformers(module: nn.Module) -> Iterator[Any]:
    """Return the outermost transformers models in a module."""
    if hasattr(module, "set_attn_implementation") and hasattr(module, "config"):
        yield module
        return
    for child in module.children():
        yield from _of_transformers(child)


def _attach(model: Any, pattern: Pattern, backend: str) -> str | None:
    config = model.config
    # of a model that also reads images, for example, a part of its config
    text = getattr(config, "get_text_config", lambda: config)()
    if reason := unsupported_reason(config) or unsupported_reason(text):
        return reason
    if config._attn_implementation != NAME and _split_by_deepspeed(config._attn_implementation):
        return (
            f"DeepSpeed's UlyssesSPAttentionHF has already wrapped {config._attn_implementation!r}: call attach before "
            f"register_with_transformers(…, core_attn_implementation={NAME!r})"
        )
    layers: list[Any] = [
        m for m in model.modules() if is_attention(m) and type(getattr(m, "config", text)) is type(text)
    ]
    if not layers:
        return f"{type(model).__name__} has no attention layers that use transformers' attention interface"
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        return f"this version of transformers has no attention interface ({error})"
    AttentionInterface.register(NAME, hugging_face_attention)
    AttentionMaskInterface.register(NAME, _hugging_face_mask)
    model.set_attn_implementation(NAME)
    if config._attn_implementation != NAME:
        return f"{type(model).__name__} does not use transformers' attention interface"
    for layer in layers:
        layer.mst_pattern, layer.mst_backend = pattern, backend
    return None


def _split_by_deepspeed(name: str) -> bool:
    """Return whether the attention of this name gathers sequences that are split over ranks."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return getattr(ALL_ATTENTION_FUNCTIONS.get(name), "__module__", "").startswith("deepspeed.")


def unsupported_reason(config: Any) -> str | None:
    """Return why a model with this config of transformers cannot have our attention; None if it can."""
    name = type(config).__name__
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        return f"{name} has cross-attention, for which the pattern is not defined"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return f"{name} has its own sliding window"
    if getattr(config, "attn_logit_softcapping", None):
        return f"{name} caps attention scores, which our kernels do not support"
    if getattr(config, "reorder_and_upcast_attn", False):
        return f"{name} upcasts attention (reorder_and_upcast_attn), which our kernels do not support"
    head = getattr(config, "qk_nope_head_dim", None)
    if head is not None and head + config.qk_rope_head_dim != getattr(config, "v_head_dim", None):
        return f"{name} has values of another size than keys, which our kernels do not support"
    for key in ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob"):
        if getattr(config, key, 0.0):
            return (
                f"{name} has {key} = {getattr(config, key)}, and sparse attention does not support dropout: pass "
                f"{key}=0.0 to {name} or from_pretrained"
            )
    return None


def hugging_face_attention(  # noqa: PLR0917  (transformers' signature)
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention with the signature of transformers' attention interface.

    `query` is (batch, heads, length, head_dim), `key` and `value` have as many heads or fewer; the result is (batch,
    length, heads, …).
    """
    for name in UNKNOWN:
        given = others.get(name)
        if torch.is_tensor(given) or given:
            raise UserError(f"{type(module).__name__} uses {name}, which sparse attention does not support")
    if not query.shape[1]:  # there are more ranks than heads
        return (query + key + value).transpose(1, 2), None
    pattern: Pattern = getattr(module, "mst_pattern", Pattern("dense"))
    if attention_mask is None and _split_by_deepspeed(NAME):
        _check_not_packed(module, others.get("position_ids"))
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    if attention_mask is None and query.shape[-2] == key.shape[-2]:
        backend = getattr(module, "mst_backend", "auto")
        out = attention(query, key, value, pattern, causal, backend, dropout=dropout, scale=scaling)
    else:
        if pattern.kind != "dense":
            _log_masked(type(module).__name__)
        out = _masked(query, key, value, attention_mask, pattern, causal, dropout, scaling)
    return out.transpose(1, 2), None


def _check_not_packed(module: nn.Module, positions: torch.Tensor | None) -> None:
    """Check that sequences are not packed: DeepSpeed has dropped the mask that separates packed texts."""
    if positions is not None and bool((positions.diff(dim=-1) != 1).any()):
        raise UserError(
            f"{type(module).__name__}: position_ids restart within a sequence (packed texts), and sparse attention on "
            "split sequences cannot separate such texts: use one text per sequence"
        )


def _hugging_face_mask(*, kv_length: int, **others: Any) -> torch.Tensor | None:
    """Return None if the mask is only causal; with a cache there always is a mask, from which positions follow."""
    from transformers.masking_utils import sdpa_mask

    # before transformers 5 this is called with the positions of the queries, not with their number
    queries = others["q_length"] if "q_length" in others else len(others["cache_position"])
    skip = others.pop("allow_is_causal_skip", True) and queries == kv_length
    return sdpa_mask(kv_length=kv_length, allow_is_causal_skip=skip, **others)


def _masked(  # noqa: PLR0917
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    pattern: Pattern,
    causal: bool,
    dropout: float,
    scale: float | None,
) -> torch.Tensor:
    """Compute dense attention with both masks."""
    total = k.shape[-2]
    query = _queries(q.shape[-2], total, mask if causal else None, q.device)[:, None]
    key = torch.arange(total, device=q.device)
    if mask is not None and pattern.kind == "fixed":  # blocks begin with a query's text, not with what is before it
        start = _visible(mask, total).int().argmax(-1, keepdim=True)
        query, key = query - start, key - start
    seen = pattern.allows(query, key, causal)
    if mask is None:
        both = seen
    elif mask.dtype == torch.bool:
        both = mask[..., :total] & seen
    else:
        both = mask[..., :total].masked_fill(~seen, -torch.inf)
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=both, dropout_p=dropout, scale=scale)


def _queries(length: int, total: int, mask: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Return the positions of the queries among the keys: the last ones, unless a static cache has more slots.

    In that case they follow from the causal mask: the last key that a query sees is its own (padded queries may see
    fewer keys, never more).
    """
    row = torch.arange(length, device=device)
    if mask is None or length == total:
        return row + (total - length)
    keys = torch.where(_visible(mask, total), torch.arange(total, device=device), 0)
    last = keys.amax(-1)  # (batch, heads or 1, length)
    return row + (last - row).amax()


def _visible(mask: torch.Tensor, total: int) -> torch.Tensor:
    """Return which keys each query sees, by a mask of transformers."""
    mask = mask[..., :total]
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


@functools.cache  # once per kind of layer and process
def _log_masked(layer: str) -> None:
    log.info("attention of %s has a padding mask or a cache, so every pair is computed and then masked", layer)
