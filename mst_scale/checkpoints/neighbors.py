"""Sends a rank's part of a copy in memory to a host next to its own, so that the copy outlives the loss of a host.

    host A: writers 0, 1  →  host B: writers 2, 3  →  host C: writers 4, 5  →  host A

Hosts form a ring in the order of their ranks. Each rank opens a port, at which its writer listens, and the ranks tell
each other all ports and a random key once. A connection is accepted from those that know the key (HMAC), and carries
JSON and bytes. If a neighbor does not answer in time, only its copies are lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import shutil
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from mst_scale.checkpoints import manifests, memory_copies
from mst_scale.comm import Ranks

CHUNK = 4 << 20  # bytes
SECONDS = 20.0  # for which a connection may make no progress
REST_SECONDS = 60.0  # until a neighbor that did not answer is tried again


@dataclass(frozen=True)
class Neighbor:
    """The rank on another host whose writer keeps this rank's parts."""

    host: str
    """For messages."""
    address: str
    port: int
    key: bytes


@dataclass(frozen=True)
class Listen:
    """Asks a writer to keep the parts that writers of another host send."""

    descriptor: int
    """Of the open port."""
    key: bytes
    folder: str
    """Of the parts that this host has."""


class Ring:
    """This rank's place among the hosts of a run.

    Args:
        ranks: all ranks, which create this together.
        hosts: the host of each rank.

    Attributes:
        neighbor: the rank that keeps this rank's parts.
        listener: the port at which this rank's writer is reached.
        key: what all writers of the run know.
    """

    def __init__(self, ranks: Ranks, hosts: list[str]):
        self.listener = ranks.agree(_open_port)
        self.key: bytes = ranks.on_first(lambda: os.urandom(32))
        places = ranks.all((ranks.agree(_own_address), int(self.listener.getsockname()[1])))
        number = neighbor_of(ranks.rank, hosts)
        address, port = places[number]
        self.neighbor = Neighbor(hosts[number], address, port, self.key)


def neighbor_of(rank: int, hosts: list[str]) -> int:
    """Return the rank on the next host that keeps the parts of a rank; hosts with few ranks keep several per rank."""
    order = list(dict.fromkeys(hosts))
    following = order[(order.index(hosts[rank]) + 1) % len(order)]
    there = [other for other, host in enumerate(hosts) if host == following]
    return there[hosts[:rank].count(hosts[rank]) % len(there)]


def _open_port() -> socket.socket:
    try:
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):  # a machine without IPv6
        return socket.create_server(("", 0))


def _own_address() -> str:
    """Return the address at which other hosts reach this one: that of the network in which rank 0 is reached."""
    first = os.environ.get("MASTER_ADDR", "127.0.0.1")
    family, kind, _, _, place = socket.getaddrinfo(first, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # sends nothing
        own = str(probe.getsockname()[0])
    return first if ipaddress.ip_address(own).is_loopback else own  # rank 0's own host may call itself 127.0.1.1


class Link:
    """The connection of a writer to the one that keeps its parts, made when it is needed."""

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._rest_until = 0.0

    def send(self, neighbor: Neighbor, part: Path, keep: str | None) -> bool:
        """Send a part, unless the neighbor has just not answered; return whether it was sent.

        Args:
            neighbor: who gets it.
            part: the folder of the part.
            keep: the tag of the copy that the neighbor keeps with it.

        Raises:
            OSError: if the neighbor cannot be reached, or cannot keep it.
        """
        if time.monotonic() < self._rest_until:
            return False
        try:
            answer = self._exchange(neighbor, part, keep)
        except (OSError, EOFError, AuthenticationError) as error:
            self.close()
            self._rest_until = time.monotonic() + REST_SECONDS
            why = "it does not answer" if isinstance(error, BlockingIOError) else str(error) or "it has ended"
            raise OSError(f"{neighbor.host} ({neighbor.address}) cannot be reached: {why}") from None
        if answer:
            raise OSError(f"{neighbor.host}: {answer}")
        return True

    def _exchange(self, neighbor: Neighbor, part: Path, keep: str | None) -> str:
        if self._connection is None:
            place = (neighbor.address, neighbor.port)
            self._connection = _bounded(socket.create_connection(place, timeout=SECONDS))
            answer_challenge(self._connection, neighbor.key)
            deliver_challenge(self._connection, neighbor.key)
        connection, head = self._connection, manifests.head(part)
        assert head is not None
        connection.send_bytes(json.dumps({"head": head, "keep": keep}).encode())
        for name, entry in head["files"].items():
            with (part / name).open("rb") as file:
                for _ in range(_messages_of(entry)):
                    connection.send_bytes(file.read(CHUNK))
        return connection.recv_bytes().decode()

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def listen(wanted: Listen) -> None:
    """Keep what arrives at a port, on threads that end with the process."""
    listener = socket.socket(fileno=wanted.descriptor)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_serve, args=(connection, wanted), daemon=True).start()

    threading.Thread(target=accept, name="mst_scale neighbors", daemon=True).start()


def _serve(accepted: socket.socket, wanted: Listen) -> None:
    with contextlib.suppress(OSError, EOFError, AuthenticationError), _bounded(accepted) as connection:
        deliver_challenge(connection, wanted.key)
        answer_challenge(connection, wanted.key)
        while connection.poll(None):
            message = json.loads(connection.recv_bytes())
            connection.send_bytes(_receive(connection, Path(wanted.folder), **message).encode())


def _receive(connection: Connection, folder: Path, head: dict[str, Any], keep: str | None) -> str:
    """Keep a part that arrives; return why this is not possible, or nothing. All of it is read in either case.

    Raises:
        EOFError: if the connection breaks.
    """
    messages, problem = _arriving(connection, sum(map(_messages_of, head["files"].values()))), ""
    try:
        _keep(messages, folder, head, keep)
    except OSError as error:
        problem = str(error)
    for _ in messages:
        pass
    return problem


def _keep(messages: Iterator[bytes], folder: Path, head: dict[str, Any], keep: str | None) -> None:
    draft = memory_copies.begin_part(folder, head, keep)
    try:
        for name, entry in head["files"].items():
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            digest = hashlib.sha256()
            with (draft / name).open("wb") as file:
                for _ in range(_messages_of(entry)):
                    digest.update(content := next(messages))
                    file.write(content)
            if digest.hexdigest() != entry["sha256"]:
                raise OSError(f"{name} has arrived damaged")
        memory_copies.complete_part(draft, head)
    except (OSError, EOFError):
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _messages_of(entry: dict[str, Any]) -> int:
    """Return in how many messages a file of this size is sent."""
    return -(-int(entry["bytes"]) // CHUNK)


def _arriving(connection: Connection, number: int) -> Iterator[bytes]:
    for _ in range(number):
        try:
            yield connection.recv_bytes()
        except OSError as error:  # the caller's own OSErrors are those of its memory
            raise EOFError(str(error)) from error


def _bounded(connection: socket.socket) -> Connection:
    """Return a connection whose reads and writes fail if there is no progress for a while."""
    connection.settimeout(None)
    limit = struct.pack("@ll", int(SECONDS), 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    return Connection(connection.detach())
