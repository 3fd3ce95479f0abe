"""mst_scale: GPT pretraining at a quarter of the FLOPs, as a DeepSpeed extension.

    engine, optimizer, loader, lr_scheduler = mst_scale.initialize(model=…, model_parameters=…, config=…)

takes the arguments of `deepspeed.initialize` and returns its results; `mst_scale.warm_start(engine, CHECKPOINT)` then
continues from weights and masks, without optimizer states.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mst_scale import _deprecated
from mst_scale.integrations.on_import import when_imported

if TYPE_CHECKING:
    from mst_scale.checkpoints.warm_start import warm_start
    from mst_scale.engine.api import initialize
    from mst_scale.engine.changed_weights import load_weights
    from mst_scale.engine.types import MST, Engine
    from mst_scale.generation.generate import generate
    from mst_scale.hugging_face.merge_adapters import merge_adapters
    from mst_scale.integrations.integrate import integrate
    from mst_scale.integrations.recording import record

__version__ = "0.2.0"
__all__ = [
    "MST",
    "Engine",
    "generate",
    "initialize",
    "integrate",
    "load_weights",
    "merge_adapters",
    "record",
    "warm_start",
]

_deprecated.install()
when_imported("deepspeed", lambda found: importlib.import_module("mst_scale.comm.ranks").install_rendezvous(found))

_WHERE = {
    "MST": "engine.types",
    "Engine": "engine.types",
    "generate": "generation.generate",
    "initialize": "engine.api",
    "integrate": "integrations.integrate",
    "load_weights": "engine.changed_weights",
    "merge_adapters": "hugging_face.merge_adapters",
    "record": "integrations.recording",
    "warm_start": "checkpoints.warm_start",
}


def __getattr__(name: str) -> Any:
    # DeepSpeed is only imported when it is needed: the command line and the attention kernels work without it.
    if name in _WHERE:
        return getattr(importlib.import_module(f"mst_scale.{_WHERE[name]}"), name)
    if f"mst_scale.{name}" in _deprecated.MOVED:
        return importlib.import_module(f"mst_scale.{name}")
    raise AttributeError(f"module 'mst_scale' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
