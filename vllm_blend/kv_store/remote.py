"""Chunk KV on a server that many machines share: one value a chunk, serialized as on the disk.

Names are `vllm-blend/<model digest>/<chunk key>`. What is evicted, and when, is the server's own affair. It is not
trusted, and it is not waited for: a chunk that is damaged, late or of another model is a miss, and a server that
fails several times in a row is left alone for some seconds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import TypeVar, get_args

from vllm_blend.kv_store.breaker import Breaker
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.objects import Rejected, open_objects
from vllm_blend.kv_store.quantization import NotQuantizable
from vllm_blend.kv_store.serialization import (
    ChunkFault,
    ChunkLayout,
    StoredFormat,
    check_key,
    from_bytes,
    is_key,
    max_bytes_of,
    serialize,
    to_bytes,
)
from vllm_blend.kv_store.tally import Tally
from vllm_blend.kv_store.validation import ExpectedChunk
from vllm_blend.urls import redact_secrets, redact_url

logger = logging.getLogger(__name__)

MAX_CALLS = 16  # at a time, those included that nobody waits for any more

T = TypeVar("T")


@dataclass(frozen=True)
class RemoteStoreConfig:
    """Which server, and how long to bear with it."""

    url: str = field(repr=False)  # redis://, rediss://, valkey://, unix:// or anything that fsspec knows
    model: str  # ModelFingerprint.digest
    format: StoredFormat = "auto"
    timeout: float = 5.0  # seconds, of every call
    max_failures: int = 3  # in a row, until the server is left alone
    retry_seconds: float = 10.0
    exact: bool = False  # what others stored in int8 or fp8 is a miss

    def __post_init__(self) -> None:
        for name in ("timeout", "max_failures", "retry_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if self.format not in get_args(StoredFormat):
            raise ValueError(f"format={self.format!r} must be one of {', '.join(get_args(StoredFormat))}")
        if not is_key(self.model):
            raise ValueError(f"model={self.model!r} must be a ModelFingerprint.digest: 32 hex digits")


class _Unavailable(Exception):
    """The server did not answer, or was not asked."""


class RemoteChunkStore:
    """Safe to use from several threads. `get`, `put`, `remove` and `in` raise nothing that the server or the network
    brings about: they miss, or do not store, and count it (`tally`)."""

    def __init__(self, config: RemoteStoreConfig) -> None:
        self.config, self.tally = config, Tally()
        self._objects = open_objects(config.url, config.timeout)
        self._breaker = Breaker(
            f"remote chunk store {redact_url(config.url)}",
            "chunks are computed again",
            config.max_failures,
            config.retry_seconds,
            self._redact,
        )
        self._calls = threading.BoundedSemaphore(MAX_CALLS)
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    def __contains__(self, key: str) -> bool:
        try:
            return is_key(key) and self._ask(lambda: self._objects.exists(self._name(key)))
        except (_Unavailable, Rejected):
            return False

    @property
    def num_hits(self) -> int:
        return self.tally.num_hits

    @property
    def num_misses(self) -> int:
        return self.tally.num_misses

    def get(self, key: str, expected: ExpectedChunk | None = None) -> ChunkKV | None:
        """Return a chunk in memory of its own, or None. A chunk that is not the expected one is a miss."""
        most = None if expected is None else max_bytes_of(expected)
        try:
            data = self._ask(lambda: self._objects.get(self._name(key), most)) if is_key(key) else None
        except _Unavailable:
            self.tally.miss("unavailable")
            return None
        except Rejected as error:
            self.tally.miss("rejected")
            self._warn_once("rejected", "%s refuses: %s", self._breaker.what, self._redact(str(error)))
            return None
        if data is None:
            self.tally.miss("absent")
            return None
        try:
            chunk = from_bytes(data, key, self.config.model, self.config.exact, expected)
        except ChunkFault as fault:
            self.tally.miss(fault.kind)
            self._warn_once(key, "stored chunk %s not used, it will be computed again: %s", key, fault)
            self.remove(key)
            return None
        self.tally.hit(len(data))
        return chunk

    def put(self, key: str, chunk: ChunkKV) -> ChunkKV:
        """Store a chunk, and return when the server has it. Returns `chunk`, which is not kept.

        Raises ValueError for a key or KV that no store could keep.
        """
        check_key(key)
        layout = ChunkLayout.of(chunk, self.config.format)
        refused = self._store(key, chunk, layout)
        if refused is not None:
            self.tally.refuse(refused)
        return chunk

    def remove(self, key: str) -> None:
        """Drop a chunk; nothing happens when it is not there, or the server is not."""
        if not is_key(key):
            return
        try:
            self._ask(lambda: self._objects.delete(self._name(key)))
        except (_Unavailable, Rejected) as error:
            logger.debug("chunk %s was not removed: %s", key, self._redact(str(error)))

    def _store(self, key: str, chunk: ChunkKV, layout: ChunkLayout) -> str | None:
        """None, or why the chunk is not stored."""
        limit = self._objects.max_bytes
        if limit is not None and layout.payload_bytes >= limit:
            self._warn_once("too_large", "chunks of %d bytes and more are not stored on %s", limit, self._breaker.what)
            return "too_large"
        if not self._breaker.allows():
            return "unavailable"
        try:
            data = to_bytes(serialize(key, self.config.model, chunk, layout))
            self._call(lambda: self._objects.put(self._name(key), data))
        except NotQuantizable as error:
            self._warn_once("not_quantizable", "chunk %s is not stored: %s", key, error)
            return "not_quantizable"
        except Rejected as error:
            self._warn_once("rejected", "%s refuses: %s", self._breaker.what, self._redact(str(error)))
            return "rejected"
        except _Unavailable:
            return "unavailable"
        self.tally.stored(len(data))
        return None

    def _name(self, key: str) -> str:
        return f"vllm-blend/{self.config.model}/{key}"

    def _ask(self, operation: Callable[[], T]) -> T:
        """`_call`, unless the server is left alone."""
        if not self._breaker.allows():
            raise _Unavailable("it failed before")
        return self._call(operation)

    def _call(self, operation: Callable[[], T]) -> T:
        """The answer to an operation. Raises Rejected, and _Unavailable where there is no answer in time.

        Every call has a thread: no client, of whatever protocol, can keep anybody waiting for longer.
        """
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(operation())
            except BaseException as error:  # handed over to whoever waits
                answer.set_exception(error)
            finally:
                self._calls.release()

        try:
            if not self._calls.acquire(timeout=self.config.timeout):
                raise TimeoutError(f"{MAX_CALLS} calls wait for an answer already")
            threading.Thread(target=run, name="remote-chunk", daemon=True).start()
            error = _error_of(answer, self.config.timeout)
        except Exception as failure:  # there is no thread, or no answer
            error = failure
        if isinstance(error, Rejected):
            self._breaker.succeeded()
            raise error
        if error is not None:
            self._breaker.failed(error)
            raise _Unavailable from error
        self._breaker.succeeded()
        return answer.result()

    def _redact(self, text: str) -> str:
        return redact_secrets(text, self.config.url)

    def _warn_once(self, kind: str, message: str, *arguments: object) -> None:
        with self._lock:
            first = kind not in self._warned
            self._warned.add(kind)
        if first:
            logger.warning(message, *arguments)


def _error_of(answer: Future, timeout: float) -> BaseException | None:
    try:
        return answer.exception(timeout)
    except FutureTimeout as error:
        raise TimeoutError(f"no answer in {timeout:g} s") from error
