"""What a connection may cost before its request reaches the application: bytes of the request's head, time, and the
number of connections. A client that asks for more is answered by an error, once, and its connection is closed."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vllm_blend.entrypoints.openai.errors import APIError

logger = logging.getLogger(__name__)

LINGER_SECONDS = 2.0  # how long a refused client may go on sending before its connection is closed: it reads then
LINGER_BYTES = 1 << 20  # and how much
LEAST_READ_BYTES = 1 << 14  # that a client must read of an answer within the limit
FIELD_BYTES = 4  # that a header has besides its name and value


@dataclass(frozen=True)
class ConnectionLimits:
    """How much a connection may take. `head_bytes` are those of a request's first line and headers together.
    `write_seconds` is the time in which a client must read some of an answer that waits for it."""

    head_bytes: int
    num_headers: int
    head_seconds: float
    num_connections: int
    write_seconds: float


class _Refused(Exception):
    """Stops the parser: the request has been refused."""


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol over httptools, with limits. Neither has any: an endless line would be kept, and copied again
    with every packet."""

    def __init__(
        self, *args: Any, limits: ConnectionLimits, on_refused: Callable[[int], None], **settings: Any
    ) -> None:
        """`on_refused` gets the status of every request that is refused here."""
        super().__init__(*args, **settings)
        self.limits, self._on_refused = limits, on_refused
        self._head_bytes = self._num_headers = 0  # of this request, as far as the parser has told of it
        self._unreported = 0  # bytes that the parser keeps to itself: those of a line without an end
        self._has_news = self._in_url = False
        self._timer: asyncio.TimerHandle | None = None  # ends a connection that is silent, or whose head takes too long
        self._refused = False
        self._dropped = 0  # bytes that came after the refusal
        self._stall_timer: asyncio.TimerHandle | None = None  # while what is written waits for the client
        self._num_unread = 0  # bytes that waited when it was set

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()
        if len(self.connections) > self.limits.num_connections:
            self._refuse(503, f"{self.limits.num_connections} connections are open, as many as may (--max-connections)")
            self.transport.close()  # without lingering, which would keep others out

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Wait until the client has read most of what is written: the application does not write meanwhile."""
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._dropped += len(data)
            if self._dropped > LINGER_BYTES:
                self.transport.close()
            return
        self._has_news = False
        super().data_received(data)
        if self._has_news:
            self._unreported = 0
        else:
            self._unreported += len(data)
            if self._head_bytes + self._unreported > self.limits.head_bytes:
                self._refuse_head()
        if not self._is_answering and self.timeout_keep_alive_task is None:
            self._await_head()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that the parser does not take, unless it was refused already."""
        self._refuse(400, f"this is no HTTP request: {msg}")

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing of a client that asks for a WebSocket: it gets the answer to a plain request."""

    def on_message_begin(self) -> None:
        self._head_bytes = self._num_headers = 0
        self._in_url = self._has_news = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or a trailer behind a body in chunks."""
        self._in_url = False
        self._num_headers += 1
        self._count(len(name) + len(value) + FIELD_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._has_news, self._in_url = True, False
        self._stop_timer()
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self._has_news = True

    def on_body(self, body: bytes) -> None:
        self._has_news = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_news = True
        super().on_message_complete()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _count(self, num_bytes: int) -> None:
        self._has_news = True
        self._head_bytes += num_bytes
        if self._head_bytes > self.limits.head_bytes or self._num_headers > self.limits.num_headers:
            self._refuse_head()
            raise _Refused

    def _await_head(self) -> None:
        if self._timer is None and not self._refused:
            self._timer = self.loop.call_later(self.limits.head_seconds, self._on_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _await_reading(self) -> None:
        self._num_unread = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self.limits.write_seconds, self._on_stalled)

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _on_stalled(self) -> None:
        if self._num_unread - self.transport.get_write_buffer_size() >= LEAST_READ_BYTES:
            self._await_reading()
            return
        logger.info(
            "a client has read less than %d bytes in %g s (--write-timeout): its connection is cut",
            *(LEAST_READ_BYTES, self.limits.write_seconds),
        )
        self.transport.abort()  # a connection that is closed in good order would wait for the client, too

    def _on_late(self) -> None:
        self._timer = None
        if self._is_answering:  # what runs is not cut off because the next request is slow
            self._await_head()
        elif self._head_bytes or self._unreported:
            self._refuse(408, f"the request's headers took more than {self.limits.head_seconds:g} s: send them at once")
        else:
            self.transport.close()

    def _refuse_head(self) -> None:
        limits = self.limits
        if self._num_headers > limits.num_headers:
            self._refuse(431, f"there are more than {limits.num_headers} headers (--max-header-count): send fewer")
        elif self._in_url:
            self._refuse(414, f"the URL has more than {limits.head_bytes} bytes (--max-header-size): send a body")
        else:
            self._refuse(431, f"the headers have more than {limits.head_bytes} bytes (--max-header-size): send less")

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error, and close the connection when the client has had time to read it."""
        if self._refused:
            return
        self._refused = True
        self._stop_timer()
        self._on_refused(status)
        if self._is_answering:  # an answer is being written, which an error would break into
            self.transport.close()
            return
        body = json.dumps(APIError(status, message).body).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        # A connection that is closed with bytes unread is reset, and the client may never see the answer.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)


def limited_protocol(limits: ConnectionLimits, on_refused: Callable[[int], None]) -> Any:
    """Return what makes a protocol with limits, as uvicorn takes it for a class of protocols."""
    return partial(LimitedProtocol, limits=limits, on_refused=on_refused)
