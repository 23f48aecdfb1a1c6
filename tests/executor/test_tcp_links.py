"""Connections between ranks on several machines: both ends prove themselves, and neither waits for ever."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from vllm_blend.executor import tcp_links
from vllm_blend.executor.tcp_links import Address, LinkListener, dial

HOST = "127.0.0.1"
SECONDS = 60.0  # for another thread to call, on any machine


@dataclass
class Touch:
    """What makes a file when it is unpickled."""

    path: str

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


@pytest.fixture
def listener() -> Iterator[LinkListener]:
    made = LinkListener(HOST)
    yield made
    made.close()


def call(address: Address, rank: int, results: list[Any]) -> threading.Thread:
    """Call in another thread, which leaves what comes of it."""

    def run() -> None:
        try:
            results.append(dial(address, rank))
        except (OSError, EOFError, AuthenticationError) as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def connected(listener: LinkListener, rank: int) -> tuple[int, Connection, Connection]:
    """Return the rank that a caller gave, the listener's end of its connection, and the caller's."""
    results: list[Any] = []
    thread = call(listener.address, rank, results)
    called = listener.accept(SECONDS)
    thread.join(SECONDS)
    [theirs] = results
    assert called is not None and isinstance(theirs, Connection)
    return *called, theirs


def test_messages_go_both_ways_until_an_end_is_closed(listener: LinkListener) -> None:
    rank, own, theirs = connected(listener, 3)
    assert rank == 3
    large = {"ids": list(range(100_000))}
    sender = threading.Thread(target=own.send, args=(large,))  # larger than what a socket holds
    sender.start()
    assert theirs.recv() == large
    sender.join(SECONDS)
    theirs.send("ready")
    assert own.recv() == "ready" and not own.poll()
    theirs.close()
    with pytest.raises(EOFError):
        own.recv()
    own.close()


def test_both_ends_notice_a_machine_that_is_cut_off(listener: LinkListener) -> None:
    for link in connected(listener, 1)[1:]:
        with socket.fromfd(link.fileno(), socket.AF_INET, socket.SOCK_STREAM) as end:
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            found = {
                name: end.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
                for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            }
        assert found == {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
        link.close()


def test_a_link_waits_longer_than_its_handshake(listener: LinkListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_links, "HANDSHAKE_SECONDS", 1)
    _, own, theirs = connected(listener, 1)
    later = threading.Timer(2.0, own.send, args=("a step",))
    later.start()
    assert theirs.recv() == "a step"
    own.close()
    theirs.close()


def test_a_wrong_key_is_refused_by_both_ends(listener: LinkListener, caplog: pytest.LogCaptureFixture) -> None:
    results: list[Any] = []
    thread = call(replace(listener.address, key=b"x" * 32), 1, results)
    assert listener.accept(SECONDS) is None
    thread.join(SECONDS)
    assert isinstance(results[0], AuthenticationError | EOFError | OSError)
    assert "a connection that is not from a rank is closed" in caplog.text
    assert repr(listener.address) == f"Address(host='{HOST}', port={listener.address.port})"


@pytest.mark.parametrize("answers", [False, True])
def test_a_stranger_s_pickle_is_not_run(listener: LinkListener, tmp_path: Path, answers: bool) -> None:
    """Neither at once nor after the challenge, to which it has no answer."""
    touched = tmp_path / "touched"
    with socket.create_connection((HOST, listener.address.port)) as stranger:
        link = Connection(stranger.detach())
        if answers:
            link.send_bytes(b"{sha256}" + b"x" * 32)
        link.send_bytes(pickle.dumps(Touch(str(touched))))
        assert listener.accept(SECONDS) is None
        link.close()
    assert not touched.exists()
    pickle.loads(pickle.dumps(Touch(str(touched))))
    assert touched.exists()


def test_one_that_says_nothing_is_given_up(listener: LinkListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_links, "HANDSHAKE_SECONDS", 1)
    with socket.create_connection((HOST, listener.address.port)):
        assert listener.accept(SECONDS) is None
    assert listener.accept(0.01) is None


def test_idle_callers_do_not_cost_a_rank_its_place(listener: LinkListener, monkeypatch: pytest.MonkeyPatch) -> None:
    """One says nothing, one sends a byte now and then; the rank that calls behind them waits for its turn."""
    monkeypatch.setattr(tcp_links, "HANDSHAKE_SECONDS", 1.0)
    ended = threading.Event()

    def drip(peer: socket.socket) -> None:
        with suppress(OSError):  # it is cut off
            while not ended.wait(0.2):
                peer.sendall(b"\0")

    results: list[Any] = []
    with ExitStack() as stack:
        idle, dripping = (stack.enter_context(socket.create_connection((HOST, listener.address.port))) for _ in "12")
        dripper = threading.Thread(target=drip, args=(dripping,))
        dripper.start()
        thread = call(listener.address, 1, results)
        assert listener.accept(SECONDS) is None
        assert listener.accept(SECONDS) is None
        called = listener.accept(SECONDS)
        thread.join(SECONDS)
        ended.set()
        dripper.join(SECONDS)
    assert called is not None and called[0] == 1 and idle.fileno() == -1
    for link in (called[1], results[0]):
        link.close()
