"""Chooses the number of ranks, or of nodes, at each start of a run whose number may change (`--elastic MIN:MAX`).

The largest allowed number is taken: within MIN:MAX, of those that are available now, and with which the replicas of the
model share the global batch evenly (`pretrain/elastic.py`).
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mst_scale.config import Experiment
from mst_scale.config.parallel import sizes_of
from mst_scale.errors import UserError
from mst_scale.launch.command_line import read_run
from mst_scale.launch.restarts import CORRUPTED, healthy_seconds
from mst_scale.launch.supervisor import Reports, Supervisor, print_message
from mst_scale.pretrain.elastic import batch_of, can_train, check_elastic

FLAG = "--elastic"  # of mst_scale.pretrain too
RESIZED = "MST_RESIZED"  # the variable that counts the changes of the number of ranks
NOT_A_CHANGE = (2, 3, 126, 127)  # exit codes of starts that would end like this on any number of ranks
TWICE = 2  # failures of one rank in a row after which its place is left out


@dataclass(frozen=True)
class Allowed:
    """The numbers that `--elastic` allows, in ascending order."""

    what: str
    """The unit of the numbers: "ranks" or "nodes"."""
    least: int
    most: int
    numbers: tuple[int, ...]

    def largest(self, available: int) -> int | None:
        """Return the largest allowed number, at most `available`; None if there is none."""
        return max((number for number in self.numbers if number <= available), default=None)


def allowed(text: str, experiment: Experiment, ranks_per_node: int | None = None) -> Allowed:
    """Return the numbers with which a run can be trained.

    Args:
        text: The value of the option, "MIN:MAX".
        experiment: What is trained.
        ranks_per_node: The number of ranks per node, if the option counts nodes and not ranks.

    Raises:
        UserError: if the value is not a range, or no number in it can train the run.
    """
    least, most = _range(text)
    check_elastic(experiment.deepspeed)
    each = ranks_per_node or 1
    # each rank, or group of ranks that share the model, has at least one sequence
    possible = batch_of(experiment.deepspeed) * sizes_of(experiment.deepspeed).model // each
    numbers = tuple(n for n in range(least, min(most, possible) + 1) if can_train(n * each, experiment.deepspeed))
    what = "ranks" if ranks_per_node is None else "nodes"
    if not numbers:
        sizes = sizes_of(experiment.deepspeed)
        groups = f" in groups of {sizes.model} ranks ({sizes.describe()})" if sizes.model > 1 else ""
        raise UserError(
            f"{FLAG} {text}: no number of {what}{groups} in this range shares a global batch of "
            f"{batch_of(experiment.deepspeed)} sequences evenly: choose another range, or another train_batch_size"
        )
    return Allowed(what, least, most, numbers)


def _range(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    least, most = map(int, found.groups()) if found else (0, 0)
    if least < 1:
        raise UserError(f"{FLAG} {text}: write MIN:MAX, two numbers from 1, such as 1:4")
    if least > most:
        raise UserError(f"{FLAG} {text}: MIN is larger than MAX: write {most}:{least}")
    return least, most


@dataclass
class Places:
    """The places for ranks on this machine: GPUs, or just numbers on the CPU.

    A place whose rank fails in two starts in a row is left out, until all places fail or the user asks for another
    number of ranks. How many are wanted is read from a file, which may change at any time.
    """

    allowed: Allowed
    file: Path
    """The file in which the user writes how many ranks there shall be; without it, as many as possible."""
    kind: str
    """What a place is, for messages."""
    names: Callable[[], list[str]]
    """Returns the names of all places there are now, in the order in which ranks take them."""
    left_out: list[str] = field(default_factory=list)
    changing: bool = False
    """Whether the ranks were asked to end because their number is to change."""
    _suspect: str | None = None  # the place that has failed in the last start
    _wanted: int | None = None
    _said: str | None = None

    def take(self) -> list[str]:
        """Return the places of the next start.

        Raises:
            UserError: if there are fewer places than any allowed number needs.
        """
        self.changing = False
        names = self.names()
        left = [name for name in names if name not in self.left_out]
        if self.left_out and self.allowed.largest(len(left)) is None:
            print_message(f"without {self.kind} {', '.join(self.left_out)} there are too few: all are tried again")
            self.left_out.clear()
            left = names
        self._wanted = self._read(self._wanted)
        available = len(left) if self._wanted is None else min(len(left), max(self._wanted, self.allowed.numbers[0]))
        number = self.allowed.largest(available)
        if number is None:
            raise UserError(
                f"{FLAG} {self.allowed.least}:{self.allowed.most}: only {available} ranks can run here, but at "
                f"least {self.allowed.numbers[0]} are needed"
            )
        if number < min(available, self.allowed.most):
            self._say_once(
                f"{number} of {available} available ranks are used, because more cannot share the global batch"
            )
        return left[:number]

    def changed(self, used: int) -> bool:
        """Return whether the file now asks for a different number of ranks than is used."""
        wanted = self._read(self._wanted)
        if wanted == self._wanted:
            return False
        self._wanted, self._suspect = wanted, None
        self.left_out.clear()
        try:
            number = len(self.take())
        except UserError as error:  # GPUs are missing now: the ranks train on, and their next start says so
            self._say_once(f"the number of ranks does not change: {error}")
            return False
        if number != used:
            print_message(f"the number of ranks changes from {used} to {number}: the run saves and continues")
            self.changing = True
        return self.changing

    def failed(self, ranks: Sequence[int], used: Sequence[str], soon: bool = True) -> None:
        """Take note of a start that has failed, and leave a place out that has failed twice in a row.

        Args:
            ranks: The ranks that have failed by themselves, as far as it is known.
            used: The places of the start.
            soon: Whether it may have the same cause as the failure before: it came early, or a rank had wrong values.
        """
        place = used[ranks[0]] if len(set(ranks)) == 1 and ranks[0] < len(used) else None
        if soon and place is not None and place == self._suspect:
            self.left_out.append(place)
            print_message(f"{self.kind} {place} has failed {TWICE} times in a row: the run continues without it")
            place = None
        self._suspect = place

    def _read(self, before: int | None) -> int | None:
        try:
            text = self.file.read_text(errors="replace").strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._say_once(f"{self.file} cannot be read ({error}), so the number of ranks does not change")
            return before
        if not text:
            return before  # it is being written
        if not re.fullmatch("[0-9]{1,9}", text):
            self._say_once(f"{self.file} contains {text[:40]!r} instead of a number of ranks, which is ignored")
            return before
        number = int(text)
        if not self.allowed.least <= number <= self.allowed.most:
            self._say_once(
                f"{self.file} asks for {number} ranks, but {FLAG} allows {self.allowed.least} to {self.allowed.most}: "
                "the nearest number is used"
            )
        return min(max(number, self.allowed.least), self.allowed.most)

    def _say_once(self, message: str) -> None:
        if message != self._said:
            self._said = message
            print_message(message)


def elastic_places(
    text: str, config: str, arguments: Sequence[str], file: str | None, gpus: Callable[[], list[str]]
) -> Places:
    """Return the places of an elastic run on this machine.

    Args:
        text: The value of `--elastic`.
        config: The config of the run.
        arguments: The arguments of `mst_scale.pretrain`.
        file: The value of `--ranks-from`.
        gpus: Returns the GPUs of this machine; without any, there are as many places as `--elastic` allows ranks.

    Raises:
        UserError: if the run cannot be elastic, or there are fewer GPUs than it needs.
    """
    experiment, out = read_run(config, arguments)
    numbers = allowed(text, experiment)
    kind, names = ("GPU", gpus) if gpus() else ("place", lambda: [str(number) for number in range(numbers.most)])
    places = Places(numbers, Path(file) if file is not None else out / "ranks", kind, names)
    places.take()
    return places


def keep_changing(supervisor: Supervisor, places: Places, start: Callable[[list[str]], int]) -> int:
    """Run the ranks, again each time that their number is to change, and return the exit code of the last start.

    Args:
        supervisor: Runs the ranks.
        places: The places for ranks.
        start: Runs one rank on each of these places, until they end or their number is to change.
    """
    with tempfile.TemporaryDirectory(prefix="mst-") as folder:
        reports = Reports(Path(folder))
        while True:
            reports.clear()
            taken, began = places.take(), time.monotonic()
            code = start(taken)
            if code == 0 and "stopped" not in reports:
                return code
            if not places.changing or code in NOT_A_CHANGE or supervisor.asked_to_stop():
                break
            # whatever the code: ranks that were still starting have ended without a save
            os.environ[RESIZED] = str(int(os.environ.get(RESIZED) or 0) + 1)
        if code not in (0, *NOT_A_CHANGE):
            soon = code == CORRUPTED or time.monotonic() - began < healthy_seconds()
            places.failed(reports.failed_ranks(), taken, soon)
        return code
