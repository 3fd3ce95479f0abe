"""Reads and appends the records of finished runs: NAME.runs.jsonl.gz, one JSON object per line, kept in the repository.

Records outlive the folders of their runs. The last record of a digest counts, because a run that failed is tried again.
A study also reads the records of the other studies, as several studies may share a run. `NAME.runs.jsonl`, the
uncompressed form of earlier versions, is still read; the next record of that study replaces it by the compressed form.
"""

from __future__ import annotations

import fcntl
import gzip
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mst_scale.data.corpus import identity
from mst_scale.errors import UserError
from mst_scale.files import write_atomically
from mst_scale.run_logging import metrics, run_file

from .plan import Job

Row = dict[str, Any]
FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"
KEPT = ("val_loss", "tokens", "flops", "flops_dense", "flops_causal", "flops_dense_causal")


def path_of(name: str, folder: Path) -> Path:
    """The file with the records of a study."""
    return folder / f"{name}.runs.jsonl.gz"


def rows_in(path: Path) -> list[Row]:
    """Every record in the file of `path_of` (and of its old form), in the order in which the runs ended."""
    return [json.loads(line) for line in _lines(path)]


def _lines(path: Path) -> Iterator[str]:
    old = path.with_suffix("")
    for line in old.read_text().splitlines() if old.is_file() else ():
        try:
            json.loads(line)
        except ValueError:  # cut off when the writer was killed: that run counts as not recorded
            continue
        yield line
    if path.is_file():
        yield from gzip.decompress(path.read_bytes()).decode().splitlines()


def append(path: Path, row: Row) -> None:
    """Add a record, which is on the disk when this returns.

    The file is replaced as a whole, so a kill leaves either the old or the new one. Equal records give equal bytes:
    the header holds no time and no name.
    """
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # another queue may be adding to the same study
        content = io.BytesIO()
        with gzip.GzipFile(filename="", mode="wb", fileobj=content, mtime=0) as file:
            file.write("".join(f"{line}\n" for line in (*_lines(path), json.dumps(row))).encode())
        write_atomically(path, content.getvalue())
        path.with_suffix("").unlink(missing_ok=True)
        os.fsync(folder)
    finally:
        os.close(folder)


def latest(path: Path) -> dict[str, Row]:
    """The last record of each digest in one study's file."""
    return _latest(rows_in(path))


def known(folder: Path) -> dict[str, Row]:
    """The last record of each digest, over all studies."""
    paths = {path_of(path.name.partition(".runs.jsonl")[0], folder) for path in folder.glob("*.runs.jsonl*")}
    return _latest([row for path in sorted(paths) for row in rows_in(path)])


def _latest(rows: list[Row]) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for row in rows:
        if row["status"] == FAILED and found.get(row["digest"], row)["status"] != FAILED:
            continue
        found[row["digest"]] = row
    return found


def of_run(found: Job, folder: Path, corpus: str, seconds: float, steps_run: int) -> Row | None:
    """The record of a finished run, read from its folder; None if it has not finished."""
    run = run_file.read(folder / "run.json")
    last_start = (run.get("starts") or [{}])[-1]
    rows = list(metrics.read(folder / "metrics.jsonl")) if (folder / "metrics.jsonl").exists() else []
    if last_start.get("how") != "finished" or not rows or rows[-1].get("val_loss") is None:
        return None
    if rows[-1]["step"] != found.steps:
        return None
    last = rows[-1]
    git = last_start.get("git") or {}
    return {
        **about(found, FINISHED),
        **{key: last[key] for key in last if key in KEPT or key.startswith("flops_")},
        "flops_topology": found.topology_flops,
        "curve": [[row["step"], round(row["val_loss"], 5)] for row in rows if row.get("val_loss") is not None],
        "seconds": round(max(seconds, last["seconds"]), 1),  # the run's own time where it outlived a killed queue
        "steps_run": steps_run,
        "commit": git.get("commit"),
        "versions": {name: last_start.get("versions", {}).get(name) for name in ("python", "torch", "deepspeed")},
        "corpus": corpus,
    }


def about(found: Job, status: str, **more: Any) -> Row:
    """What a record says of its run before anything is known of its result."""
    cell = found.cell
    return {
        "digest": found.digest, "status": status, "size": cell.size, "budget": cell.budget, "variant": cell.variant,
        "share": cell.share, "rate": found.rate, "seed": found.seed, "steps": found.steps,
        "weights": found.experiment.model.weights, "updates": found.updates, "method": found.experiment.mst.method,
        **more,
    }  # fmt: skip


def corpus_of(folder: Path) -> str:
    """The digest of a corpus; only runs of one corpus may be compared.

    Raises:
        UserError: if there is no corpus in the folder.
    """
    found = identity(folder)
    if found is None:
        raise UserError(f"there is no corpus in {folder}: python -m mst_scale.benchmarks.studies.corpus --out {folder}")
    return found
