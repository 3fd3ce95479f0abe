"""Tests and measures this project on a GPU, in three commands of at most three minutes each.

    mst bench gpu_day --group correctness --out DIR      three minutes: correctness
    mst bench gpu_day --group steps --out DIR            three minutes: the time of a whole training step
    mst bench gpu_day --group layers --out DIR           three minutes: layers, attention, optimizer, memory
    python -m benchmarks.gpu_day --group …               the same, in a clone

The parts of a group run one after the other, most important first, each in separate processes with a time limit and a
share of the GPU's memory. The result of a case is on disk before the next one begins (DIR/results.jsonl), and
DIR/gpu_day.md is written after every part. A case that crashes, hangs or runs out of memory is recorded with its
reason, and the next one runs in a new process. Running the same command again measures missing cases and repeats
failed ones. Compiled kernels are kept in DIR.work.

    correctness  masks       topology steps on the GPU and on the CPU from equal inputs: the same bits
                 training    short sparse runs at ZeRO 1, 2 and 3 on the GPU and on the CPU: losses within rounding
                 compact     compact runs and masked ones at ZeRO 0 to 3, in fp32 and bf16: the same bits
                 kernels     every Triton kernel, forward and gradients, against its definition in float64
    steps        step        channels and blocks at the widths of 6.7B and GPT-2 XL against dense bf16 with
                             torch.compile and cuDNN attention
                 density     plain DeepSpeed, masked and compact weights at 96 %: time and memory of a step
    layers       linear      block linear layers, product by product, and 2:4, against cuBLAS
                 attention   sparse attention against cuDNN and flash attention
                 optimizer   fused AdamW on all weights and on the active ones alone
                 memory      the peak of a run against the prediction of `mst plan`

The exit code is 1 if a result was wrong or a case failed. Without a GPU, --tiny runs every part on the CPU with tiny
shapes and Triton's interpreter, to test that the parts run; its times are meaningless.

examples:
  mst bench gpu_day --group correctness --out h100
  mst bench gpu_day --parts attention linear --minutes 1 --out h100
  mst bench gpu_day --tiny --out try
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mst_scale.comm.parser import Parser, at_least, validate_folder
from mst_scale.errors import UserError
from mst_scale.run_logging.progress import clock as minutes_and_seconds

from .gpu_parts import GROUPS, PARTS, Part, Where
from .gpu_parts.book import Book, page, said

AGAIN = 75  # a part's process asks for a fresh one: the GPU's context is lost
LEAST_SECONDS = 20.0  # a part with less is not begun
POLL_SECONDS = 0.2
FURTHER = "further cases"
COMMAND = (sys.executable, "-m", "mst_scale.benchmarks.gpu_day")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    found = Parser(prog="mst bench gpu_day", description=__doc__)
    option = found.add_argument
    option("--group", choices=list(GROUPS), help="the parts of one command (default: all groups)")
    option("--minutes", type=at_least(0.1), metavar="M", help="time limit (default: what the chosen groups have)")
    option("--out", type=Path, required=True, metavar="DIR", help="where results go")
    option("--parts", nargs="+", choices=list(PARTS), metavar="P", help="only these parts")
    option("--work", type=Path, metavar="DIR", help="folder of temporary files (default: DIR.work next to --out)")
    option("--tiny", action="store_true", help="on the CPU, tiny shapes: does every part run?")
    option("--json", action="store_true", help="print the results as one JSON object")
    option("--part", choices=list(PARTS), help=argparse.SUPPRESS)  # of a child
    option("--process", type=int, default=0, help=argparse.SUPPRESS)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its results."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    work = options.work or options.out.with_name(options.out.name + ".work")
    where = Where(options.tiny, options.out, work)
    if options.part:
        return measure(PARTS[options.part], where, options.process)
    if not options.tiny:
        import torch

        if not torch.cuda.is_available():
            raise UserError("there is no CUDA device here: --tiny runs the parts on the CPU, to see that they run")
    validate_folder("--out", options.out)
    book = Book(options.out)
    book.begin(where.machine())
    parts = [part for part in PARTS.values() if part.name in (options.parts or PARTS)]
    parts = [part for part in parts if options.group in (None, part.group)]
    minutes = options.minutes or sum(GROUPS[group] for group in dict.fromkeys(part.group for part in parts))
    day = Day(options.out, where, given, 60 * minutes)
    for part in parts:
        day.run(part)
        book.read()
        (options.out / "gpu_day.md").write_text(page(book, PARTS.values()))
    if options.json:
        print(json.dumps({"machine": book.machine, "rows": book.rows}))
    else:
        print(f"{options.out / 'gpu_day.md'}: {book.summary()}")
    return int(bool(book.bad))


# --- a part's own process ---


def measure(part: Part, where: Where, process: int = 0) -> int:
    """Every case of a part that is not in the book and is this process's; the parent watches the time."""
    if where.device == "cuda":
        import torch

        torch.cuda.set_per_process_memory_fraction(part.memory)
    book = Book(where.out)
    for number, case in enumerate(part.cases(where)):
        if number % processes(part) != process or book.settled(part.name, case.name):
            continue
        began = time.monotonic()
        book.started(part.name, case.name, process)
        try:
            row = case.run()
        except Exception as error:  # whatever it is, it is this case's result, and the next case starts
            message = (str(error).strip() or "no message").splitlines()[0][:300]
            row = {"failed": f"{type(error).__name__}: {message}"}
            traceback.print_exc()  # into the log of this process
        book.ended(part.name, case.name, row, time.monotonic() - began)
        if where.device == "cuda" and not _usable():
            return AGAIN
    return 0


def _usable() -> bool:
    """Whether the GPU still works in this process: after an illegal access it does not. Gives memory back."""
    import torch

    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def processes(part: Part) -> int:
    """Return the number of processes that share the cases of a part."""
    return min(part.at_once, os.cpu_count() or 1)


# --- the queue of parts ---


class Day:
    """Runs parts in processes of their own until its time is over. `clock` gives seconds."""

    def __init__(
        self, out: Path, where: Where, given: Sequence[str], seconds: float, clock: Callable[[], float] = time.monotonic
    ):
        self.out, self.where, self.given, self.clock = out, where, list(given), clock
        self.deadline = clock() + seconds
        self.stopped = threading.Event()
        self.patience = 10 if where.tiny else 1
        self.began, self.printed, self.printing = self.clock(), len(Book(out).ends), threading.Lock()

    def run(self, part: Part) -> None:
        """Run a part until its cases or its time are over."""
        end = min(self.deadline, self.clock() + 60 * part.minutes)
        if self.deadline - self.clock() < LEAST_SECONDS:
            self._say(f"{part.name}: no time is left")
            return
        self._say(f"{part.name}: {part.question} (at most {minutes_and_seconds(end - self.clock())})")
        with ThreadPoolExecutor(processes(part)) as pool:
            found = [pool.submit(self._to_the_end, part, number, end) for number in range(processes(part))]
            try:
                ends = [one.result() for one in found]
            except BaseException:  # Ctrl-C: its processes would continue
                self.stopped.set()
                raise
        book = Book(self.out)
        if not all(ends):
            book.ended(part.name, FURTHER, {"unfinished": "the part's time was over"}, 0.0)
        elif book.has(part.name, FURTHER):
            book.ended(part.name, FURTHER, {"said": "measured since"}, 0.0)
        self._tell()

    def _to_the_end(self, part: Part, number: int, end: float) -> bool:
        """One process after the other over its share of the cases: whether they came to their end in time."""
        book = Book(self.out)
        while end - self.clock() >= LEAST_SECONDS / 2 and not self.stopped.is_set():
            code = self._process(part, number, end)
            book.read()
            if code == 0:
                return True
            case = book.under_way(part.name, number)
            log = self._log(part, number).name
            if case is None and code != AGAIN:
                if self.clock() < end:  # it did not come to a case
                    book.ended(part.name, "start", {"failed": f"it ended with code {code}: see {log}"}, 0.0)
                return self.clock() < end
            if case is not None:
                over = self.clock() >= end
                why = "the part's time was over" if over else "took too long" if code == -signal.SIGKILL else ""
                reason = f"stopped: {why}" if why else f"its process ended with code {code}: see {log}"
                book.ended(part.name, case, {"unfinished" if over else "failed": reason}, 0.0)
                self._tell()
        return False

    def _process(self, part: Part, number: int, end: float) -> int:
        """A process over the cases that are left; killed when a case takes too long or the time is over."""
        words = [*self.given, "--part", part.name, "--process", str(number)]
        self.where.work.mkdir(parents=True, exist_ok=True)
        book, since, latest = Book(self.out), self.clock(), ""
        with self._log(part, number).open("a") as log:
            child = subprocess.Popen(
                [*COMMAND, *words], stdout=log, stderr=log, env=self.where.environment(), start_new_session=True
            )
            try:
                while child.poll() is None:
                    time.sleep(POLL_SECONDS)
                    self._tell()
                    book.read()
                    case = book.under_way(part.name, number) or ""
                    since, latest = (since, latest) if case == latest else (self.clock(), case)
                    slow = bool(case) and self.clock() - since > part.case_seconds * self.patience
                    if slow or self.clock() > end or self.stopped.is_set():
                        break
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                code = child.wait()
        self._tell()
        return code

    def _log(self, part: Part, number: int) -> Path:
        return self.where.work / f"{part.name}{f'-{number}' if part.at_once > 1 else ''}.log"

    def _tell(self) -> None:
        """Say what has come in since the last time."""
        with self.printing:
            ends = Book(self.out).ends
            for row in ends[self.printed :]:
                self._say(f"  {row['case']}: {said(row)}")
            self.printed = len(ends)

    def _say(self, text: str) -> None:
        left = max(0.0, self.deadline - self.clock())
        print(
            f"[{minutes_and_seconds(self.clock() - self.began)}, {minutes_and_seconds(left)} left] {text}",
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    raise SystemExit(main())
