"""Connections of Python's multiprocessing over TCP, between ranks that may be on several machines.

Both ends prove that they know a key before anything is unpickled. What follows is not encrypted, like the tensors.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0  # in which a caller has to prove itself
DIAL_SECONDS = 120.0  # in which rank 0 has to answer: it hears callers one after another, idle ones too
# A machine that is cut off sends no end of its connections: the system asks after 10 idle seconds, then every 5, and
# gives up 30 s after the last answer, as it does with what was sent and not acknowledged. Linux has all of these.
CUT_OFF = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}


@dataclass(frozen=True)
class Address:
    """Where rank 0 listens, and the key that the others need."""

    host: str
    port: int
    key: bytes = field(repr=False)


class LinkListener:
    """Listens for the other ranks on rank 0."""

    def __init__(self, host: str) -> None:
        """Listen at a free port of one of this machine's addresses. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        self.address = Address(host, self._socket.getsockname()[1], secrets.token_bytes(32))

    def accept(self, timeout: float) -> tuple[int, Connection] | None:
        """Return the next rank that calls, and the connection to it; None if none does within `timeout` seconds."""
        self._socket.settimeout(timeout)
        try:
            peer, _ = self._socket.accept()
        except TimeoutError:
            return None
        link = _connection(peer)
        try:
            with _bounded(link, HANDSHAKE_SECONDS):
                deliver_challenge(link, self.address.key)
                answer_challenge(link, self.address.key)
                rank = link.recv()
        except (OSError, EOFError, AuthenticationError) as error:  # a scan of ports, for example
            logger.warning("a connection that is not from a rank is closed (%s: %s)", type(error).__name__, error)
            link.close()
            return None
        return rank, link

    def close(self) -> None:
        self._socket.close()


def dial(address: Address, rank: int) -> Connection:
    """Return the connection of another rank to rank 0. Raises OSError, EOFError or AuthenticationError."""
    link = _connection(socket.create_connection((address.host, address.port), HANDSHAKE_SECONDS))
    try:
        with _bounded(link, DIAL_SECONDS):
            answer_challenge(link, address.key)
            deliver_challenge(link, address.key)
        link.send(rank)
    except BaseException:
        link.close()
        raise
    return link


def _connection(peer: socket.socket) -> Connection:
    peer.setblocking(True)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a step must not wait for the one before it
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in CUT_OFF.items():
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(peer.detach())


@contextmanager
def _bounded(link: Connection, seconds: float) -> Iterator[None]:
    """Cut the connection off if what is done with it takes longer: reading is an EOFError then. (A limit for each read
    would not end a caller that sends a byte now and then.)"""
    with socket.fromfd(link.fileno(), socket.AF_INET, socket.SOCK_STREAM) as same:
        timer = threading.Timer(seconds, _cut_off, (same,))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def _cut_off(peer: socket.socket) -> None:
    with suppress(OSError):  # the other end has been quicker
        peer.shutdown(socket.SHUT_RDWR)
