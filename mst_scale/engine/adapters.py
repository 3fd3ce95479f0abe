"""Finds a model's adapters (such as LoRA), which are never sparse, and the names of base weights without them.

An adapter is small and some of its weights start at zero, so its zeros are no mask; the base weights are what becomes
sparse. PEFT's layers state which of their parameters belong to the base. Other libraries use the same names.
"""

from __future__ import annotations

import re

from torch import nn

# A component of a parameter's name: loralib's and peft's, transformers' adapters, prompt encoders.
NAMES = re.compile(r"(^|\.)(lora_|ia3_|adapters?([._]|$)|adaption_prompt|prompt_encoder\.|modules_to_save\.)")
# What peft puts into the names of a model that it wraps.
WRAPPED = re.compile(r"^base_model\.model\.|\.(base_layer|original_module|token_adapter)(?=\.|$)")
# Base weights that peft does not add to: it trains a copy of them, or some of their rows.
REPLACED = re.compile(r"\.(original_module|token_adapter)\.")


def adapters_of(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that belong to adapters."""
    found = {id(p) for name, p in model.named_parameters() if NAMES.search(name)}
    for module in model.modules():
        if hasattr(module, "adapter_layer_names") and hasattr(module, "get_base_layer"):  # a layer of peft
            base: nn.Module = module.get_base_layer()  # type: ignore[operator]
            found |= {id(p) for p in module.parameters()} - {id(p) for p in base.parameters()}
    return found


def base_name(name: str) -> str:
    """Return a parameter's name in the model before peft wrapped it, which is its name after merging."""
    return WRAPPED.sub("", name)
