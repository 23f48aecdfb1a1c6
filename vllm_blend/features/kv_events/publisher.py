"""Sends batches of events to subscribers, from a thread of its own: the step loop never waits for one of them.

The step loop puts batches into a queue, and gives each the next number. If the queue is full, the oldest batch leaves
it unsent. Subscribers see the gap in the numbers, and can ask for what they missed: it is kept with what was sent.
"""

from __future__ import annotations

import errno
import logging
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from vllm_blend.features.kv_events.config import ZEROMQ_MAX, KVEventsConfig, is_bound
from vllm_blend.features.kv_events.events import EventBatch, wire_form

logger = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
LINGER_MS = 1000  # how long sockets that are closed go on sending what they have
CLOSE_SECONDS = 5.0  # how long closing waits for the thread
# What replays may take of the engine's process, whose interpreter they share, and of its memory:
REPLAYED_PER_SECOND = 20_000  # messages, to all clients together: the next request waits until they are made up for
REQUESTS_WAITING = 16  # of one client; what it sends beyond them waits on its own side
REQUEST_BYTES = 256  # of a frame of a request, which needs 8: a client that sends a larger one is disconnected


@dataclass
class NumberedBatch:
    """A batch and its place in the stream. It is encoded by the thread that sends it.

    The payload is a message of ZeroMQ, which all sockets and clients share: one that waits in many queues takes its
    bytes once.
    """

    number: int
    batch: EventBatch
    payload: zmq.Frame | None = None


class ZmqPublisher:
    """A PUB socket for batches, and a ROUTER socket at which subscribers ask for earlier ones.

    Raises ValueError if an endpoint cannot be used.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        self._config, self._topic = config, config.topic.encode()
        self._queue: deque[NumberedBatch] = deque()
        self._history: deque[NumberedBatch] = deque(maxlen=config.buffer_steps)  # those that have left the queue
        self._lock = threading.Lock()  # of both; never held while anything is encoded or sent
        self._next_number = 0
        self._is_closing = False
        self.num_dropped = 0
        self._num_ignored = 0  # requests that are none
        self._replay_at = 0.0  # time.monotonic() before which no request is read
        self._encoder = msgspec.msgpack.Encoder()
        self._sockets: list[zmq.Socket[bytes]] = []
        # Terminating a context of its own waits until the ports are free again. Subscribers in this process, at
        # inproc:// addresses, must have the same context.
        inproc = any(each.startswith("inproc://") for each in (config.endpoint, config.replay_endpoint or ""))
        self._context: zmq.Context[Any] = zmq.Context.instance() if inproc else zmq.Context()
        self._owns_context = not inproc
        try:
            self._events = self._open(zmq.PUB, "endpoint", config.endpoint, config.hwm, is_bound(config.endpoint))
            self._replay: zmq.Socket[bytes] | None = None
            if config.replay_endpoint is not None:
                # What a client that does not read may leave waiting. A whole answer has buffer_steps + 1 messages, and
                # ZeroMQ may take up to half of its limit of those read before for unread: more would be dropped.
                waiting = min(2 * config.buffer_steps + 1, ZEROMQ_MAX)
                options = {zmq.RCVHWM: REQUESTS_WAITING, zmq.MAXMSGSIZE: REQUEST_BYTES}
                self._replay = self._open(zmq.ROUTER, "replay_endpoint", config.replay_endpoint, waiting, True, options)
        except BaseException:
            self._close_sockets(linger=0)
            raise
        # The addresses, with the port where any free one was asked for.
        self.endpoint = _address(self._events, config.endpoint)
        self.replay_endpoint = None if self._replay is None else _address(self._replay, str(config.replay_endpoint))
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        replayed = "nowhere" if self.replay_endpoint is None else f"at {self.replay_endpoint}"
        logger.info("KV events are published at %s, and replayed %s", self.endpoint, replayed)

    @property
    def num_published(self) -> int:
        """Return how many batches there have been, including those that were dropped."""
        return self._next_number

    def publish(self, batch: EventBatch) -> None:
        """Queue a batch, without delay. Call this from one thread at a time.

        A batch that comes when the publisher is closed, or its thread has ended, is dropped and counted.
        """
        with self._lock:
            if self._is_closing:
                self._next_number += 1
                self.num_dropped += 1
                return
            is_full = len(self._queue) >= self._config.max_queue_size
            if is_full:
                self._history.append(self._queue.popleft())
                self.num_dropped += 1
            self._queue.append(NumberedBatch(self._next_number, batch))
            self._next_number += 1
        if is_full and self.num_dropped.bit_count() == 1:  # 1, 2, 4, 8 ...: not a line for each
            logger.warning(
                "%d batches of KV events have left the queue unsent, as it is full: raise max_queue_size=%d in "
                "kv_events_config. Subscribers can ask for them at replay_endpoint",
                self.num_dropped,
                self._config.max_queue_size,
            )
        self._wake()

    def close(self) -> None:
        """Send what is queued and close the sockets."""
        self._is_closing = True
        self._wake()
        if threading.current_thread() is not self._thread:  # which may collect an engine that was dropped
            self._thread.join(CLOSE_SECONDS)

    def _wake(self) -> None:
        try:
            self._waker.send(b"\0")
        except BlockingIOError:
            pass  # so much is unread that the thread wakes in any case
        except OSError:
            if not self._is_closing:
                raise

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        try:
            while True:
                pause = max(0.0, self._replay_at - time.monotonic())
                if self._replay is not None:
                    poller.register(self._replay, 0 if pause else zmq.POLLIN)  # 0 leaves it out
                ready = dict(poller.poll(math.ceil(1000 * pause) or None))
                is_closing = self._is_closing  # before the queue is read: what is put in later is not promised
                if self._woken.fileno() in ready:
                    self._woken.recv(1 << 16)
                self._send_queued()
                if self._replay is not None and self._replay in ready:
                    self._answer(self._replay)
                if is_closing:
                    return
        except zmq.ContextTerminated:
            logger.warning("KV events end here: ZeroMQ's context of this process was terminated")
        finally:
            with self._lock:
                self._is_closing = True
                self.num_dropped += len(self._queue)  # of a thread that an error has ended
                self._queue.clear()
            self._close_sockets(LINGER_MS)
            self._woken.close()
            self._waker.close()

    def _open(
        self,
        kind: int,
        field: str,
        endpoint: str,
        waiting: int,
        bind: bool,
        options: Mapping[zmq.SocketOption, int] | None = None,
    ) -> zmq.Socket[bytes]:
        """Return a socket at an endpoint. Raises ValueError naming the field of the configuration."""
        made: zmq.Socket[bytes] = self._context.socket(kind)
        self._sockets.append(made)
        made.setsockopt(zmq.SNDHWM, waiting)
        for option, value in (options or {}).items():
            made.setsockopt(option, value)
        made.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            made.bind(endpoint) if bind else made.connect(endpoint)
        except zmq.ZMQError as error:
            fix = {
                errno.EADDRINUSE: "another engine or program listens there; give this engine an address of its own",
                errno.ENODEV: "use an address of this machine, such as tcp://*:5557",
                errno.EACCES: "this user may not listen there; use another address",
            }.get(error.errno or 0, "use an address such as tcp://*:5557")
            raise ValueError(f"kv_events_config: {field}={endpoint!r} cannot be used ({error}): {fix}") from error
        return made

    def _close_sockets(self, linger: int) -> None:
        for opened in self._sockets:
            opened.close(linger)
        if self._owns_context:
            self._context.term()

    def _send_queued(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    return
                first = self._queue.popleft()
                self._history.append(first)
            # A PUB socket never blocks: it drops what a subscriber with `hwm` waiting batches has no room for.
            self._events.send_multipart((self._topic, first.number.to_bytes(8, "big"), self._encoded(first)))

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Send the batches from a requested number on that have left the queue, and the end marker.

        This never waits: ROUTER drops what a client that does not read has no room for.
        """
        frames = replay.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            self._num_ignored += 1
            if self._num_ignored.bit_count() == 1:  # 1, 2, 4, 8 ...: not a line for each
                logger.warning(
                    "%d requests for KV events were ignored: one must be an empty frame and the first number wanted, "
                    "as 8 bytes, most significant first; the last had frames of %s bytes",
                    self._num_ignored,
                    [len(frame) for frame in frames[1:9]],
                )
            self._rest(1)
            return
        client, start = frames[0], int.from_bytes(frames[2], "big")
        with self._lock:
            wanted = [each for each in self._history if each.number >= start]
        for each in wanted:
            replay.send_multipart((client, b"", each.number.to_bytes(8, "big"), self._encoded(each)))
        replay.send_multipart((client, b"", END_OF_REPLAY, b""))
        self._rest(len(wanted) + 1)

    def _rest(self, num_messages: int) -> None:
        """Read no other request for as long as so many messages are allowed to take."""
        self._replay_at = time.monotonic() + num_messages / REPLAYED_PER_SECOND

    def _encoded(self, numbered: NumberedBatch) -> zmq.Frame:
        if numbered.payload is None:
            encoded = self._encoder.encode(wire_form(numbered.batch, self._config.encoding))
            numbered.payload = zmq.Frame(encoded, copy=False)  # also below pyzmq's threshold of 64 KiB
            numbered.batch = EventBatch(numbered.batch.time, ())  # the payload has it all
        return numbered.payload


def _address(opened: zmq.Socket[bytes], endpoint: str) -> str:
    return opened.getsockopt_string(zmq.LAST_ENDPOINT) if "*" in endpoint else endpoint
