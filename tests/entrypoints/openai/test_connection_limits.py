"""Connections that ask for too much: endless URLs and headers, too many of them, silent and slow ones."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from tests.clock import run_in_virtual_time
from tests.entrypoints.openai.servers import fake_engine, serving
from tests.waiting import DEADLINE
from vllm_blend.entrypoints.openai.connection import (
    LEAST_READ_BYTES,
    LINGER_BYTES,
    ConnectionLimits,
    LimitedProtocol,
)
from vllm_blend.entrypoints.openai.generation import MAX_OUTPUTS_WAITING, Generation
from vllm_blend.entrypoints.openai.metrics import Recorder
from vllm_blend.entrypoints.openai.middleware import RequestContext
from vllm_blend.entrypoints.openai.run import OTHER_FILES, allow_files
from vllm_blend.entrypoints.openai.tenancy import Tenants
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.outputs import CompletionOutput, RequestOutput
from vllm_blend.sampling_params import SamplingParams

pytestmark = pytest.mark.cpu_only

LIMIT, MAX_HEADERS = 4096, 8
PIECE = 1024
WRITE_SECONDS = 30.0
KEYS: dict[str, Any] = {"api_key": ["k"]}  # without them the server would ask the engine for its tokenizer
HEAD = b"GET /ping HTTP/1.1\r\nHost: a\r\n"
CHUNKED = b"POST /ping HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.is_closed, self.is_aborted, self.num_waiting = b"", False, False, 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True

    def get_write_buffer_size(self) -> int:
        return self.num_waiting

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Counting:
    """A parser that counts what it is fed."""

    def __init__(self, parser: Any) -> None:
        self.parser, self.num_fed = parser, 0

    def feed_data(self, data: bytes) -> None:
        self.num_fed += len(data)
        self.parser.feed_data(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.parser, name)


async def _answer(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


def connect(statuses: list[int]) -> tuple[LimitedProtocol, Transport, Counting]:
    limits = ConnectionLimits(LIMIT, MAX_HEADERS, DEADLINE, 1, WRITE_SECONDS)
    config = uvicorn.Config(cast(Any, _answer), log_config=None, ws="none")
    protocol = LimitedProtocol(config, ServerState(), {}, limits=limits, on_refused=statuses.append)
    parser = Counting(protocol.parser)
    protocol.parser = cast(Any, parser)
    transport = Transport()
    protocol.connection_made(transport)
    return protocol, transport, parser


@pytest.mark.parametrize(
    ("begin", "piece", "status"),
    [
        pytest.param(b"GET /", b"a" * PIECE, 414, id="url"),
        pytest.param(HEAD + b"X: ", b"a" * PIECE, 431, id="value"),
        pytest.param(HEAD, b"a" * PIECE, 431, id="name"),
        pytest.param(HEAD, b"X: " + b"a" * PIECE + b"\r\n", 431, id="headers"),
        pytest.param(HEAD, b"X: y\r\n", 431, id="small headers"),
        pytest.param(b"", b"\r\n" * PIECE, 431, id="line ends"),
        pytest.param(CHUNKED + b"1;", b"a" * PIECE, 431, id="extension of a chunk"),
        pytest.param(CHUNKED + b"1\r\na\r\n0\r\nX: ", b"a" * PIECE, 431, id="trailer"),
        pytest.param(CHUNKED + b"1\r\na\r\n0\r\n", b"X: " + b"a" * PIECE + b"\r\n", 431, id="trailers"),
        pytest.param(b"nonsense ", b"", 400, id="another protocol"),
    ],
)
def test_what_has_no_end_is_refused_once(begin: bytes, piece: bytes, status: int) -> None:
    """The parser gets no more than the limit and what two packets hold, so that cost does not grow with what is sent.
    The connection is closed when the client has sent more than a fair rest."""

    async def flood() -> None:
        statuses: list[int] = []
        protocol, transport, parser = connect(statuses)
        protocol.data_received(begin)
        for _ in range(4 * LIMIT // max(len(piece), 1)):
            protocol.data_received(piece or b"x")
            await asyncio.sleep(0)
        assert statuses == [status]
        assert parser.num_fed <= LIMIT + len(begin) + 2 * len(piece) + 1
        if begin.startswith(CHUNKED):  # its request runs: no answer may break into another
            assert b" 431 " not in transport.written and transport.is_closed
        else:
            head, _, body = transport.written.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status) and b"connection: close" in head
            assert json.loads(body)["error"]["message"]
            assert not transport.is_closed
            protocol.data_received(b"a" * (LINGER_BYTES + 1))
            assert transport.is_closed
        protocol.connection_lost(None)

    asyncio.run(flood())


def test_requests_within_the_limits_are_answered_however_they_are_cut() -> None:
    """Several on one connection, byte by byte and all at once, with bodies and trailers longer than the limit of a
    head."""
    largest = HEAD + b"".join(b"X-%d: %s\r\n" % (index, b"a" * 500) for index in range(MAX_HEADERS - 1)) + b"\r\n"
    assert len(largest) < LIMIT
    chunked = (
        CHUNKED + b"".join(b"400;x=%d\r\n%s\r\n" % (index, b"b" * 1024) for index in range(10)) + b"0\r\nX: y\r\n\r\n"
    )
    requests = (largest, chunked, largest)

    async def send(pieces: Callable[[], Iterator[bytes]]) -> None:
        statuses: list[int] = []
        protocol, transport, _ = connect(statuses)
        for piece in pieces():
            protocol.data_received(piece)
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert transport.written.count(b"HTTP/1.1 200 OK") == len(requests) and statuses == []
        protocol.connection_lost(None)

    whole = b"".join(requests)
    asyncio.run(send(lambda: iter([whole])))
    asyncio.run(send(lambda: iter(requests)))
    asyncio.run(send(lambda: (whole[at : at + 1] for at in range(len(whole)))))


@contextmanager
def client_of(url: str) -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE) as client:
        yield client


def read_all(client: socket.socket) -> bytes:
    text = b""
    while piece := client.recv(1 << 16):
        text += piece
    return text


def test_silent_and_slow_clients_are_sent_away() -> None:
    with serving(fake_engine(), header_timeout=0.2, body_timeout=0.2, timeout_keep_alive=1, **KEYS) as url:
        with client_of(url) as silent:
            assert read_all(silent) == b""
        with client_of(url) as slow:
            slow.sendall(b"GET /ping HTTP/1.1\r\nHost")
            assert read_all(slow).startswith(b"HTTP/1.1 408 ")
        with client_of(url) as slow:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer k\r\nContent-Length: 9\r\n\r\n"
            slow.sendall(head + b"{")
            answer = read_all(slow)
            assert answer.startswith(b"HTTP/1.1 408 ") and b"--body-timeout" in answer
        with client_of(url) as kept:
            for _ in range(2):  # a connection serves again, and is closed when the client has nothing to ask
                kept.sendall(HEAD + b"\r\n")
                assert kept.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            assert read_all(kept) == b""


@pytest.mark.parametrize("first", [LEAST_READ_BYTES, LEAST_READ_BYTES - 1])
def test_a_client_that_does_not_read_is_cut_off(first: int) -> None:
    """It is cut when the time for reading is over, and not before."""

    async def run() -> None:
        now = asyncio.get_running_loop().time
        protocol, transport, _ = connect([])
        transport.num_waiting = 10 * LEAST_READ_BYTES
        protocol.pause_writing()
        for _ in range(3):
            transport.num_waiting -= LEAST_READ_BYTES
            await asyncio.sleep(WRITE_SECONDS + 0.01)
            assert not transport.is_aborted
        transport.num_waiting -= first
        begun = now()
        while not transport.is_aborted and now() < begun + 10 * WRITE_SECONDS:
            await asyncio.sleep(1.0)
        enough = first >= LEAST_READ_BYTES
        assert transport.is_aborted and WRITE_SECONDS * enough <= now() - begun <= WRITE_SECONDS * (1 + enough) + 1
        protocol.connection_lost(None)
        other, transport, _ = connect([])
        other.pause_writing()
        other.resume_writing()
        await asyncio.sleep(10 * WRITE_SECONDS)
        assert not transport.is_aborted, "what has been read in time is forgotten"
        other.connection_lost(None)

    run_in_virtual_time(run())


@pytest.mark.parametrize(("pause", "status"), [(1.0, 200), (13.0, 408)])
def test_a_body_that_trickles_is_cut_off(pause: float, status: int) -> None:
    """Ten pieces have 120 s together. The client's leaving, for which an endpoint waits after that, has any time."""

    async def run() -> list[Message]:
        sent: list[Message] = []
        left = 10

        async def receive() -> Message:
            nonlocal left
            await asyncio.sleep(pause if left else 1e6)
            left -= 1
            return (
                {"type": "http.request", "body": b"x", "more_body": left > 0}
                if left >= 0
                else {"type": "http.disconnect"}
            )

        async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
            while (await receive()).get("more_body"):
                pass
            assert (await receive())["type"] == "http.disconnect"
            await PlainTextResponse("fine")(scope, receive, send)

        async def send(message: Message) -> None:
            sent.append(message)

        app = RequestContext(endpoint, Tenants(), 100, False, lambda _: None, body_timeout=120.0)
        await app({"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}, receive, send)
        assert status == 200 or asyncio.get_running_loop().time() == pytest.approx(120.0)
        return sent

    assert run_in_virtual_time(run())[0]["status"] == status


def test_outputs_are_bounded_while_nobody_reads() -> None:
    made = 0

    async def generate(*_: Any, **__: Any) -> AsyncGenerator[RequestOutput, None]:
        nonlocal made
        while made < 10_000:
            made += 1
            yield RequestOutput("r", None, [1], None, [CompletionOutput(0, "a", [7])], False)
            await asyncio.sleep(0)

    async def run() -> None:
        engine: Any = SimpleNamespace(generate=generate)
        recorder: Any = SimpleNamespace(request=lambda *_: Recorder("m").request(SamplingParams(), 0.0))
        generation = Generation(engine, recorder, "r", [(ParsedPrompt([1]), SamplingParams())])
        async with aclosing(generation.outputs()) as outputs:
            await anext(outputs)
            for _ in range(1000):
                await asyncio.sleep(0)
            assert made <= MAX_OUTPUTS_WAITING + 3

    asyncio.run(run())


def test_connections_beyond_the_limit_are_refused_and_take_no_place() -> None:
    with serving(fake_engine(), max_connections=2, **KEYS) as url, client_of(url) as first:
        first.sendall(HEAD + b"\r\n")
        assert first.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        with client_of(url) as second:
            second.sendall(HEAD + b"\r\n")
            assert second.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            for _ in range(3):
                with client_of(url) as third:
                    answer = read_all(third)
                    assert answer.startswith(b"HTTP/1.1 503 ") and b"--max-connections" in answer
            second.sendall(HEAD + b"\r\n")
            assert second.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("limits", "raised"),
    [((1024, 8192), (100 + OTHER_FILES, 8192)), ((64, 128), (128, 128)), ((-1, -1), None), ((4096, 4096), None)],
)
def test_open_files(
    limits: tuple[int, int],
    raised: tuple[int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The limit on open files is raised for the connections, and what the system does not allow is said."""
    set_to: list[tuple[int, int]] = []
    limits = (200, limits[1]) if limits[0] == 1024 else limits
    fake = SimpleNamespace(
        RLIMIT_NOFILE=resource.RLIMIT_NOFILE,
        RLIM_INFINITY=-1,
        getrlimit=lambda _: limits,
        setrlimit=lambda _, values: set_to.append(values),
    )
    monkeypatch.setattr("vllm_blend.entrypoints.openai.run.resource", fake)
    allow_files(100)
    assert set_to == ([] if raised is None else [raised])
    assert ("the system allows 128 open files" in caplog.text) is (raised == (128, 128))
