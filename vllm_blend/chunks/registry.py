"""The registered chunks, the requests that use them, and what may be deleted.

The KV of a chunk is its entry in the engine's chunk store, whose byte budget and order of eviction (least priority
first) hold for chunks too. Chunks that are pinned, or used by a request, are not evicted. The others may be; they stay
registered, and are computed again when they are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_blend.checks import a_type
from vllm_blend.chunks.chunk import Chunk, ChunkInfo, ChunkInUseError, Deletion, UnknownChunkError
from vllm_blend.kv_store.tiered import TieredChunkStore


class ChunkPages(Protocol):
    """The pages of the KV cache that hold chunks (core/page_manager.py)."""

    @property
    def chunk_page_tables(self) -> Mapping[str, list[tuple[int, ...]]]:
        """Return the page tables of each chunk that has any, by chunk id."""

    def free_for_chunk(self, chunk_id: str) -> int:
        """Give back every page that is held for a chunk. Return how many are unused since."""


@dataclass
class _Entry:
    chunk: Chunk
    name: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    num_pins: int = 0
    num_references: int = 0
    deleting: bool = False
    variants: set[str] = field(default_factory=set)  # keys of its KV where its text has other tokens


class ChunkRegistry:
    """Chunks by id or name, for which a `Chunk` may be given too. Equal content is registered once. Not for several
    threads."""

    def __init__(self, store: TieredChunkStore, pages: ChunkPages) -> None:
        self.store, self.pages = store, pages
        self._entries: dict[str, _Entry] = {}
        self._names: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, id_or_name: str | Chunk) -> bool:
        return self._id(id_or_name) in self._entries

    def register(self, chunk: Chunk, name: str | None = None, metadata: Mapping[str, Any] | None = None) -> Chunk:
        """Register a chunk. Return the one to use: the first that was registered with this content. A name that it has
        already is replaced, metadata is added to, and a deletion that is deferred is called off."""
        self.check_name(name, chunk.id)
        added = dict(metadata or {})
        entry = self._entries.setdefault(chunk.id, _Entry(chunk))
        entry.deleting = False
        if name is not None:
            holder = self._entries.get(self._names.get(name, ""))
            for each in (entry, holder):  # the holder is being deleted
                if each is not None:
                    self._drop_name(each)
            entry.name = name
            self._names[name] = chunk.id
        entry.metadata.update(added)
        return entry.chunk

    def check_name(self, name: str | None, chunk_id: str) -> None:
        """Raise TypeError for what is no name, and ValueError if another chunk has it that is not being deleted."""
        if not isinstance(name, str | None):
            raise TypeError(f"name={name!r} is {a_type(name)}: give a string, or leave it out")
        holder = self._entries.get(self._names.get(name, "")) if name is not None else None
        taken = holder is not None and holder.chunk.id != chunk_id and not holder.deleting
        if name is not None and (name == "" or taken or name in self._entries):
            raise ValueError(f"name={name!r} is empty, or names another chunk: give one of its own, or delete that one")

    def get(self, id_or_name: str | Chunk) -> Chunk:
        """Return a chunk that may be used. Raises UnknownChunkError saying which is missing."""
        entry = self._entry(id_or_name)
        if entry.deleting:
            raise UnknownChunkError(
                f"chunk {_quote(id_or_name)} has been deleted ({entry.num_references} running requests still use it): "
                "register it again"
            )
        return entry.chunk

    def acquire(self, chunk_ids: Iterable[str]) -> None:
        """Pin these chunks for a request."""
        for chunk_id in chunk_ids:
            self._entries[chunk_id].num_references += 1
            self.store.pin(chunk_id)

    def add_variants(self, variants: Iterable[tuple[str, str]]) -> None:
        """Remember keys of KV that is deleted with a chunk: (chunk id, key)."""
        for chunk_id, key in variants:
            self._entries[chunk_id].variants.add(key)

    def release(self, chunk_ids: Iterable[str]) -> None:
        """Unpin chunks that a request acquired and does not use any more, and carry out deletions that waited for
        it."""
        for chunk_id in chunk_ids:
            entry = self._entries[chunk_id]
            entry.num_references -= 1
            self.store.unpin(chunk_id)
            if entry.deleting and entry.num_references == 0:
                self._remove(entry)

    def pin(self, id_or_name: str | Chunk) -> None:
        """Never evict a chunk, until it is unpinned as often."""
        entry = self._entry(self.get(id_or_name).id)
        entry.num_pins += 1
        self.store.pin(entry.chunk.id)

    def unpin(self, id_or_name: str | Chunk) -> None:
        entry = self._entry(id_or_name)
        if entry.num_pins == 0:
            raise ValueError(f"chunk {_quote(id_or_name)} is not pinned: unpin it as often as it was pinned")
        entry.num_pins -= 1
        self.store.unpin(entry.chunk.id)

    def delete(self, id_or_name: str | Chunk) -> Deletion:
        """Forget a chunk and free its KV and the pages of retained compositions that it stands in, now or when the last
        request that uses it has ended. Raises UnknownChunkError, or ChunkInUseError if it is pinned."""
        entry = self._entry(self.get(id_or_name).id)
        if entry.num_pins:
            raise ChunkInUseError(f"chunk {_quote(id_or_name)} is pinned {entry.num_pins} time(s): unpin it first")
        num_bytes = self.store.bytes_of(entry.chunk.id)
        num_references, num_pages = entry.num_references, 0
        if num_references:
            entry.deleting = True
        else:
            num_pages = self._remove(entry)
        return Deletion(entry.chunk.id, num_references > 0, num_references, num_bytes, num_pages)

    def info(self, id_or_name: str | Chunk) -> ChunkInfo:
        return self._info(self._entry(id_or_name), self.pages.chunk_page_tables)

    def infos(self) -> list[ChunkInfo]:
        """Return every chunk, in order of registration."""
        tables = self.pages.chunk_page_tables
        return [self._info(entry, tables) for entry in self._entries.values()]

    def _info(self, entry: _Entry, tables: Mapping[str, list[tuple[int, ...]]]) -> ChunkInfo:
        chunk = entry.chunk
        return ChunkInfo(
            chunk=chunk,
            name=entry.name,
            metadata=dict(entry.metadata),
            num_bytes=self.store.bytes_of(chunk.id),
            page_tables=tuple(tables.get(chunk.id, ())),
            num_pins=entry.num_pins,
            num_references=entry.num_references,
            deleting=entry.deleting,
        )

    def _id(self, id_or_name: str | Chunk) -> str:
        if isinstance(id_or_name, Chunk):
            return id_or_name.id
        if not isinstance(id_or_name, str):
            raise TypeError(
                f"a chunk is named by {id_or_name!r}, {a_type(id_or_name)}: give its id or its name, as a "
                "string, or the Chunk"
            )
        return self._names.get(id_or_name, id_or_name)

    def _entry(self, id_or_name: str | Chunk) -> _Entry:
        entry = self._entries.get(self._id(id_or_name))
        if entry is None:
            raise UnknownChunkError(
                f"chunk {_quote(id_or_name)} is unknown: it was never registered, or it has been deleted; "
                f"list_chunks() shows the {len(self._entries)} that there are"
            )
        return entry

    def _remove(self, entry: _Entry) -> int:
        chunk_id = entry.chunk.id
        del self._entries[chunk_id]
        self._drop_name(entry)
        for key in (chunk_id, *entry.variants):
            self.store.remove(key)
        return self.pages.free_for_chunk(chunk_id)

    def _drop_name(self, entry: _Entry) -> None:
        if entry.name is not None:
            del self._names[entry.name]
            entry.name = None


def _quote(id_or_name: str | Chunk) -> str:
    return repr(id_or_name.id if isinstance(id_or_name, Chunk) else id_or_name)
