"""The rows of chunks in the index of a disk store, which is trusted as little as the disk."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_blend.kv_store.host_memory import PAGE
from vllm_blend.kv_store.segment import Extent
from vllm_blend.kv_store.serialization import is_key

WRITING, LIVE, DEAD = 0, 1, 2


class DamagedIndex(sqlite3.DatabaseError):
    """The file is not an index that can be used."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A chunk's row. `id` is never used again, by no store: file locks go by it."""

    id: int
    key: str
    state: int
    extent: Extent
    header: bytes
    tokens: object = None  # token ids as bytes of int64, where they were stored and asked for (`find_many`)

    @property
    def token_ids(self) -> list[int] | None:
        """Return the stored token ids; None if none are, and no ids where what is stored is none."""
        if self.tokens is None:
            return None
        if not isinstance(self.tokens, bytes) or len(self.tokens) % 8:
            return []
        token_ids: list[int] = np.frombuffer(self.tokens, "<i8").tolist()
        return token_ids


def entry_of(row: tuple[Any, ...]) -> Entry:
    """Return the chunk of a row: id, key, state, segment, offset, bytes, header. Raises DamagedIndex if it is none."""
    number, key, state, segment, offset, num_bytes, header = row
    for value, kind in zip(row, (int, str, int, str, int, int, object), strict=True):
        if not isinstance(value, kind):
            raise DamagedIndex(f"{value!r} in a chunk's row is not {kind.__name__}")
    if state not in (WRITING, LIVE, DEAD):
        raise DamagedIndex(f"{state} is not a state of a chunk")
    if not is_key(segment) or offset % PAGE or num_bytes % PAGE or offset < 0 or num_bytes <= 0:
        raise DamagedIndex(f"bytes {offset} to {offset + num_bytes} of {segment!r} cannot be the place of a chunk")
    header = header if isinstance(header, bytes) else b""  # the chunk is dropped in good order when it is read
    return Entry(number, key, state, Extent(segment, offset, num_bytes), header)
