"""Turns a compact checkpoint into the dense form, from which every layout and both kinds of storage can continue.

DeepSpeed's files of a compact checkpoint hold only the values of active weights. The dense form is DeepSpeed's
universal layout (`zero_shards.universal`): one file per parameter with its whole matrix, and one per optimizer state.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from mst_scale.comm import logger
from mst_scale.errors import UserError
from mst_scale.zero_shards import compact_files, universal

PARTIAL = ".dense.partial"


def make_dense(checkpoint: Path) -> dict[str, Any]:
    """Convert a checkpoint in place; one rank does, when all have written their files.

    Returns:
        What its manifest says of the form.
    """
    draft = checkpoint.with_name(checkpoint.name + PARTIAL)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        universal.convert(checkpoint, draft)
    except UserError as error:  # no update has been made yet, so there are no optimizer states
        shutil.rmtree(draft)
        logger.warning("the checkpoint is saved with its active weights only: %s", error)
        return {}
    except RuntimeError as error:  # torch's writers report a full disk so
        shutil.rmtree(draft, ignore_errors=True)
        raise OSError(f"cannot write the dense form of {checkpoint}: {error}") from error
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    for path in checkpoint.glob("*.pt"):
        path.unlink()
    compact_files.remove(checkpoint)
    for path in draft.iterdir():
        path.rename(checkpoint / path.name)
    draft.rmdir()
    return {"universal": True}
