"""Finds the adapters of a model (LoRA and its like), which are never sparse, and names of base weights without them.

An adapter is small and starts at zero in a part, so that its zeros say nothing, and what is to be sparse is the base
under it. peft's layers say which of their parameters belong to the base. Other libraries follow the same names.
"""

from __future__ import annotations

import re

from torch import nn

# A component of a parameter's name: loralib's and peft's, transformers' adapters, prompt encoders.
NAMES = re.compile(r"(^|\.)(lora_|ia3_|adapters?([._]|$)|adaption_prompt|prompt_encoder\.|modules_to_save\.)")
# What peft puts into the names of a model that it wraps.
WRAPPED = re.compile(r"^base_model\.model\.|\.base_layer(?=\.|$)|\.original_module(?=\.|$)")


def adapters_of(model: nn.Module) -> set[int]:
    """Ids of the parameters that belong to adapters."""
    found = {id(p) for name, p in model.named_parameters() if NAMES.search(name)}
    for module in model.modules():
        if hasattr(module, "adapter_layer_names") and hasattr(module, "get_base_layer"):  # a layer of peft
            base: nn.Module = module.get_base_layer()  # type: ignore[operator]
            found |= {id(p) for p in module.parameters()} - {id(p) for p in base.parameters()}
    return found


def base_name(name: str) -> str:
    """Return a parameter's name in the model before peft wrapped it, which is its name after merging."""
    return WRAPPED.sub("", name)
