"""Chunk KV on a server that many machines share: one value a chunk, serialized as on the disk.

Names are `vllm-blend/<model digest>/<chunk key>`. What is evicted, and when, is the server's own affair. It is not
trusted, and it is not waited for: a chunk that is damaged, late or of another model is a miss, and a server that
fails several times in a row is left alone for some seconds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

from vllm_blend.kv_store.chunk_kv import ChunkKV, ExpectedChunk
from vllm_blend.kv_store.circuit_breaker import CircuitBreaker
from vllm_blend.kv_store.layout import ChunkFault, ChunkLayout
from vllm_blend.kv_store.objects import Rejected, open_objects
from vllm_blend.kv_store.quantization import NotQuantizable
from vllm_blend.kv_store.serialization import check_key, from_bytes, is_key, max_bytes_of, serialize, to_bytes
from vllm_blend.kv_store.stats import StoreStats
from vllm_blend.kv_store.store_config import RemoteStoreConfig
from vllm_blend.kv_store.tiers import Allocate
from vllm_blend.urls import redact_secrets, redact_url

logger = logging.getLogger(__name__)

MAX_CALLS = 16  # at a time, including those whose answer comes too late

T = TypeVar("T")


class _Unavailable(Exception):
    """The server did not answer, or was not asked."""


class RemoteChunkStore:
    """Safe to use from several threads. `get`, `put`, `remove` and `in` raise nothing that the server or the network
    brings about: they miss, or do not store, and count it (`stats`)."""

    max_bytes_at_once = 0

    def __init__(self, config: RemoteStoreConfig) -> None:
        self.config, self.stats = config, StoreStats(logger)
        self._objects = open_objects(config.url, config.timeout)
        self._breaker = CircuitBreaker(
            f"remote chunk store {redact_url(config.url)}",
            "chunks are computed again",
            config.max_failures,
            config.retry_seconds,
            self._redact,
        )
        self._calls = threading.BoundedSemaphore(MAX_CALLS)

    def __contains__(self, key: str) -> bool:
        try:
            return is_key(key) and self._ask(lambda: self._objects.exists(self._name(key)))
        except (_Unavailable, Rejected):
            return False

    def get(self, key: str, allocate: Allocate | None = None, expected: ExpectedChunk | None = None) -> ChunkKV | None:
        """Return a chunk in memory of its own (`allocate` is not used: what a server sends is checked where it
        arrives), or None. A chunk that is not the expected one is a miss."""
        max_bytes = None if expected is None else max_bytes_of(expected)
        try:
            data = self._ask(lambda: self._objects.get(self._name(key), max_bytes)) if is_key(key) else None
        except _Unavailable:
            self.stats.count_miss("unavailable")
            return None
        except Rejected as error:
            self.stats.count_miss("rejected")
            self._warn_of_refusal(error)
            return None
        if data is None:
            self.stats.count_miss("absent")
            return None
        try:
            chunk = from_bytes(data, key, self.config.model, self.config.exact, expected, self.config.signer)
        except ChunkFault as fault:
            self.stats.count_fault(fault.kind, key, key, fault)
            self.remove(key)
            return None
        self.stats.count_hit(len(data))
        return chunk

    def put(self, key: str, chunk: ChunkKV) -> ChunkKV:
        """Store a chunk, and return when the server has it. Returns `chunk`, which is not kept.

        Raises ValueError for a key or KV that no store could keep.
        """
        check_key(key)
        refusal = self._store(key, chunk, ChunkLayout.from_kv(chunk, self.config.format))
        if refusal is not None:
            self.stats.count_refused(refusal)
        return chunk

    def put_many(self, chunks: Sequence[tuple[str, ChunkKV]]) -> None:
        for key, chunk in chunks:
            self.put(key, chunk)

    def remove(self, key: str) -> None:
        """Drop a chunk; nothing happens when it is not there, or the server is not."""
        if not is_key(key):
            return
        try:
            self._ask(lambda: self._objects.delete(self._name(key)))
        except (_Unavailable, Rejected) as error:
            logger.debug("chunk %s was not removed: %s", key, self._redact(str(error)))

    def held(self) -> Mapping[str, int]:
        return {}

    def usage(self) -> None:
        """Return None: what a server stores is not asked for."""
        return None

    def close(self) -> None:
        """Do nothing: connections end with their client."""

    def _store(self, key: str, chunk: ChunkKV, layout: ChunkLayout) -> str | None:
        """Store a chunk. Return why it is not stored, or None."""
        limit = self._objects.max_bytes
        if limit is not None and layout.payload_bytes >= limit:
            message = "chunks of %d bytes and more are not stored on %s"
            self.stats.warn_once("too_large", message, limit, self._breaker.what)
            return "too_large"
        if not self._breaker.allows():
            return "unavailable"
        try:
            data = to_bytes(serialize(key, self.config.model, chunk, layout, signer=self.config.signer))
            self._call(lambda: self._objects.put(self._name(key), data))
        except NotQuantizable as error:
            self.stats.warn_once("not_quantizable", "chunk %s is not stored: %s", key, error)
            return "not_quantizable"
        except Rejected as error:
            self._warn_of_refusal(error)
            return "rejected"
        except _Unavailable:
            return "unavailable"
        self.stats.count_stored(len(data))
        return None

    def _name(self, key: str) -> str:
        return f"vllm-blend/{self.config.model}/{key}"

    def _ask(self, operation: Callable[[], T]) -> T:
        """Return the answer to an operation as `_call` does, unless the server is left alone."""
        if not self._breaker.allows():
            raise _Unavailable("it failed before")
        return self._call(operation)

    def _call(self, operation: Callable[[], T]) -> T:
        """Return the answer to an operation. Raises Rejected, and _Unavailable where there is no answer in time.

        Every call has a thread: no client, of any protocol, can keep its caller waiting for longer.
        """
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(operation())
            except BaseException as error:  # handed over to the caller
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

    def _warn_of_refusal(self, error: Rejected) -> None:
        self.stats.warn_once("rejected", "%s refuses: %s", self._breaker.what, self._redact(str(error)))


def _error_of(answer: Future[T], timeout: float) -> BaseException | None:
    try:
        return answer.exception(timeout)
    except FutureTimeout as error:
        raise TimeoutError(f"no answer in {timeout:g} s") from error
