"""Says which commands let a checkpoint of another number of ranks, or another ZeRO stage, continue.

DeepSpeed's own loading then fails with an exception that depends on the stages: a ZeRORuntimeException, a missing file,
an empty AssertionError.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mst_scale.errors import UserError

OF_A_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_(optim|model)_states\.pt$")


@contextmanager
def explained(engine: Any, load: Callable[..., Any], args: Any, named: Any) -> Iterator[None]:
    """Raise a UserError for what `load(*args, **named)` fails with, if another layout has saved that checkpoint."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        given = inspect.signature(load).bind(*args, **named).arguments
        folder = _folder(Path(given["load_dir"]), given.get("tag"))
        why = None if folder is None else misfit(folder, int(engine.zero_optimization_stage()), _ranks(engine))
        if folder is None or why is None:
            raise
        raise UserError(
            f'{why}. Run `mst reshape {folder}`, which writes a copy that any layout can load; then add "checkpoint": '
            f'{{"load_universal": true}} to the DeepSpeed config and call engine.load_checkpoint("{folder}", '
            'tag="universal")'
        ) from error


def misfit(folder: Path, stage: int, ranks: int) -> str | None:
    """Return how the layout that saved a checkpoint differs from this one; None if its files tell no difference."""
    found = [match for path in folder.glob("*_states.pt") if (match := OF_A_RANK.search(path.name))]
    saved_ranks = 1 + max((int(match[1]) for match in found), default=0)
    kind = 3 if any(match[2] == "model" for match in found) else min(len(found), 1)
    here = 1 if stage == 2 else stage  # stages 1 and 2 write the same files
    if kind == here and (kind == 0 or saved_ranks == ranks):
        return None
    names = {0: "without ZeRO (stage 0)", 1: f"by {saved_ranks} rank(s) at ZeRO stage 1 or 2"}
    saved = names.get(kind, f"by {saved_ranks} rank(s) at ZeRO stage 3")
    return f"{folder} was saved {saved}, and here are {ranks} at stage {stage}"


def _folder(load_dir: Path, tag: Any) -> Path | None:
    """The checkpoint that a call means; None where there is none."""
    latest = load_dir / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_text().strip()
    return load_dir / str(tag) if tag is not None and (load_dir / str(tag)).is_dir() else None


def _ranks(engine: Any) -> int:
    """Ranks that ZeRO shares optimizer states over."""
    return int(engine.seq_dp_world_size)
