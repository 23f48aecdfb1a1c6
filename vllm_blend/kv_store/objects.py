"""Named values on some server: Redis or Valkey, or whatever fsspec has a URL for (s3://, gs://, file://, memory://).

Each operation may raise anything, and may take for ever: remote.py deals with both.
"""

from __future__ import annotations

import uuid
from errno import EDQUOT, EFBIG, ENOSPC, EROFS
from typing import Any, Protocol

REDIS_SCHEMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss", "unix": "unix"}
REDIS_MAX_BYTES = 512 << 20  # of one value, in Redis and Valkey
# File systems on which an object appears as a whole or not at all. On others it is renamed when it is complete.
WHOLE_OBJECTS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "tos", "memory"}


class Rejected(Exception):
    """The server is there, and does not do what it was asked for: it is full, or it is not allowed."""


class ObjectStore(Protocol):
    """What a remote chunk store needs."""

    max_bytes: int | None  # of one value

    def get(self, name: str) -> bytes | None:
        """A value, or None where there is none."""

    def put(self, name: str, data: bytes) -> None:
        """Set a value. Nobody ever sees a part of it."""

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
            raise ImportError(f"{url} needs the redis package: pip install 'vllm-blend[store]'") from error
        scheme, _, rest = url.partition("://")
        self._refusal = redis.ResponseError
        self._redis: Any = redis.Redis.from_url(
            f"{REDIS_SCHEMES[scheme]}://{rest}",
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),  # whether to try again is the breaker's business
        )

    def get(self, name: str) -> bytes | None:
        return self._ask(self._redis.get, name)

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
            raise ImportError(f"{url} needs the fsspec package: pip install 'vllm-blend[store]'") from error
        self._fs, self._root = fsspec.core.url_to_fs(url)
        protocols = [self._fs.protocol] if isinstance(self._fs.protocol, str) else self._fs.protocol
        self._whole = bool(WHOLE_OBJECTS & set(protocols))

    def get(self, name: str) -> bytes | None:
        try:
            return self._fs.cat_file(self._path(name))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _told(error) from error

    def put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        try:
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
        except OSError as error:
            raise _told(error) from error

    def delete(self, name: str) -> None:
        try:
            self._fs.rm_file(self._path(name))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise _told(error) from error

    def exists(self, name: str) -> bool:
        return bool(self._fs.exists(self._path(name)))

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


def open_objects(url: str, timeout: float) -> ObjectStore:
    """The values behind a URL. Raises ImportError where a package for it is missing, ValueError for a URL that nobody
    knows. Whether the server answers is seen with the first operation."""
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise ValueError(f"url={url!r} must be a URL such as redis://host:6379/0, s3://bucket/folder or file:///folder")
    return RedisObjects(url, timeout) if scheme in REDIS_SCHEMES else FsspecObjects(url)


def _told(error: OSError) -> Exception:
    full = error.errno in (ENOSPC, EDQUOT, EFBIG, EROFS)
    return Rejected(f"{type(error).__name__}: {error}") if full or isinstance(error, PermissionError) else error
