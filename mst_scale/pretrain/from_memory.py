"""Continues a run from the newest copy in the memory of its hosts, if no checkpoint on disk is as new.

The ranks list the parts on their hosts (`checkpoints.memory_copies`) and choose the newest copy whose parts are all
present on some host. Ranks with parts write them into the run's folder, and rank 0 seals them as a checkpoint. The run
then continues from it as from any other, also on a different number of ranks.
"""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mst_scale.checkpoints import finding, manifests, memory_copies, store
from mst_scale.checkpoints.memory_copies import PART, Copy
from mst_scale.comm import FailedElsewhere, Ranks, logger
from mst_scale.errors import Damaged
from mst_scale.files import PARTIAL, free_space
from mst_scale.pretrain import resume
from mst_scale.run_logging import run_file
from mst_scale.run_logging.run_file import DIVERGED

CONTINUED = "continued from memory"
"""The event in run.json."""


def restore(out: Path, resume_from: str, ranks: Ranks) -> dict[str, Any] | None:
    """Make a checkpoint of the newest copy in memory, on all ranks together, if it is newer than those on disk.

    Args:
        out: the folder of the run.
        resume_from: the option --resume.
        ranks: all ranks.

    Returns:
        What the event `CONTINUED` says; None if there is no such copy.

    Raises:
        OSError: if the copy cannot be written to disk. It stays in memory.
        FailedElsewhere: the same, where another rank has raised the OSError.
    """
    held = _Held(out, ranks)
    if not held.copies or ranks.on_first(lambda: resume.effective(resume_from, out)) != "auto":
        return None
    checkpoints = out / "checkpoints"
    if ranks.on_first(lambda: _is_new(out)):
        logger.info("copies in memory are not used: they belong to an earlier run in %s, which was removed", out)
        return None
    verified = ranks.on_first(lambda: run_file.verified(out / "run.json"))
    reasons = ranks.on_first(lambda: _unusable_reasons(out, held.copies, verified))
    on_disk = _newest_on_disk(checkpoints, held.copies, verified, ranks)
    for copy in sorted(held.copies, reverse=True):
        if copy.step <= on_disk:
            break
        why = reasons.get(copy)
        if why is None:
            began = time.monotonic()
            why = held.make_checkpoint(copy, checkpoints)
            if why is None:
                seconds = time.monotonic() - began
                logger.info(
                    "the run continues from memory, at step %d: the copy on its hosts was written to %s in %.1f s",
                    copy.step, checkpoints / finding.tag_of(copy.step), seconds,
                )  # fmt: skip
                return {"step": copy.step, "parts": copy.ranks, "seconds": round(seconds, 3)}
        logger.warning("the copy of step %d in memory is not used: %s", copy.step, why)
    return None


def _is_new(out: Path) -> bool:
    """Return whether a folder has nothing of a run, whatever the memory of this host still has of its path."""
    known = any((out / name).exists() for name in ("run.json", "run.json.damaged", "config.json", "metrics.jsonl"))
    return not known and not finding.list_tags(out / "checkpoints")


def _by_copy(held: Iterable[tuple[str, list[tuple[Copy, int]]]]) -> dict[Copy, dict[int, list[str]]]:
    """Return for each copy the hosts that have the part of a rank."""
    copies: dict[Copy, dict[int, list[str]]] = {}
    for host, parts in held:
        for copy, rank in parts:
            copies.setdefault(copy, {}).setdefault(rank, []).append(host)
    return copies


def _unusable_reasons(out: Path, copies: dict[Copy, dict[int, list[str]]], verified: int | None) -> dict[Copy, str]:
    """Return the copies from which the run cannot continue, and why.

    Args:
        out: the folder of the run.
        copies: for each copy, the hosts that have the part of a rank.
        verified: after silent corruption, the last step that is known to be older than it.
    """
    starts = run_file.read(out / "run.json").get("starts", [])
    diverged = bool(starts) and starts[-1].get("how") in DIVERGED
    reasons = {}
    for copy, parts in copies.items():
        missing = [rank for rank in range(copy.ranks) if rank not in parts]
        if copy.start < run_file.restarts(starts):
            reasons[copy] = "it was made before the last start of the run"
        elif starts and copy.began != starts[0].get("time"):
            reasons[copy] = "it is of another run, which was in this folder before"
        elif diverged:
            reasons[copy] = "the run diverged soon after it"
        elif verified is not None and copy.step > verified:
            reasons[copy] = f"silent corruption was found, and the last verified step is {verified}"
        elif missing:
            reasons[copy] = f"no host has the part of {'rank' if len(missing) == 1 else 'ranks'} {_list_few(missing)}"
    return reasons


def _list_few(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown}, … ({len(numbers)} in all)"


def _newest_on_disk(folder: Path, copies: Iterable[Copy], verified: int | None, ranks: Ranks) -> int:
    """Return the step of the newest checkpoint on disk, up to the verified step if there is one; -1 if there is none.

    Files are read only if it matters: whether one that is newer than a copy is undamaged.
    """
    steps = [finding.step_of(folder / tag) for tag in ranks.on_first(lambda: finding.list_tags(folder))]
    newest = max((step for step in steps if verified is None or step <= verified), default=-1)
    if newest < max((copy.step for copy in copies if verified is None or copy.step <= verified), default=-1):
        return newest
    sound = finding.newest(folder, ranks, before=newest + 1)
    return -1 if sound is None else finding.step_of(folder / sound)


class HostMemory:
    """The folder in this host's memory that belongs to a run, and the host of each rank.

    Args:
        out: the folder of the run.
        ranks: all ranks, which create this together.
    """

    def __init__(self, out: Path, ranks: Ranks):
        self._ranks = ranks
        self._folder = memory_copies.folder_of(out)
        self._hosts: list[str] = ranks.all(memory_copies.host_name())

    @property
    def is_first_of_host(self) -> bool:
        """Whether no rank before this one is on its host."""
        return self._hosts.index(self._hosts[self._ranks.rank]) == self._ranks.rank


class _Held(HostMemory):
    """The parts of copies that the hosts of this start have.

    Attributes:
        copies: for each copy, the hosts that have the part of a rank.
    """

    def __init__(self, out: Path, ranks: Ranks):
        super().__init__(out, ranks)
        mine = memory_copies.list_parts(self._folder) if self.is_first_of_host else []
        self.copies = _by_copy(zip(self._hosts, ranks.all(mine), strict=True))

    def make_checkpoint(self, copy: Copy, checkpoints: Path) -> str | None:
        """Write the parts of a copy into a draft and seal it, on all ranks together; return why parts are unusable.

        Raises:
            OSError: if the disk cannot take them.
            FailedElsewhere: the same, where another rank has raised the OSError.
        """
        final = checkpoints / finding.tag_of(copy.step)
        draft = final.with_name(f"{final.name}.{copy.name}{PARTIAL}")

        def begin() -> None:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)

        try:
            self._ranks.on_first(begin)
            head, files = self._collect(copy, draft)
            self._ranks.on_first(lambda: _seal(draft, final, head, files), long=True)
        except (OSError, Damaged, FailedElsewhere) as error:
            self._ranks.on_first(lambda: shutil.rmtree(draft, ignore_errors=True))
            if isinstance(error, FailedElsewhere):
                raise
            if isinstance(error, Damaged):
                return str(error)
            raise OSError(
                f"the copy of step {copy.step} in memory cannot be written to {checkpoints} "
                f"({free_space(checkpoints)}): {error}. It stays in memory: make room, and start the run again"
            ) from error
        return None

    def _collect(self, copy: Copy, draft: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """Let each part be written by a rank whose host has it, or if it is damaged there, by one of another host.

        Returns:
            The manifest of a part, and the digests of all files.

        Raises:
            Damaged: on all ranks, if a part cannot be had from any host.
            OSError: on one rank, if it cannot be written; FailedElsewhere on the others.
        """
        parts = self.copies[copy]
        head: dict[str, Any] = {}
        files: dict[str, Any] = {}
        errors: dict[int, str] = {}
        left = set(range(copy.ranks))
        for attempt in range(max(map(len, parts.values()))):
            mine = [rank for rank in left if self._reader(rank, parts[rank][attempt:]) == self._ranks.rank]
            own = self._ranks.agree(functools.partial(self._put_all_back, copy, mine, draft))
            for written in self._ranks.all(own):
                for rank, found in written.items():
                    if isinstance(found, str):
                        errors[rank] = found
                    else:
                        head, left = found[0], left - {rank}
                        files |= found[1]
        if left:
            raise Damaged("; ".join(errors[rank] for rank in sorted(left)[:3]))
        return head, files

    def _reader(self, part: int, hosts: list[str]) -> int | None:
        """Return the rank that writes a part: one of the first of these hosts, whose ranks take turns."""
        there = [rank for rank, host in enumerate(self._hosts) if host in hosts[:1]]
        return there[part % len(there)] if there else None

    def _put_all_back(self, copy: Copy, mine: list[int], draft: Path) -> dict[int, Any]:
        return {rank: self._put_back(copy, rank, draft) for rank in mine}

    def _put_back(self, copy: Copy, rank: int, draft: Path) -> tuple[dict[str, Any], dict[str, Any]] | str:
        part = memory_copies.part_folder(self._folder, finding.tag_of(copy.step), rank)
        try:
            head, digests = memory_copies.put_back(part, draft)
        except Damaged as error:
            return str(error)
        return {key: value for key, value in head.items() if key != "files"}, digests


def _seal(draft: Path, final: Path, head: dict[str, Any], files: dict[str, Any]) -> None:
    about, more = {key: value for key, value in head.items() if key != PART}, {}
    if head[PART]["dense"]:
        from mst_scale.checkpoints.reshape import make_dense  # imports DeepSpeed

        more = make_dense(draft)
        files = manifests.digests_of(draft, manifests.files_in(draft))
    store.seal_files(draft, final, {**about, **more, "files": files})
