"""Notices a rank that has gone, and tells the others.

A rank that is killed leaves the others in a collective that may wait for it for ever. So every rank keeps one TCP
connection to rank 0, in a thread of its own. A process that ends closes its sockets, whatever ended it, and a machine
that is gone stops answering TCP's keep-alives: rank 0 then names the lost rank and tells the others, and all leave with
exit code 1. A frozen or slow process answers keep-alives still, so it is waited for.

    a rank → rank 0     {"rank", "host", "pid", "token"}   at the start
                        "bye" or "failed"                  when it ends by itself; nothing if it is killed
    rank 0 → a rank     "bye" or "failed"                  of itself
                        "gone …" or "failed …"             of another rank: leave at once, or after a grace
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import selectors
import socket
import sys
import threading
import time
from typing import Any, NoReturn

from mst_scale.distributed.errors import FailedElsewhere
from mst_scale.distributed.group import Ranks
from mst_scale.distributed.messages import logger

MEET_SECONDS = 60.0
NEWS_SECONDS = 3.0  # from a collective's failure to the news of the lost rank
LATE_NEWS_SECONDS = 30.0  # on a machine that is too busy to bring them, where the error itself tells of a lost peer
LOST_PEER = re.compile(r"connection|peer|remote|socket|broken pipe", re.IGNORECASE)
GRACE = 10.0  # for a rank that ends by itself after another has failed: it has its own message and exit code
KEEP_ALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6))  # 10 + 6 · 5 = 40 s


class Watch:
    """One per process; it does nothing before `start` and with a single rank."""

    def __init__(self) -> None:
        self.ranks: Ranks | None = None
        self.lost: str | None = None
        self.ending = False
        self.leaving = threading.Lock()  # one message, whichever thread leaves
        self.peers: dict[socket.socket, dict[str, Any]] = {}  # on rank 0, who is at the other end
        self.to_first: socket.socket | None = None

    def start(self, ranks: Ranks) -> None:
        """Connect to rank 0; without that connection the run goes on unwatched, and says so."""
        if ranks.world_size == 1:
            return
        self.ranks = ranks
        token, port, listener = secrets.token_hex(16), 0, None
        if ranks.first:
            listener = _listen(ranks.world_size)
            port = listener.getsockname()[1]
        token, port = ranks.on_first(lambda: (token, port))
        try:
            if listener is not None:
                self._meet_all(listener, token)
            else:
                self._meet_first(port, token)
        except OSError as error:
            logger.error("rank %d is not watched (%s): if a rank is killed, others may wait for it", ranks.rank, error)
            return
        target = self._watch_all if ranks.first else self._watch_first
        threading.Thread(target=target, name="mst_scale watch", daemon=True).start()

    def close(self) -> None:
        """This rank ends as it should."""
        self._tell("bye")

    def explain(self, error: BaseException) -> None:
        """Called before a rank ends with `error`: if that is only because another has gone, say that and leave.

        A collective fails on the survivors a moment before the news of the lost rank arrives.
        """
        if self.ranks is None:
            return
        if isinstance(error, FailedElsewhere):
            self._tell("bye")
            return
        deadline = time.monotonic() + (LATE_NEWS_SECONDS if LOST_PEER.search(str(error)) else NEWS_SECONDS)
        while isinstance(error, RuntimeError) and self.lost is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if isinstance(error, RuntimeError) and self.lost is not None:
            self._leave()
        self._tell("failed")

    # --- meeting ---

    def _meet_all(self, listener: socket.socket, token: str) -> None:
        assert self.ranks is not None
        listener.settimeout(MEET_SECONDS)
        with listener:
            while len(self.peers) < self.ranks.world_size - 1:
                peer, _ = listener.accept()
                peer.settimeout(MEET_SECONDS)
                try:
                    who = json.loads(_line(peer))
                except (OSError, ValueError):
                    peer.close()
                    continue
                if not isinstance(who, dict) or who.get("token") != token:
                    peer.close()  # somebody else on the network
                    continue
                _keep_alive(peer)
                self.peers[peer] = who

    def _meet_first(self, port: int, token: str) -> None:
        assert self.ranks is not None
        first = socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=MEET_SECONDS)
        first.settimeout(None)
        _keep_alive(first)
        who = {"rank": self.ranks.rank, "host": socket.gethostname(), "pid": os.getpid(), "token": token}
        first.sendall(json.dumps(who).encode() + b"\n")
        self.to_first = first

    # --- watching ---

    def _watch_all(self) -> None:
        with selectors.DefaultSelector() as selector:
            for peer, who in self.peers.items():
                peer.settimeout(None)
                selector.register(peer, selectors.EVENT_READ, who)
            while selector.get_map():
                for key, _ in selector.select():
                    word = _line(key.fileobj)  # type: ignore[arg-type]
                    selector.unregister(key.fileobj)
                    if word != "bye" and not self.ending:
                        self._gone(_who(key.data), word)

    def _watch_first(self) -> None:
        assert self.to_first is not None
        word, _, who = _line(self.to_first).partition(" ")
        if word != "bye" and not self.ending:
            self._gone(who or "rank 0", word)

    def _gone(self, who: str, word: str) -> None:
        """`who` has failed, and says why itself; or it was killed. The first to go is named, and nobody after it."""
        killed = word != "failed"
        how = "is gone without a word: killed (out of memory?), or its machine is down" if killed else "has failed"
        self.lost = f"{who} {how}"
        for peer in self.peers:
            with contextlib.suppress(OSError):
                peer.sendall(f"{'gone' if killed else 'failed'} {who}\n".encode())
        if not killed:
            time.sleep(GRACE)
        if not self.ending:
            self._leave()

    def _leave(self) -> NoReturn:
        with self.leaving:
            assert self.ranks is not None and self.lost is not None
            if self.ranks.first or (self.lost.startswith("rank 0 ") and self.ranks.local_rank <= 1):
                print(
                    f"\nmst_scale: {self.lost}. The other ranks end now; the same command continues from the newest "
                    "whole checkpoint",
                    file=sys.stderr,
                    flush=True,
                )
            os._exit(1)

    def _tell(self, word: str) -> None:
        self.ending = True
        for peer in (*self.peers, *filter(None, [self.to_first])):
            with contextlib.suppress(OSError):
                peer.sendall(word.encode() + b"\n")


def _listen(world_size: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=max(128, world_size), dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=max(128, world_size))


def _line(peer: socket.socket) -> str:
    """What the other end says, up to the line's end; "" if it is gone."""
    said = b""
    try:
        while not said.endswith(b"\n"):
            more = peer.recv(1)
            if not more:
                return ""
            said += more
    except OSError:
        return ""
    return said.decode(errors="replace").strip()


def _who(peer: dict[str, Any]) -> str:
    return f"rank {peer['rank']} ({peer['host']}, process {peer['pid']})"


def _keep_alive(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in KEEP_ALIVE:
        if hasattr(socket, name):  # Linux
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
