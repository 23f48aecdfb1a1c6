"""The settings of the stores below the memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from vllm_blend.checks import not_negative, positive
from vllm_blend.kv_store.keys import ModelFingerprint
from vllm_blend.kv_store.layout import StoredFormat
from vllm_blend.kv_store.serialization import is_key
from vllm_blend.kv_store.signing import ChunkSigner


@dataclass(frozen=True)
class DiskStoreConfig:
    """The settings of a store on a disk."""

    folder: str | Path
    budget_bytes: int  # of segments: chunks in whole pages of 4 KiB
    model: str  # ModelFingerprint.digest
    format: StoredFormat = "auto"
    admit_on_second_use: bool = False  # a chunk is stored when it is put for the second time
    segment_bytes: int = 256 << 20  # a segment of so many bytes is full
    num_threads: int = 8  # that read
    staging_bytes: int = 64 << 20  # memory for writes, and for reads that do not go straight to where they are wanted
    direct: bool = True  # past the page cache, where the file system takes it
    timeout: float = 30.0  # seconds, of every wait: for a chunk to be read, for another process
    retry_seconds: float = 60.0  # after a write that failed (a full disk), before another is tried
    exact: bool = False  # what others stored in int8 or fp8 is a miss
    fingerprint: ModelFingerprint | None = None  # the model itself: without, what is stored cannot be exported
    signer: ChunkSigner | None = None  # signs what is stored; what it has not signed is a miss

    def __post_init__(self) -> None:
        for name in ("budget_bytes", "segment_bytes", "num_threads", "timeout", "retry_seconds"):
            positive(name, getattr(self, name))
        not_negative("staging_bytes", self.staging_bytes)
        _check_stored(self.format, self.model)
        if self.fingerprint is not None and self.fingerprint.digest != self.model:
            raise ValueError(f"model={self.model!r} must be the digest of fingerprint: {self.fingerprint.digest}")


@dataclass(frozen=True)
class RemoteStoreConfig:
    """The server that keeps chunks, and how long to wait for it."""

    url: str = field(repr=False)  # redis://, rediss://, valkey://, unix:// or anything that fsspec knows
    model: str  # ModelFingerprint.digest
    format: StoredFormat = "auto"
    timeout: float = 5.0  # seconds, of every call
    max_failures: int = 3  # in a row, until the server is left alone
    retry_seconds: float = 10.0
    exact: bool = False  # what others stored in int8 or fp8 is a miss
    signer: ChunkSigner | None = None  # signs what is stored; what it has not signed is a miss

    def __post_init__(self) -> None:
        for name in ("timeout", "max_failures", "retry_seconds"):
            positive(name, getattr(self, name))
        _check_stored(self.format, self.model)


def _check_stored(stored: str, model: str) -> None:
    if stored not in get_args(StoredFormat):
        raise ValueError(f"format={stored!r} must be one of {', '.join(get_args(StoredFormat))}")
    if not is_key(model):
        raise ValueError(f"model={model!r} must be a ModelFingerprint.digest: 32 hex digits")
