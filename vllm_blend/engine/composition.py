"""A chunked prompt on its way to a blend plan, and how many of them may hold chunk KV at a time."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from vllm_blend.inputs import ParsedPrompt
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.keys import ChunkId
from vllm_blend.request import Request, RequestStatus


@dataclass
class Piece:
    """The prefix of a prompt, or one of its chunks."""

    start: int
    id: ChunkId
    exact: bool
    kv: ChunkKV | None = None
    found_in: str | None = None  # where the KV was found, None where it was computed for this prompt
    in_place: bool = False  # computed where it stands unless it is stored
    context: tuple[int, ...] | None = None  # the tokens it is encoded after, where that is not the prefix
    compressed: bool = False  # stored with a part of its KVs


@dataclass(eq=False)
class Composition:
    """A prompt on its way to a plan. Its pieces hold their KV themselves: eviction from the store cannot undo
    progress."""

    parsed: ParsedPrompt
    requests: list[Request] = field(default_factory=list)  # none where chunks are encoded ahead of any question
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
        """What pieces without a context of their own are encoded after; None where each has one."""
        return self.pieces[0] if self.parsed.prefix and not self.parsed.pieces else None

    @property
    def chunks(self) -> list[Piece]:
        return self.pieces if self.prefix is None else self.pieces[1:]

    @property
    def num_tokens(self) -> int:
        return sum(len(piece.id.token_ids) for piece in self.pieces)

    def leave_out(self, keys: Container[str]) -> None:
        """Compute those of these chunks where they stand that may be."""
        self.pieces = [piece for piece in self.pieces if not (piece.in_place and piece.id.key in keys)]

    def fill(self, key: str, kv: ChunkKV | None, found_in: str) -> None:
        """Take the KV of a chunk that has arrived from somewhere; None: it has not, and will not."""
        for piece in self.pieces:
            if piece.id.key == key:
                self.take(piece, kv, found_in)

    def take(self, piece: Piece, kv: ChunkKV | None, found_in: str) -> None:
        """Fill one piece, as `fill` does for all of a key."""
        piece.kv = kv
        piece.found_in = None if piece.id.key in self.own else found_in


class Turns:
    """Lets so many prompts gather their chunks that these take `budget_bytes`, or one: what is loaded for a prompt
    stays in memory until it runs, whatever the store evicts meanwhile."""

    def __init__(self, budget_bytes: int, bytes_per_token: int) -> None:
        self.budget_bytes, self.bytes_per_token = budget_bytes, bytes_per_token
        self._queue: deque[Composition] = deque()
        self._gathering: deque[tuple[list[weakref.ref[Request]], int]] = deque()  # whose turn came, and their bytes
        self._held = 0

    def add(self, composition: Composition) -> None:
        self._queue.append(composition)

    def next(self) -> Composition | None:
        """The next prompt whose turn has come."""
        while self._gathering and all(_runs(request()) for request in self._gathering[0][0]):
            self._held -= self._gathering.popleft()[1]
        if not self._queue:
            return None
        num_bytes = self._queue[0].num_tokens * self.bytes_per_token
        if self._gathering and self._held + num_bytes > self.budget_bytes:
            return None
        composition = self._queue.popleft()
        self._gathering.append(([weakref.ref(request) for request in composition.requests], num_bytes))
        self._held += num_bytes
        return composition

    def give_back(self, requests: Sequence[Request]) -> None:
        """`requests` hold nothing any more and want another turn: they must not wait for their own first one."""
        kept = deque[tuple[list[weakref.ref[Request]], int]]()
        for refs, num_bytes in self._gathering:
            if any(ref() in requests for ref in refs):
                self._held -= num_bytes
            else:
                kept.append((refs, num_bytes))
        self._gathering = kept

    def forget(self, requests: Sequence[Request]) -> None:
        """`requests` are gone."""
        gone = set(requests)
        self._queue = deque(c for c in self._queue if not gone.issuperset(c.requests))


def _runs(request: Request | None) -> bool:
    """Whether a request runs, has run or is gone: what it holds is the scheduler's business then."""
    return request is None or request.status is not RequestStatus.WAITING
