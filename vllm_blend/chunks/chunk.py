"""A piece of a prompt with an identity: what it is, how its KV is known to the chunk store, and what can be wrong with
it."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from vllm_blend.kv_store.keys import ChunkId, ModelFingerprint


class ChunkType(enum.Enum):
    """The part that a chunk plays in a composition."""

    SYSTEM_PROMPT = "system_prompt"  # stands first, once
    CONTEXT = "context"  # stands between, in any number and order
    QUERY = "query"  # stands last and is always computed: a chunk of tokens without KV of its own
    OUTPUT = "output"  # what was generated earlier, to be used as context

    @classmethod
    def parse(cls, value: ChunkType | str) -> ChunkType:
        """Return the type of this name or value, in any case. Raises ValueError naming the known ones."""
        if isinstance(value, cls):
            return value
        known = {member.value: member for member in cls}
        if not isinstance(value, str) or value.lower() not in known:
            raise ValueError(f"chunk_type={value!r} is unknown: use one of {', '.join(member.name for member in cls)}")
        return known[value.lower()]


@dataclass(frozen=True)
class Chunk:
    """Tokens that may stand anywhere in a composition. Positions belong to the composition, never to the chunk.

    `id` is made from the content: model, tokens, the part it plays, and `context_token_ids`, which is what stands
    before the chunk when its KV is computed; and from `salt`, which stands for the `cache_salt` it was registered with
    (keys.salt_digest). The chunk store has the KV under the same id.
    `PageManager.chunk_page_tables` has the pages in which a chunk stands at present.
    """

    id: str
    chunk_type: ChunkType
    token_ids: tuple[int, ...]
    context_token_ids: tuple[int, ...] = ()
    salt: bytes = field(default=b"", repr=False)
    text: str | None = field(default=None, repr=False, compare=False)  # None for one that was given as token ids

    @classmethod
    def from_tokens(
        cls,
        model: ModelFingerprint,
        chunk_type: ChunkType,
        token_ids: tuple[int, ...],
        context_token_ids: tuple[int, ...],
        salt: bytes = b"",
        text: str | None = None,
    ) -> Chunk:
        key = ChunkId.from_tokens(model, context_token_ids, token_ids, salt=salt).key
        if chunk_type not in (ChunkType.CONTEXT, ChunkType.OUTPUT):  # these play the same part: they are one chunk
            key = hashlib.sha256(f"{chunk_type.value}/{key}".encode()).hexdigest()[:32]
        return cls(key, chunk_type, token_ids, context_token_ids, salt, text)

    def with_tokens(self, model: ModelFingerprint, token_ids: tuple[int, ...]) -> Chunk:
        """Return the chunk as it is where its text has other tokens, because of what stands beside it."""
        kind, context = self.chunk_type, self.context_token_ids
        return Chunk.from_tokens(model, kind, token_ids, context, self.salt, self.text)

    def __repr__(self) -> str:
        return f"Chunk({self.id[:8]}…, {self.chunk_type.name}, {len(self)} tokens)"

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def length(self) -> int:
        """Return the number of tokens."""
        return len(self.token_ids)

    @property
    def has_kv(self) -> bool:
        """Return whether KV of this chunk is stored and reused."""
        return self.chunk_type is not ChunkType.QUERY

    @cached_property
    def stored(self) -> ChunkId:
        """Return the key of the KV in the chunk store."""
        return ChunkId(self.id, "", self.token_ids)


@dataclass(frozen=True)
class ChunkInfo:
    """A registered chunk as `list_chunks` shows it. `num_bytes` of KV are in the memory of the chunk store: 0 where it
    has been evicted, to be computed again when it is used."""

    chunk: Chunk
    name: str | None
    metadata: Mapping[str, Any]
    num_bytes: int
    page_tables: tuple[tuple[int, ...], ...]  # pages of the KV cache that hold it, in retained compositions
    num_pins: int
    num_references: int  # of requests that have not finished
    deleting: bool  # as soon as those have

    def __repr__(self) -> str:
        name = "" if self.name is None else f"{self.name!r}: "
        held = f", {self.num_pins} pins" if self.num_pins else ""
        used = f", {self.num_references} references" if self.num_references else ""
        return f"ChunkInfo({name}{self.chunk!r}, {self.num_bytes} bytes{held}{used}{', deleting' * self.deleting})"


@dataclass(frozen=True)
class Deletion:
    """What became of `delete_chunk`. Deferred: requests still use the chunk, and it goes with the last of them; no new
    request can."""

    chunk_id: str
    deferred: bool
    num_references: int
    num_bytes: int  # that were freed, or will be
    num_pages: int  # of the KV cache that are unused now


class UnknownChunkError(ValueError):
    """No chunk has this id or name, or it has been deleted."""


class ChunkInUseError(ValueError):
    """A chunk is pinned, so it cannot be deleted."""


class OutOfChunkMemoryError(RuntimeError):
    """A chunk does not fit into the chunk store, although everything that may leave has left."""
