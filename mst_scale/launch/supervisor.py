"""Runs the ranks of a start and forwards signals to them, so that they save and end, and reads what they report.

SIGTERM, SIGINT, SIGHUP and SIGUSR1 are forwarded; after a second SIGINT (Ctrl-C), the children are terminated. All of
these signals are blocked and received one by one while this process waits, so none is lost, and none interrupts the
handling of another. A message that cannot be printed, because the disk of a log is full, does not end this process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from mst_scale.launch.command_line import seconds_in

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
LOOK_EVERY = 1.0  # seconds between two checks whether the ranks should end
NOT_BEGUN = 128 + signal.SIGTERM  # the exit code of a start that was asked to stop before it began

Ask = Callable[[list[int], bool], None]  # process ids of the children, whether they were asked before


class Supervisor:
    """Starts the children of this process and waits for them.

    Attributes:
        stopping: The first signal that asked this process to stop, or None.
    """

    def __init__(self, ask: Ask):
        """Block the signals from now on.

        Args:
            ask: Asks the ranks to save and end. It is called again every MST_ASK_AGAIN seconds (10), because a process
                that was just starting may have missed it.
        """
        self.stopping: signal.Signals | None = None
        self._ask = ask
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        # signals that nohup, or a shell in the background, set to be ignored stay ignored
        self._heard = {one for one in STOP_SIGNALS if signal.getsignal(one) != signal.SIG_IGN} | {signal.SIGCHLD}
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, self._heard)

    def asked_to_stop(self) -> bool:
        """Return whether a signal has come by now."""
        while self._wait(0):
            pass
        return self.stopping is not None

    def run(
        self,
        *commands: Sequence[str],
        variables: Mapping[str, str] | None = None,
        own_session: bool = False,
        ignored: tuple[signal.Signals, ...] = (),
        patience: float | None = None,
        leave: Callable[[], bool] | None = None,
    ) -> int:
        """Run these commands side by side until all have ended.

        Args:
            commands: The commands.
            variables: What they have in their environment in addition to that of this process.
            own_session: Whether a Ctrl-C reaches this process alone, and not them too.
            ignored: Signals that they ignore, as long as they set no handler.
            patience: Seconds after which the others are asked to end when one has failed.
            leave: Called every second; once it returns True, the ranks save and end as after a signal.

        Returns:
            The exit code of the first that failed, or 0. 2 (usage error), 3 (diverged) and 4 (corrupted) come before
            any other code: they are those of ranks, and tell more than the 1 of ranks that were ended.
        """
        if self.asked_to_stop():
            return NOT_BEGUN
        again = seconds_in("MST_ASK_AGAIN", 10)
        worst = self._start(commands, {**os.environ, **(variables or {})}, own_session, ignored)
        heard, asked, ask_at = self.stopping, False, None
        if worst and patience is not None:  # one could not be started
            ask_at = time.monotonic() + patience
        while self._children:
            now = time.monotonic()
            if leave is not None and leave():
                leave, ask_at = None, now
            if self.stopping is not heard:
                heard, ask_at = self.stopping, now
            if ask_at is not None and now >= ask_at:
                self._ask(list(self._children), asked)
                asked, ask_at = True, now + again
            waits = [] if ask_at is None else [max(0.0, ask_at - time.monotonic())]
            waits += [] if leave is None else [LOOK_EVERY]
            self._wait(min(waits, default=None))
            for code in filter(None, self._take_ended()):
                if worst == 0 or code in (2, 3, 4):
                    worst = code
                if patience is not None and ask_at is None:
                    ask_at = time.monotonic() + patience
        return worst

    def _start(
        self,
        commands: Sequence[Sequence[str]],
        environment: Mapping[str, str],
        own_session: bool,
        ignored: tuple[signal.Signals, ...],
    ) -> int:
        """Start the children up to the first that cannot be started, and return its exit code in a shell, or 0."""
        for command in commands:
            try:
                child = spawn(command, environment, own_session, ignored)
            except OSError as error:
                print_message(f"{command[0]} cannot be started: {error.strerror}")
                return 127 if isinstance(error, FileNotFoundError) else 126
            self._children[child.pid] = child
        return 0

    def _take_ended(self) -> list[int]:
        """Forget the children that have ended, and return their exit codes as a shell gives them."""
        ended = [child for child in self._children.values() if child.poll() is not None]
        for child in ended:
            del self._children[child.pid]
        return [child.returncode if child.returncode >= 0 else 128 - child.returncode for child in ended]

    def pause(self, seconds: float) -> None:
        """Wait, but not after a signal to stop."""
        end = time.monotonic() + seconds
        while not self.asked_to_stop() and (left := end - time.monotonic()) > 0:
            self._wait(left)

    def _wait(self, seconds: float | None) -> bool:
        """Wait for a child to end or a signal to come; return whether one has."""
        found = signal.sigwaitinfo(self._heard) if seconds is None else signal.sigtimedwait(self._heard, seconds)
        if found is None:
            return False
        if found.si_signo == signal.SIGINT and self.stopping is not None:
            for child in self._children.values():
                child.terminate()
        elif found.si_signo != signal.SIGCHLD and self.stopping is None:
            self.stopping = signal.Signals(found.si_signo)
        return True


def unblock() -> None:
    """Take signals again as they come."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS, signal.SIGCHLD})


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    own_session: bool = False,
    ignored: tuple[signal.Signals, ...] = (),
) -> subprocess.Popen[bytes]:
    """Start a process that reads nothing and whose signals are not blocked."""

    def prepare() -> None:
        for one in ignored:
            signal.signal(one, signal.SIG_IGN)
        unblock()

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        env=environment,
        start_new_session=own_session,
        preexec_fn=prepare,  # noqa: PLW1509 - this process has one thread
    )


def output_of(*command: str) -> str:
    """Return what a short command prints, or nothing if it fails."""
    with contextlib.suppress(OSError):
        child = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False, preexec_fn=unblock
        )
        return child.stdout if child.returncode == 0 else ""
    return ""


def send(pids: Sequence[int], *signals: signal.Signals) -> None:
    """Send signals to processes, of which some may be gone."""
    for pid in pids:
        for one in signals:
            with contextlib.suppress(OSError):
                os.kill(pid, one)


def ask_ranks(pids: list[int], again: bool) -> None:
    """Let the ranks below these processes save and end.

    One that is frozen gets a SIGCONT first. Before there are any ranks, everything below is ended: DeepSpeed's
    runner alone would leave behind what it has started. A rank that comes meanwhile saves and ends.
    """
    below: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            below += psutil.Process(pid).children(recursive=True)
    ranks = [process.pid for process in below if _is_rank(process)]
    if ranks or again:
        send(ranks, signal.SIGUSR1, signal.SIGCONT)
    else:
        send([*pids, *(process.pid for process in below)], signal.SIGTERM)


def _is_rank(process: psutil.Process) -> bool:
    try:
        return "RANK" in process.environ() and "mst_scale.pretrain" in process.cmdline()
    except psutil.Error:
        return False


def forward(one: signal.Signals) -> Ask:
    """Return an `ask` that sends this signal to the children, which hand it on."""

    def ask(pids: list[int], again: bool) -> None:
        send(pids, one)

    return ask


class Reports:
    """The files in which the ranks of a start report what their exit code does not tell.

    Both a saved and a finished run end with code 0, a preemption with a grace time reaches the ranks alone, and srun's
    exit code is the highest of all, which may be that of a task that it ended (143).
    """

    NAMES = ("stopped", "refused", "diverged", "corrupted", "failed", "unfit")

    def __init__(self, folder: Path) -> None:
        self.files = {name: folder / name for name in self.NAMES}
        os.environ.update({f"MST_{name.upper()}": str(file) for name, file in self.files.items()})

    def __contains__(self, name: str) -> bool:
        return self.files[name].exists()

    def clear(self) -> None:
        """Forget the reports of the start before."""
        for file in self.files.values():
            file.unlink(missing_ok=True)

    def failed_ranks(self) -> list[int]:
        """Return the ranks that have failed by themselves, or were lost."""
        try:
            return [int(word) for word in self.files["failed"].read_text().split() if word.isdecimal()]
        except OSError:
            return []


def print_message(message: str) -> None:
    """Print a line for the user; a full disk or a closed terminal does not matter."""
    with contextlib.suppress(OSError):
        print(f"mst_scale: {message}", file=sys.stderr, flush=True)
