"""A run on disk that nothing has trained: a sparse GPT whose tokenizer is `byte`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mst_scale.checkpoints import manifests
from mst_scale.files import file_digest
from mst_scale.models import GPT
from tests.support.saved_model import save
from tests.support.sparse_gpt import sparse_gpt

BYTES: dict[str, Any] = {"vocab_size": 257, "vocab_multiple": 64}


def text_run(folder: Path, sparsity: float = 0.8, blocks: dict[str, Any] | None = None, **shape: Any) -> GPT:
    model = sparse_gpt(sparsity, **{**BYTES, **shape})
    seal(save(model, model.config, folder))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "data": {"tokenizer": "byte"}, **(blocks or {})}))
    return model


def seal(saved: Path) -> None:
    """Write the manifest without which a run's folder does not count as one."""
    files = [path for path in saved.rglob("*") if path.is_file()]
    digests = {
        str(path.relative_to(saved)): {"bytes": path.stat().st_size, "sha256": file_digest(path)} for path in files
    }
    (saved / manifests.MANIFEST).write_text(manifests.sealed({"tag": saved.name, "step": 1, "files": digests}))
