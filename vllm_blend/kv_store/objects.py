"""Named values on some server: Redis or Valkey, or any that fsspec has a URL for (s3://, gs://, file://, memory://).

Each operation may raise anything, and may take for ever: remote.py deals with both.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EDQUOT, EFBIG, ENOSPC, EROFS
from pathlib import Path
from typing import Any, Protocol

from vllm_blend.kv_store.regular_file import require_regular
from vllm_blend.urls import redact_secrets, redact_url

REDIS_SCHEMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss", "unix": "unix"}
REDIS_MAX_BYTES = 512 << 20  # of one value, in Redis and Valkey
# File systems on which an object appears as a whole or not at all. On others it is renamed when it is complete.
WHOLE_OBJECTS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "tos", "memory"}


class Rejected(Exception):
    """The server is there, and does not do what it was asked for: it is full, or it is not allowed."""


class ObjectStore(Protocol):
    """The operations on a server that a remote chunk store needs."""

    max_bytes: int | None  # of one value

    def get(self, name: str, max_bytes: int | None) -> bytes | None:
        """Return a value; None if there is none. Of a value of more than `max_bytes`, as little as shows that may be
        all that is read."""

    def put(self, name: str, data: bytes) -> None:
        """Set a value, of which no reader ever sees a part."""

    def delete(self, name: str) -> None:
        """Drop a value; nothing happens when it is not there."""

    def exists(self, name: str) -> bool: ...


class RedisObjects:
    """Values of a Redis or Valkey server, which evicts as it is configured to (maxmemory-policy)."""

    max_bytes: int | None = REDIS_MAX_BYTES

    def __init__(self, url: str, timeout: float) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ImportError(f"{redact_url(url)} needs the redis package: pip install 'vllm-blend[store]'") from error
        scheme, _, rest = url.partition("://")
        self._refusal = redis.ResponseError
        self._redis: Any = redis.Redis.from_url(
            f"{REDIS_SCHEMES[scheme]}://{rest}",
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),  # the circuit breaker decides when to try again
        )

    def get(self, name: str, max_bytes: int | None) -> bytes | None:
        data: bytes | None = self._ask(self._redis.get, name)  # the server sends no more than `self.max_bytes`
        return data

    def put(self, name: str, data: bytes) -> None:
        self._ask(self._redis.set, name, data)

    def delete(self, name: str) -> None:
        self._ask(self._redis.delete, name)

    def exists(self, name: str) -> bool:
        return bool(self._ask(self._redis.exists, name))

    def _ask(self, command: Any, *arguments: object) -> Any:
        try:
            return command(*arguments)
        except self._refusal as error:  # out of memory, a replica that is read-only, a key of another type
            raise Rejected(str(error)) from error


class FsspecObjects:
    """Files below a URL that fsspec knows; credentials and options come from fsspec's own configuration."""

    max_bytes: int | None = None

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise ImportError(f"{redact_url(url)} needs the fsspec package: pip install 'vllm-blend[store]'") from error
        self._fs, self._root = fsspec.core.url_to_fs(url)
        protocols = [self._fs.protocol] if isinstance(self._fs.protocol, str) else self._fs.protocol
        self._whole = bool(WHOLE_OBJECTS & set(protocols))
        self._local = "file" in protocols

    def get(self, name: str, max_bytes: int | None) -> bytes | None:
        path = self._path(name)
        try:
            with _refusals():
                if self._local:
                    require_regular(Path(path))  # a FIFO would keep the thread for ever
                data: bytes = self._fs.cat_file(path, start=0, end=None if max_bytes is None else max_bytes + 1)
        except FileNotFoundError:
            return None
        return data

    def put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        with _refusals():
            if self._whole:
                self._fs.pipe_file(path, data)
                return
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            part = f"{path}.{uuid.uuid4().hex}.part"
            try:
                self._fs.pipe_file(part, data)
                self._fs.mv(part, path)
            except BaseException:
                if self._fs.exists(part):
                    self._fs.rm_file(part)
                raise

    def delete(self, name: str) -> None:
        with _refusals(), suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def exists(self, name: str) -> bool:
        return bool(self._fs.exists(self._path(name)))

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


def open_objects(url: str, timeout: float) -> ObjectStore:
    """Return the values behind a URL. Raises ImportError if a package for it is missing, ValueError for a URL that
    cannot be used, without the secrets in it. Whether the server answers is seen with the first operation."""
    scheme, separator, _ = url.partition("://")
    if not separator:
        shown = redact_url(url)
        raise ValueError(
            f"url={shown!r} must be a URL such as redis://host:6379/0, s3://bucket/folder or file:///folder"
        )
    try:
        return RedisObjects(url, timeout) if scheme in REDIS_SCHEMES else FsspecObjects(url)
    except ImportError as error:
        raise ImportError(redact_secrets(str(error), url)) from None  # the cause would show them
    except Exception as error:  # clients raise errors of any kind for URLs and options that they do not take
        raise ValueError(redact_secrets(str(error), url)) from None


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise Rejected in place of what says that a file system is full or not allowed to be used."""
    try:
        yield
    except OSError as error:
        if error.errno in (ENOSPC, EDQUOT, EFBIG, EROFS) or isinstance(error, PermissionError):
            raise Rejected(f"{type(error).__name__}: {error}") from error
        raise
