"""Finds out in one go what a GPU does with this project: is it right, how fast, how much memory, what does it learn.

    mst bench gpu_day --minutes 25 --out DIR [--parts P …] [--study NAME --data DIR] [--work DIR] [--json]
    python -m benchmarks.gpu_day --minutes 25 --out DIR          the same, in a clone

Parts run in order of worth, each in a process of its own that has so many minutes and a share of the GPU's memory. What
a case found is on disk before the next begins (DIR/results.jsonl), and DIR/gpu_day.md is written after every part. A
case that crashes, hangs or is out of memory is kept with its reason, and the next goes on in a fresh process. The same
command goes on where it stopped: what is there is not measured again, what failed is tried again.

    kernels     every Triton kernel, forward and gradients, against its definition in float64
    masks       topology steps on the GPU and on the CPU from equal inputs: the same bits
    training    a sparse run on the GPU and on the CPU: losses within rounding, masks
    attention   sparse attention against causal flash attention, FlexAttention, flash-attn's window, NATTEN, 1k to 32k
    linear      block linear layers against cuBLAS in bfloat16
    step        a step in every phase and the whole run, at the widths of 124M, 1.5B and 6.7B
    memory      the peak of a run against what `mst plan` says
    tests       the project's own tests that want a GPU, in a clone
    study       learning runs of a study's queue, in the time that is left

Exit code 1 where something was wrong or failed. Without a GPU it refuses; --tiny runs every part on the CPU with tiny
shapes, Triton's kernels in its interpreter: it proves that the parts run, and its times mean nothing.

examples:
  mst bench gpu_day --minutes 25 --out h100
  mst bench gpu_day --minutes 5 --out h100 --parts attention linear
  mst bench gpu_day --minutes 60 --out h100 --parts study --data corpora/study --work /tmp/runs
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mst_scale.distributed.parser import Parser, at_least, refuse_no_folder
from mst_scale.errors import UserError
from mst_scale.runs.progress import clock

from .gpu_parts import PARTS, Part, Where
from .gpu_parts.book import Book, said
from .gpu_parts.page import page

AGAIN = 75  # a part's process asks for a fresh one: the GPU's context is lost
LEAST_SECONDS = 20.0  # a part with less is not begun
POLL_SECONDS = 0.2
FURTHER = "further cases"
COMMAND = (sys.executable, "-m", "mst_scale.benchmarks.gpu_day")


def parser() -> argparse.ArgumentParser:
    found = Parser(prog="mst bench gpu_day", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = found.add_argument
    option("--minutes", type=at_least(0.1), default=25.0, metavar="M", help="for all of it (25)")
    option("--out", type=Path, required=True, metavar="DIR", help="where results go")
    option("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="P", help="only these")
    option("--study", default="main", metavar="NAME", help="whose learning runs (main)")
    option("--data", type=Path, default=Path("corpora/study"), metavar="DIR", help="their corpus (corpora/study)")
    option("--work", type=Path, metavar="DIR", help="for what is not kept (default: DIR.work beside --out)")
    option("--tiny", action="store_true", help="on the CPU, tiny shapes: does every part run?")
    option("--json", action="store_true", help="print the results as one JSON object")
    option("--part", choices=list(PARTS), help=argparse.SUPPRESS)  # of a child
    option("--process", type=int, default=0, help=argparse.SUPPRESS)
    option("--seconds", type=float, help=argparse.SUPPRESS)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    work = options.work or options.out.with_name(options.out.name + ".work")
    where = Where(options.tiny, options.out, work, options.study, options.data)
    if options.part:
        return measure(PARTS[options.part], where, options.seconds, options.process)
    if not options.tiny:
        refuse_without_gpu()
    refuse_no_folder("--out", options.out)
    book = Book(options.out)
    book.begin(where.machine())
    day = Day(options.out, where, given, time.monotonic() + 60 * options.minutes)
    for name in options.parts:
        day.run(PARTS[name])
        book.read()
        (options.out / "gpu_day.md").write_text(page(book, PARTS.values()))
    if options.json:
        print(json.dumps({"machine": book.machine, "rows": book.rows}))
    else:
        print(f"{options.out / 'gpu_day.md'}: {book.summary()}")
    return int(bool(book.bad))


def refuse_without_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UserError("there is no CUDA device here: --tiny runs the parts on the CPU, to see that they run")


# --- a part's own process ---


def measure(part: Part, where: Where, seconds: float, process: int = 0) -> int:
    """Every case of a part that is not in the book and is this process's; the parent watches the time."""
    where = where.until(time.monotonic() + seconds)
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
        except Exception as error:  # whatever it is, it is this case's result, and the next case goes on
            told = (str(error).strip() or "no message").splitlines()[0][:300]
            row = {"failed": f"{type(error).__name__}: {told}"}
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
    return min(part.at_once, os.cpu_count() or 1)


# --- the queue of parts ---


class Day:
    """Runs parts in processes of their own until its time is over."""

    def __init__(self, out: Path, where: Where, given: Sequence[str], deadline: float):
        self.out, self.where, self.given, self.deadline = out, where, list(given), deadline
        self.stopped = threading.Event()
        self.patience = 10 if where.tiny else 1
        self.began, self.told, self.telling = time.monotonic(), len(Book(out).ends), threading.Lock()

    def run(self, part: Part) -> None:
        end = min(self.deadline, time.monotonic() + 60 * part.minutes)
        if self.deadline - time.monotonic() < LEAST_SECONDS:
            self._say(f"{part.name}: no time is left")
            return
        self._say(f"{part.name}: {part.question} (at most {clock(end - time.monotonic())})")
        with ThreadPoolExecutor(processes(part)) as pool:
            found = [pool.submit(self._to_the_end, part, number, end) for number in range(processes(part))]
            try:
                ends = [one.result() for one in found]
            except BaseException:  # Ctrl-C: its processes would go on
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
        while end - time.monotonic() >= LEAST_SECONDS / 2 and not self.stopped.is_set():
            code = self._process(part, number, end)
            book.read()
            if code == 0:
                return True
            case = book.under_way(part.name, number)
            log = self._log(part, number).name
            if case is None and code != AGAIN:
                if time.monotonic() < end:  # it did not come to a case
                    book.ended(part.name, "start", {"failed": f"it ended with code {code}: see {log}"}, 0.0)
                return time.monotonic() < end
            if case is not None:
                over = time.monotonic() >= end
                why = "the part's time was over" if over else "took too long" if code == -signal.SIGKILL else ""
                reason = f"stopped: {why}" if why else f"its process ended with code {code}: see {log}"
                book.ended(part.name, case, {"unfinished" if over else "failed": reason}, 0.0)
                self._tell()
        return False

    def _process(self, part: Part, number: int, end: float) -> int:
        """A process over the cases that are left; killed when a case takes too long or the time is over."""
        words = [*self.given, "--part", part.name, "--process", str(number)]
        words += ["--seconds", f"{end - time.monotonic():.0f}"]
        self.where.work.mkdir(parents=True, exist_ok=True)
        book, since, latest = Book(self.out), time.monotonic(), ""
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
                    since, latest = (since, latest) if case == latest else (time.monotonic(), case)
                    slow = bool(case) and time.monotonic() - since > part.case_seconds * self.patience
                    if slow or time.monotonic() > end or self.stopped.is_set():
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
        with self.telling:
            ends = Book(self.out).ends
            for row in ends[self.told :]:
                self._say(f"  {row['case']}: {said(row)}")
            self.told = len(ends)

    def _say(self, text: str) -> None:
        left = max(0.0, self.deadline - time.monotonic())
        print(f"[{clock(time.monotonic() - self.began)}, {clock(left)} left] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
