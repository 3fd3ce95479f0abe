"""Detects a rank that is lost or makes no progress, names it, and ends the others.

If one rank stops, the others block in a collective. Every rank therefore keeps a TCP connection to rank 0, served by a
background thread, which detects three cases:

killed    The sockets of a process close when it ends, for whatever reason, and a machine that is down stops answering
          TCP's keep-alives.
frozen    A process that is stopped (SIGSTOP, a debugger, a hung machine) sends no heartbeat. Every rank sends one to
          rank 0, and rank 0 to every rank, several times within the timeout (`comm.timeout`).
stuck     A process whose main thread hangs still sends heartbeats. When a collective times out on some ranks, the
          ranks that did not take part in it are named. This needs an error in the main thread, which gloo raises. With
          NCCL, torch ends the ranks that wait: the first of them is named, and the line says that it may have waited.

Rank 0 notifies all ranks, and all exit with code 1, so that the launcher can restart the run. The messages:

    a rank → rank 0     {"rank", "host", "pid", "token"}   at the start
                        "alive"                            heartbeat
                        "stopping"                         the rank was asked to save and exit
                        "late" or "cut off"                its collective has timed out, or was ended by another rank
                        "bye" or "failed"                  when it exits by itself; nothing if it is killed
    rank 0 → a rank     "alive", "bye", "failed"           about itself
                        "gone …" or "failed …"             about another rank: exit at once, or after a grace period

A rank that is frozen or stuck does not end when the launcher asks it to, and the launcher waits for it for half a
minute: ranks that have the same parent process kill it when they exit.

A run that was asked to stop does not wait the whole timeout for a frozen rank, which cannot save: see STOPPING_SECONDS.
`mst_scale.pretrain` starts one `Watch`; `comm.own_loops` starts it for programs with a loop of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mst_scale.comm.exits import FailedElsewhere, report_failed
from mst_scale.comm.launch import timeout
from mst_scale.comm.messages import logger

if TYPE_CHECKING:
    from mst_scale.comm.own_loops import RanksOfStore
    from mst_scale.comm.ranks import Ranks

MEET_SECONDS = 60.0
NEWS_SECONDS = 3.0  # from the failure of a collective to the message about the lost rank
LATE_NEWS_SECONDS = 30.0  # on a busy machine, if the error itself mentions a lost peer
LOST_PEER = re.compile(r"connection|peer|remote|socket|broken pipe", re.IGNORECASE)
TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)
COLLECT_SECONDS = 5.0  # from the first rank whose collective has timed out to the last one
GRACE = 10.0  # s; lets a rank exit with its own message and exit code after another has failed
SILENCE = 0.8  # fraction of the timeout after which a silent rank is lost, before collectives time out on the others
STOPPING_SECONDS = 30.0  # the same in seconds, once the run was asked to stop
BEATS = 10  # heartbeats within the allowed silence …
BEAT_SECONDS = 5.0  # … and at least one every 5 s
KEEP_ALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6))  # 10 + 6 · 5 = 40 s
NAMED_BY_ANOTHER = 2.0  # s before a frozen rank 0 is killed by a rank that does not name it
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
ADVICE = "; the same command continues from the latest complete checkpoint"


class Peer:
    """The other end of a connection: its name, when it last sent something, and whether its collective has failed."""

    def __init__(self, connection: socket.socket, who: str):
        self.connection, self.who = connection, who
        self.heard = time.monotonic()
        self.waiting = False  # its collective has failed, so the others are not waiting for this rank
        self.unread = b""

    def lines(self) -> list[str]:
        """Return the messages that have arrived; the last one is "" if the connection is closed."""
        try:
            more = self.connection.recv(4096, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            more = b""
        *whole, self.unread = (self.unread + more).split(b"\n")
        self.heard = time.monotonic()
        return [line.decode(errors="replace").strip() for line in whole] + ([] if more else [""])

    def send(self, message: str) -> None:
        """Send a message; ignore a closed connection, or a buffer that is full because the peer is frozen."""
        with contextlib.suppress(OSError):
            self.connection.send(message.encode() + b"\n", socket.MSG_DONTWAIT)


class Watch:
    """Monitors the other ranks; one per process. It does nothing before `start` or with a single rank.

    Args:
        advice: What the user can do when a rank is lost, for the message.
        done: Whether ranks may exit without a message by now, because the program has finished its work.
    """

    def __init__(self, advice: str = ADVICE, done: Callable[[], bool] = lambda: False) -> None:
        self.advice, self.done = advice, done
        self.world: Any = None  # the default process group; once it is destroyed, ranks are no longer watched
        self.on_nccl = False  # torch ends ranks that wait for too long, without an error in their main thread
        self.ranks: Ranks | RanksOfStore | None = None
        self.pid = os.getpid()  # a forked child, such as a worker that loads data, has copies of the connections
        self.first = ""  # host and process of rank 0
        self.lost: str | None = None
        self.ending = False
        self.leaving = threading.Lock()  # only one thread prints the message
        self.peers: list[Peer] = []  # on rank 0 all others, elsewhere rank 0
        self.silence = 0.0  # seconds without a heartbeat after which a rank counts as frozen
        self.waiting = False  # this rank's own collective has failed
        self.verdict_at: float | None = None  # on rank 0: when to name the ranks that a collective waits for
        self.signals: socket.socket | None = None  # receives the numbers of incoming signals
        self.wakeup = -1  # its other end, to which Python sends them

    def start(self, ranks: Ranks | RanksOfStore) -> None:
        """Connect to rank 0; if a rank cannot connect, no rank is monitored, and an error is logged."""
        import torch.distributed as dist

        if ranks.world_size == 1:
            return
        self.ranks = ranks
        self.silence = SILENCE * timeout().total_seconds()
        token, port, listener = secrets.token_hex(16), 0, None
        if ranks.first:
            listener = _listen(ranks.world_size)
            port = listener.getsockname()[1]
        token, port, host, pid = ranks.on_first(lambda: (token, port, socket.gethostname(), self.pid))
        self.first = f"({host}, process {pid})"
        if listener is None:
            failure = self._meet_first(host, port, token)
        else:
            with listener:
                failure = self._meet_all(listener, token)
        if ranks.any(bool(failure)):
            if failure:
                logger.error("ranks are not monitored (%s): if one is killed, others may wait for it", failure)
            self._disconnect()
            return
        self.world, self.on_nccl = dist.group.WORLD, "nccl" in dist.get_backend_config()
        _of_process[:] = [self]
        self._hear_signals()
        os.register_at_fork(after_in_child=self._forked)
        threading.Thread(target=self._watch, name="mst_scale watch", daemon=True).start()

    def close(self) -> None:
        """Announce that this rank exits normally."""
        self._tell("bye")

    def explain(self, error: BaseException) -> None:
        """Exit with a message about the lost rank if `error` is only a consequence of it; otherwise return.

        Called before a rank exits with `error`. A collective fails on the other ranks a moment before the message about
        the lost rank arrives.
        """
        if self.ranks is None or os.getpid() != self.pid:
            return
        if isinstance(error, FailedElsewhere):
            self._tell("bye")
            return
        seconds = NEWS_SECONDS
        if isinstance(error, RuntimeError) and (TIMED_OUT.search(str(error)) or LOST_PEER.search(str(error))):
            seconds = LATE_NEWS_SECONDS
            self._wait_in_vain(late=TIMED_OUT.search(str(error)) is not None)
        deadline = time.monotonic() + seconds
        while isinstance(error, RuntimeError) and self.lost is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if isinstance(error, RuntimeError) and self.lost is not None and self._joined():
            self._leave()
        self._tell("failed")

    # --- meeting ---

    def _meet_all(self, listener: socket.socket, token: str) -> str:
        """Accept the connections of all other ranks; return what went wrong, or ""."""
        assert self.ranks is not None
        port = listener.getsockname()[1]
        deadline = time.monotonic() + min(MEET_SECONDS, timeout().total_seconds() / 2)
        while len(self.peers) < self.ranks.world_size - 1:
            try:
                listener.settimeout(max(0.001, deadline - time.monotonic()))
                peer, _ = listener.accept()
            except OSError as error:
                missing = self.ranks.world_size - 1 - len(self.peers)
                return f"{missing} of the other ranks have not connected to rank 0 at port {port}: {error}"
            peer.settimeout(MEET_SECONDS)
            try:
                who = json.loads(_line(peer))
            except (OSError, ValueError, RecursionError):
                peer.close()
                continue
            if not isinstance(who, dict) or who.get("token") != token:
                peer.close()  # an unrelated connection
                continue
            _keep_alive(peer)
            self.peers.append(Peer(peer, f"rank {who['rank']} ({who['host']}, process {who['pid']})"))
        return ""

    def _meet_first(self, host: str, port: int, token: str) -> str:
        """Connect to rank 0, which runs on this host; return what went wrong, or ""."""
        assert self.ranks is not None
        here = socket.gethostname()
        address = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if here == host else host)
        try:
            first = socket.create_connection((address, port), timeout=MEET_SECONDS)
            _keep_alive(first)
            who = {"rank": self.ranks.rank, "host": here, "pid": os.getpid(), "token": token}
            first.sendall(json.dumps(who).encode() + b"\n")
        except OSError as error:
            return f"rank {self.ranks.rank} cannot reach rank 0 at {address}, port {port}: {error}"
        self.peers.append(Peer(first, "rank 0"))
        return ""

    def _disconnect(self) -> None:
        """Close this process's connections without a message; those of the process it was forked from stay open."""
        for peer in self.peers:
            peer.connection.close()
        self.peers = []

    def _forked(self) -> None:
        """Drop connections and signals in a forked child: they belong to the rank."""
        self._disconnect()
        if self.signals is not None:
            with contextlib.suppress(ValueError):  # not the main thread
                signal.set_wakeup_fd(-1)
            self.signals.close()

    def _hear_signals(self) -> None:
        """Receive signal numbers on a socket, unless the program does so itself.

        Python runs signal handlers on the main thread only, which may be blocked in a collective.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self.signals, into = socket.socketpair()
        into.setblocking(False)
        if (of_program := signal.set_wakeup_fd(into.fileno(), warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(of_program)
            self.signals = None
        else:
            self.wakeup = into.detach()

    # --- watching ---

    def _watch(self) -> None:
        """Send and receive heartbeats until this rank exits."""
        connected = list(self.peers)
        woke_at = beat_at = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for peer in connected:
                selector.register(peer.connection, selectors.EVENT_READ, peer)
            if self.signals is not None:
                selector.register(self.signals, selectors.EVENT_READ)
            while connected and not self.ending and self._joined():
                every = min(BEAT_SECONDS, min(self.silence, STOPPING_SECONDS) / BEATS)
                ready = selector.select(every)
                now = time.monotonic()
                if now - woke_at > every + self.silence / 2:  # this process itself was frozen and has read nothing
                    for peer in connected:
                        peer.heard = now
                woke_at = now
                for peer in self._receive([key for key, _ in ready]):
                    selector.unregister(peer.connection)
                    connected.remove(peer)
                if now - beat_at >= every:
                    beat_at = now
                    for peer in connected:
                        peer.send("alive")
                self._lose_silent(connected, now)
                if self.verdict_at is not None and now > self.verdict_at:
                    self._name_stuck_ranks(connected)
        if not self._joined():
            for peer in self.peers:
                peer.send("bye")

    def _receive(self, ready: list[selectors.SelectorKey]) -> list[Peer]:
        """Handle the signals and messages that have come; return the peers of which no more messages come."""
        ended = []
        for key in ready:
            if key.data is None:
                self._note_signals(key.fileobj)
            elif any(self._hear(key.data, line) for line in key.data.lines()):
                ended.append(key.data)
        return ended

    def _lose_silent(self, peers: list[Peer], now: float) -> None:
        """Give up the rank that has sent nothing for too long, if there is one."""
        for peer in peers:
            if now - peer.heard > self.silence:
                silent = f"has sent no heartbeat for {now - peer.heard:.0f} s: it is frozen or disconnected"
                self._lose(peer.who, silent)

    def _hear(self, peer: Peer, line: str) -> bool:
        """Handle one message; return whether it is the peer's last one."""
        word, _, who = line.partition(" ")
        if line == "stopping":
            self.silence = min(self.silence, STOPPING_SECONDS)
        elif line in ("late", "cut off"):
            peer.waiting = True
            self._expect_verdict(line == "late")
        elif line == "bye" or (line == "" and self.done()):
            return True
        elif line != "alive" and not self.ending:
            if word == "gone":
                self._lose(*who.split(": ", 1))
            self._fail(who or peer.who, killed=word != "failed")
            return True
        return False

    def _note_signals(self, signals: Any) -> None:
        """Notify rank 0 if this rank was asked to stop, as rank 0 may not have received the signal."""
        assert self.ranks is not None
        if any(number in STOP_SIGNALS for number in signals.recv(64)):
            self.silence = min(self.silence, STOPPING_SECONDS)
            if not self.ranks.first:
                self.peers[0].send("stopping")

    def _wait_in_vain(self, late: bool) -> None:
        """Report that this rank's collective has failed, so the others are not waiting for this rank."""
        assert self.ranks is not None
        self.waiting = True
        if self.ranks.first:
            self._expect_verdict(late)
        elif self.peers:
            self.peers[0].send("late" if late else "cut off")

    def _expect_verdict(self, late: bool) -> None:
        if late and self.verdict_at is None:
            self.verdict_at = time.monotonic() + COLLECT_SECONDS

    def _name_stuck_ranks(self, peers: list[Peer]) -> None:
        stuck = [peer.who for peer in peers if not peer.waiting]
        stuck = stuck if self.waiting else ["rank 0", *stuck]
        seconds = timeout().total_seconds()
        if stuck:
            self._lose(", ".join(stuck), f"made no progress for {seconds:.0f} s, and a collective timed out")
        self._lose("every rank", f"has waited for the others for {seconds:.0f} s: the network between them is down")

    def _fail(self, who: str, killed: bool) -> None:
        """Handle the end of `who`, which has failed and prints its own message, or was killed.

        Only the first rank that ends is named.
        """
        if killed:
            waited = ", or it waited for a stuck rank until NCCL's timeout (see its output)" if self.on_nccl else ""
            how = "disconnected without a message: it was killed (out of memory?), or its machine is down"
            self._lose(who, how + waited)
        self.lost = f"{who} has failed"
        self._pass_on(f"failed {who}")
        time.sleep(GRACE)
        if not self.ending:
            self._leave()

    def _lose(self, who: str, how: str) -> NoReturn:
        """Tell the others which rank is lost, and exit."""
        if found := re.match("rank ([0-9]+)", who):
            report_failed(int(found[1]))
        self.lost = f"{who} {how}"  # last: from now on, the main thread may end the process
        self._pass_on(f"gone {who}: {how}")
        self._leave()

    def _joined(self) -> bool:
        """Return whether the default process group is still the one whose ranks are watched."""
        dist = sys.modules["torch.distributed"]
        return dist.group.WORLD is self.world

    def _pass_on(self, message: str) -> None:
        assert self.ranks is not None
        if self.ranks.first:
            for peer in self.peers:
                peer.send(message)

    def _leave(self) -> NoReturn:
        with self.leaving:
            if not self._joined():
                sys.exit()  # ends this thread only: no rank waits for the lost one any more
            assert self.ranks is not None and self.lost is not None
            lost_first = self.lost.startswith("rank 0 ")
            if self.ranks.first or (lost_first and self.ranks.local_rank <= 1):
                with contextlib.suppress(OSError):  # a log on a full disk must not stop this process from ending
                    print(
                        f"\nmst_scale: {self.lost}. The other ranks exit now{self.advice}", file=sys.stderr, flush=True
                    )
            elif lost_first:
                time.sleep(NAMED_BY_ANOTHER)  # which must notice its silence, and not that this rank has killed it
            _kill_siblings(self.lost.replace("rank 0 ", f"rank 0 {self.first} ", 1))
            os._exit(1)

    def _tell(self, word: str) -> None:
        if os.getpid() != self.pid:
            return
        self.ending = True
        for peer in self.peers:
            peer.send(word)
        if self.signals is not None and threading.current_thread() is threading.main_thread():
            if (of_program := signal.set_wakeup_fd(-1)) != self.wakeup:  # the program has set its own since
                signal.set_wakeup_fd(of_program)
            os.close(self.wakeup)
            self.signals = None


def _kill_siblings(lost: str) -> None:
    """Kill the processes that a message names, if they are here and have the same parent as this one."""
    if "it was killed" in lost:  # its number may belong to another process by now
        return
    for found in re.finditer(r"\((\S+), process ([0-9]+)\)", lost):
        with contextlib.suppress(OSError, ValueError, IndexError):
            stat = Path(f"/proc/{found[2]}/stat").read_text()  # "pid (name) state parent …"
            if found[1] == socket.gethostname() and int(stat.rpartition(")")[2].split()[1]) == os.getppid():
                os.kill(int(found[2]), signal.SIGKILL)


_of_process: list[Watch] = []


def of_process() -> Watch | None:
    """Return the `Watch` that was started last in this process."""
    return _of_process[0] if _of_process and _of_process[0].pid == os.getpid() else None


def _listen(world_size: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=max(128, world_size), dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=max(128, world_size))


def _line(peer: socket.socket) -> str:
    """Read one line; return "" if the connection is closed."""
    line = b""
    while not line.endswith(b"\n"):
        if not (more := peer.recv(1)):
            return ""
        line += more
    return line.decode(errors="replace").strip()


def _keep_alive(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in KEEP_ALIVE:
        if hasattr(socket, name):  # Linux
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
