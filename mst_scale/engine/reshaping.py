"""Makes `engine.load_checkpoint` load checkpoints of another number of ranks (`training.reshape_on_load`).

Such a load needs the copy that `mst reshape` makes. The first rank makes it, inside the checkpoint, while the
others wait. `mst_scale.pretrain` does the same without this key.
"""

from __future__ import annotations

import functools
import inspect
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mst_scale import zero_shards
from mst_scale.checkpoints.reshape import reshape
from mst_scale.comm import Ranks, logger, new_group


def reshape_on_load(engine: Any) -> None:
    """Change `engine.load_checkpoint`."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    ranks = Ranks(dist.get_rank(), local, dist.get_world_size(), new_group("reshape", backend="gloo"))
    load = engine.load_checkpoint
    order = inspect.signature(load)

    @functools.wraps(load)
    def load_checkpoint(*args: Any, **named: Any) -> Any:
        given = order.bind(*args, **named).arguments

        def make_copy() -> None:
            found = zero_shards.checkpoint_to_reshape(engine, Path(given["load_dir"]), given.get("tag"))
            if found is not None:
                folder, why = found
                logger.info("%s: creating a copy that can be loaded", why)
                logger.info("created %s in %.1f s", folder, reshape(folder).seconds)

        # weights alone are loaded from any layout
        if not engine.load_universal_checkpoint() and not given.get("load_module_only"):
            ranks.on_first(make_copy, long=True)
        return load(*args, **named)

    engine.load_checkpoint = load_checkpoint
