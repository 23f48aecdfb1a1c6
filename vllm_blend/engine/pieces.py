"""The pieces of a chunked prompt on their way to a blend plan, each with the id under which stores know its KV, and the
chunk store as prompts see it: KV that is not what they want is a miss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from vllm_blend.blend.encoding_contexts import ContextPieces, EncodingContext
from vllm_blend.blend.encoding_contexts.base import Tokens
from vllm_blend.inputs import ParsedPrompt, begins_with
from vllm_blend.kv_store.chunk_kv import ChunkKV, ExpectedChunk, find_kv_mismatch
from vllm_blend.kv_store.keys import ChunkId, ModelFingerprint, context_id
from vllm_blend.kv_store.owners import ANYONE, Owner
from vllm_blend.kv_store.tiered import TieredChunkStore
from vllm_blend.request import Request

logger = logging.getLogger(__name__)


@dataclass
class Piece:
    """The prefix of a prompt, or one of its chunks."""

    start: int
    id: ChunkId
    exact: bool
    kv: ChunkKV | None = None
    found_in: str | None = None  # where the KV was found, None if it was computed for this prompt
    in_place: bool = False  # computed where it stands unless it is stored
    context: tuple[int, ...] | None = (
        None  # the tokens it is encoded after, unless prefix and `company` are all of them
    )
    company: Piece | None = None  # what it is encoded after, next to the prefix; stored, too


@dataclass(frozen=True)
class PieceFinder:
    """Takes prompts apart. What a chunk is encoded after, and so its id, is for `encoding` to say."""

    model: ModelFingerprint
    encoding: EncodingContext
    max_model_len: int

    def pieces(self, parsed: ParsedPrompt, everywhere: bool = False) -> list[Piece]:
        """Return the prefix of a prompt, if it has one, and its chunks, without KV. With `everywhere`, what
        chunks are in another place, where they are alone or are not, comes last."""
        ids = parsed.token_ids
        if parsed.pieces:
            return [
                Piece(p.start, p.id, begins_with(ids, p.start, p.context), context=p.context) for p in parsed.pieces
            ]
        prefix = parsed.prefix
        salt = parsed.salt
        pieces = [Piece(0, ChunkId.from_tokens(self.model, [], prefix, salt=salt), True)] if prefix else []
        whole = tuple(ids)
        chunks = tuple(whole[start:stop] for start, stop in parsed.chunk_bounds)
        given = ContextPieces(tuple(prefix), chunks, parsed.continues, parsed.encode_after)
        all_in_place = frozenset(parsed.in_place_chunks)
        filler = self.encoding.company(is_alone=False)
        company = self._company(given.prefix, filler, salt) if filler else None
        identities: dict[int, tuple[Tokens, str]] = {}  # by the object, which many chunks share

        def piece(index: int, is_alone: bool) -> Piece:
            start, stop = parsed.chunk_bounds[index]
            context = self.encoding.before(given, index, self.max_model_len - (stop - start), is_alone)
            if id(context) not in identities:
                identities[id(context)] = context, context_id(context, salt)
            chunk = ChunkId.from_context(identities[id(context)][1], self.model, chunks[index])
            found = Piece(start, chunk, begins_with(ids, start, context), in_place=index in all_in_place)
            if filler and context is given.after(filler):
                found.company = company
            elif context is not given.prefix and context != given.prefix:
                found.context = context
            return found

        pieces += [piece(index, given.is_alone(index)) for index in range(len(chunks))]
        if everywhere and (given.are_alone or not given.has_instruction):
            others = [piece(index, not given.is_alone(index)) for index in range(len(chunks))]
            known = {each.id.key for each in pieces}
            pieces += {each.id.key: each for each in others if each.id.key not in known}.values()
        return pieces

    def _company(self, prefix: Tokens, company: Tokens, salt: bytes) -> Piece:
        return Piece(len(prefix), ChunkId.from_tokens(self.model, prefix, company, salt=salt), exact=True)

    def identify(self, parsed: ParsedPrompt, everywhere: bool = False) -> tuple[ChunkId | None, list[ChunkId]]:
        """Return the ids of a prompt's prefix (None if it has none) and of its chunks, as `pieces` does."""
        ids = [piece.id for piece in self.pieces(parsed, everywhere)]
        return (ids[0], ids[1:]) if parsed.prefix and not parsed.pieces else (None, ids)


@dataclass(eq=False)
class PendingBlend:
    """A prompt on its way to a plan. Its pieces hold their KV themselves: eviction from the store cannot undo
    progress."""

    parsed: ParsedPrompt
    requests: list[Request] = field(default_factory=list)  # none where chunks are encoded ahead of any question
    owner: Owner = ANYONE  # whose space its chunks take
    pieces: list[Piece] = field(default_factory=list)
    first_scheduled_time: float = field(default=float("inf"))
    asked: set[str] = field(default_factory=set)  # keys that were looked for below the memory
    patient: bool = False  # it waits until its chunks are whole
    own: set[str] = field(default_factory=set)  # keys of what is, or was, encoded for it
    on_complete: Callable[[], None] | None = None  # called when chunks encoded ahead of any question are all there

    @property
    def missing(self) -> list[Piece]:
        return [piece for piece in self.pieces if piece.kv is None]

    @property
    def prefix(self) -> Piece | None:
        """Return the piece after which pieces without a context of their own are encoded; None if each has one."""
        return self.pieces[0] if self.parsed.prefix and not self.parsed.pieces else None

    @property
    def chunks(self) -> list[Piece]:
        return self.pieces if self.prefix is None else self.pieces[1:]

    @property
    def num_tokens(self) -> int:
        return sum(len(piece.id.token_ids) for piece in self.pieces)

    @property
    def companies(self) -> list[Piece]:
        """Return what those chunks that have no KV yet are encoded after, beside the prefix."""
        companies = {piece.company.id.key: piece.company for piece in self.pieces if piece.kv is None and piece.company}
        return list(companies.values())

    def leave_out(self, keys: Container[str]) -> None:
        """Have chunks of these keys computed where they stand, if they may be."""
        self.pieces = [piece for piece in self.pieces if not (piece.in_place and piece.id.key in keys)]

    def fill(self, key: str, kv: ChunkKV | None, found_in: str) -> None:
        """Take the KV of a chunk that has arrived from `found_in`. It is None if the chunk will not arrive."""
        for piece in [*self.pieces, *self.companies]:
            if piece.id.key == key:
                self.take(piece, kv, found_in)

    def take(self, piece: Piece, kv: ChunkKV | None, found_in: str) -> None:
        """Fill one piece, as `fill` does for all of a key."""
        piece.kv = kv
        piece.found_in = None if piece.id.key in self.own else found_in


@dataclass(frozen=True)
class StoredChunks:
    """Looks chunks up. Tiers check what they read; all KV that a prompt reuses is checked here, wherever it was."""

    model: ModelFingerprint
    store: TieredChunkStore

    def find(self, chunk: ChunkId) -> ChunkKV | None:
        """Return a chunk from the first tier that has it, None if none has."""
        return self.checked(chunk, self.store.get(chunk.key, self.expected(chunk)))

    def find_in_memory(self, chunk: ChunkId) -> ChunkKV | None:
        """Return a chunk that can be had without waiting, None if it is not in memory."""
        return self.checked(chunk, self.store.get_now(chunk.key))

    def checked(self, chunk: ChunkId, kv: ChunkKV | None) -> ChunkKV | None:
        """Return KV that a store gave for a chunk; None, with a warning, if it is not this chunk's."""
        mismatch = None if kv is None else find_kv_mismatch(self.expected(chunk), kv)
        if mismatch is None:
            return kv
        logger.warning("stored chunk %s not used, it will be computed again: %s", chunk.key, mismatch)
        return None

    def expected(self, chunk: ChunkId) -> ExpectedChunk:
        """Return what tiers compare a chunk with that they read."""
        return ExpectedChunk(self.model, chunk)


def memory_of(kv: ChunkKV | None) -> str:
    """Return where a chunk was found that was in memory."""
    return "host" if kv is None or kv.k.device.type == "cpu" else "device"
