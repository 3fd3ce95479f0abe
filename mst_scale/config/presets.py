"""Lists what can be chosen by name: model shapes and recipes in a config, and the files shipped with the package.

`gpt2_small` is ds_configs/gpt2_small.json, in a clone and in an installed wheel.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mst_scale.errors import nearest

PACKAGE = Path(__file__).parents[1]  # mst_scale
_BERT = {"arch": "bert", "seq_length": 512, "vocab_size": 30522, "bias": True}

# GPT-2 (Radford et al. 2019) and GPT-3 (Brown et al. 2020, table 2.1; 13B with the usual 5120 = 40 · 128); BERT (Devlin
# et al. 2018) with the vocabulary of `bert-base-uncased`.
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
    "gpt3-1.3b": {"n_layer": 24, "n_head": 16, "n_embd": 2048, "seq_length": 2048},
    "gpt3-2.7b": {"n_layer": 32, "n_head": 32, "n_embd": 2560, "seq_length": 2048},
    "gpt3-6.7b": {"n_layer": 32, "n_head": 32, "n_embd": 4096, "seq_length": 2048},
    "gpt3-13b": {"n_layer": 40, "n_head": 40, "n_embd": 5120, "seq_length": 2048},
    "gpt3-175b": {"n_layer": 96, "n_head": 96, "n_embd": 12288, "seq_length": 2048},
    "bert-base": {"n_layer": 12, "n_head": 12, "n_embd": 768, **_BERT},
    "bert-large": {"n_layer": 24, "n_head": 16, "n_embd": 1024, **_BERT},
    "tiny": {"n_layer": 6, "n_head": 12, "n_embd": 384},  # the paper's small dense model, also available as a method
}

# Recipes set several blocks. "paper" is `mst` with the paper's learning rate; in "mst-wsd" the rate stays high almost
# until the weights are dense again. "mst-best" and "mst-lean" gained most in our studies (docs/does-it-work.md):
# "mst-best" ends with dense attention, while "mst-lean" always has sparse attention, and sparse weights almost
# throughout.
# "mst-channels" is "mst-lean" with whole channels, which saves time on any device. "mst-small" ends sparse, for models
# whose inference cost matters: 80 % from the first step to the last, with dense attention.
#
# The sparse phase of "mst-best" ends after at most 20 tokens per parameter. After sparse phases of 17 to 24 tokens per
# parameter, its runs were better than dense training of all sizes at 0.12 and 0.22 M parameters, with whole intervals
# above 1 (runs of 20, 25 and 28). After 28 at 0.26 M that is not established, and after 86 at 0.17 M dense training was
# better (benchmarks/studies/gain-law.md, causal FLOPs). Runs of up to 23 tokens per parameter do not reach the limit.
SPARSE_TOKENS = 20.0
_LONG_ULTRA = {"max": 0.8, "warmup": 0, "ultra": 0.928571, "restore": 0.035714}
_SEEDED = {"random_ratio": 1.0, "grown_moments": "active_mean"}
_LONG_DECAY = {"lr_schedule": "wsd", "decay": 0.4}
RECIPES: dict[str, dict[str, Any]] = {
    "paper": {"mst": {"method": "mst"}, "training": {"lr_schedule": "cosine"}},
    "mst-wsd": {"mst": {"method": "mst"}, "training": {"lr_schedule": "wsd"}},
    "mst-best": {
        "mst": {
            "method": "mst",
            "sparsity": {"max": 0.8, "sparse_tokens": SPARSE_TOKENS},
            "topology": _SEEDED,
            "attention": {"stride": 0.25},
        },
        "training": _LONG_DECAY,
    },
    "mst-lean": {
        "mst": {
            "method": "mst",
            "sparsity": _LONG_ULTRA,
            "topology": _SEEDED,
            "attention": {"stride": 0.25, "dense_from": 1.0},
        },
        "training": _LONG_DECAY,
    },
    "mst-small": {
        "mst": {
            "method": "mst",
            "sparsity": {"max": 0.8, "variation": "sparse"},
            "topology": _SEEDED,
            "attention": {"pattern": "dense"},
            "compute": {"compact": "auto"},
        },
        "training": _LONG_DECAY,
    },
    "mst-channels": {
        "mst": {
            "method": "mst",
            "sparsity": {**_LONG_ULTRA, "distribution": "uniform"},
            "topology": {"policy": "static", "granularity": "channel", **_SEEDED},
            "targets": {"lm_head": False},
            "attention": {"stride": 0.25, "dense_from": 1.0},
        },
        "training": _LONG_DECAY,
    },
}


def shipped_folder(name: str) -> Path:
    """Return the path of a shipped folder: inside the package in a wheel, next to it in a clone."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


def ready_configs() -> dict[str, Path]:
    """Return the files of the ready-made configs by name."""
    files = sorted(shipped_folder("ds_configs").glob("*.json"))
    return {path.stem: path for path in files if path.suffixes != [".schema", ".json"]}


def config_file(name: str | Path) -> Path:
    """Return the file of a config, which may not exist."""
    return Path(name) if os.path.isfile(name) else ready_configs().get(str(name), Path(name))


def describe_missing(name: str | Path) -> str:
    """Return the error message for a name that is neither a file nor a ready-made config."""
    ready = list(ready_configs())
    near, names = nearest(Path(name).name.removesuffix(".json"), ready), ", ".join(ready)
    choice = f"the nearest ready-made config is {near!r} (of {names})" if near else f"ready-made are {names}"
    return f"{Path(name)}: no such config file; {choice}"
