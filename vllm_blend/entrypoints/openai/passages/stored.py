"""The passages that clients have stored by /v1/chunks: by tenant, for a time, under ids that `documents` may name.

A stored passage is known to the `PassageFinder`, so that it is found in plain text as well. Its KV is in the engine's
chunk store, which may drop it when memory is short; it is computed again when it is used. Restarting the server forgets
the ids: a table of them beside the store would hold the salts of tenants. KV on a disk or a server is still there, and
is found when the passage is stored again, which gives it the same id.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from vllm_blend.entrypoints.openai.passages.finder import PassageFinder

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_SECONDS, DEFAULT_PRIORITY, MAX_PRIORITY = 3600.0, 50, 100
ID_PREFIX = "chunk-"


class UnknownPassageError(ValueError):
    """There is no passage of this id, or it has expired, or it belongs to another tenant."""


class TooManyPassagesError(ValueError):
    """The tenant, or all of them together, have stored as much as the server takes."""


@dataclass
class StoredPassage:
    """A passage and what it is stored as. `text` is None for one that was given as token ids. `keys` are those of its
    KV in the chunk store. Times are seconds since the epoch."""

    id: str
    salt: str | None = field(repr=False)
    text: str | None
    title: str | None
    num_tokens: int
    keys: tuple[str, ...]
    created: float
    expires: float
    priority: int = DEFAULT_PRIORITY
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def num_characters(self) -> int:
        return len(self.text or "") + len(self.title or "")


def passage_id(salt: str | None, *content: Any) -> str:
    """Return the id of a tenant's passage. It follows from what is stored, and is different for every tenant."""
    whole = json.dumps([salt, *content], sort_keys=True).encode()
    return ID_PREFIX + hashlib.blake2b(whole, digest_size=16).hexdigest()


def _locked(method: Callable[Concatenate[StoredPassages, P], T]) -> Callable[Concatenate[StoredPassages, P], T]:
    """Return the method, which holds the lock of its object while it runs."""

    @wraps(method)
    def locked(self: StoredPassages, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


class StoredPassages:
    """Keeps at most `max_passages` for a tenant, and `max_characters` of text for all. Any thread may use it."""

    def __init__(
        self,
        finder: PassageFinder,
        max_passages: int = 10_000,
        max_characters: int = 1 << 28,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.finder, self.now = finder, now
        self.max_passages, self.max_characters = max_passages, max_characters
        self._tenants: dict[str | None, dict[str, StoredPassage]] = {}
        self._expiries: list[tuple[float, str, str | None]] = []  # a heap; also outdated entries
        self._num_characters = 0
        self._lock = threading.RLock()

    @_locked
    def __len__(self) -> int:
        self._expire()
        return sum(map(len, self._tenants.values()))

    @_locked
    def check_space(self, num_characters: int, salt: str | None) -> None:
        """Raise TooManyPassagesError if there is no space for a passage of so many characters."""
        self._expire()
        if len(self._tenants.get(salt, ())) >= self.max_passages:
            raise TooManyPassagesError(
                f"{self.max_passages} passages are stored, and no more may be: delete some, or let them expire"
            )
        if self._num_characters + num_characters > self.max_characters:
            raise TooManyPassagesError(
                f"the stored passages have {self._num_characters} characters, and at most {self.max_characters} may be "
                "stored: delete some, or let them expire"
            )

    @_locked
    def add(self, passage: StoredPassage) -> StoredPassage:
        """Store a passage, in the place of the one with its id if there is one. Raises TooManyPassagesError."""
        if self._tenants.get(passage.salt, {}).get(passage.id) is None:
            self.check_space(passage.num_characters, passage.salt)
        else:
            self._remove(passage.id, passage.salt)
        self._tenants.setdefault(passage.salt, {})[passage.id] = passage
        self._num_characters += passage.num_characters
        self._watch(passage)
        for text in _texts_of(passage):
            self.finder.register(text, passage.salt)
        return passage

    @_locked
    def get(self, passage_id: str, salt: str | None) -> StoredPassage:
        """Return a passage of this tenant. Raises UnknownPassageError."""
        self._expire()
        found = self._tenants.get(salt, {}).get(passage_id)
        if found is None:
            raise UnknownPassageError(
                f"the passage {passage_id[:100]!r} is unknown: it was never stored with this API key and cache_salt, "
                "or it has expired, or been deleted, or the server has been started again, which ids do not outlive: "
                "store it again with POST /v1/chunks, which gives it the same id"
            )
        return found

    def text_of(self, passage_id: str, salt: str | None) -> StoredPassage:
        """Return a passage whose text a prompt can have. Raises UnknownPassageError, or ValueError for token ids."""
        found = self.get(passage_id, salt)
        if found.text is None:
            raise ValueError(f"the passage {passage_id!r} was stored as token ids: store its text to name it here")
        return found

    @_locked
    def page(self, salt: str | None, limit: int, after: str | None = None) -> tuple[list[StoredPassage], bool]:
        """Return at most `limit` passages of a tenant, in the order in which they were stored, from behind the id
        `after`; and whether there are more. Raises UnknownPassageError for an `after` that is not there."""
        self._expire()
        passages = list(self._tenants.get(salt, {}).values())
        if after is not None:
            passages = passages[passages.index(self.get(after, salt)) + 1 :]
        return passages[:limit], len(passages) > limit

    @_locked
    def keep(self, passage: StoredPassage, seconds: float | None, priority: int | None) -> None:
        """Keep a passage for so many seconds from now, with another priority; None leaves it as it is."""
        if priority is not None:
            passage.priority = priority
        if seconds is not None:
            passage.expires = self.now() + seconds
            self._watch(passage)

    @_locked
    def delete(self, passage_id: str, salt: str | None) -> StoredPassage:
        """Forget a passage, and return it. Raises UnknownPassageError."""
        self.get(passage_id, salt)
        return self._remove(passage_id, salt)

    def _remove(self, passage_id: str, salt: str | None) -> StoredPassage:
        passages = self._tenants[salt]
        passage = passages.pop(passage_id)
        if not passages:
            del self._tenants[salt]
        self._num_characters -= passage.num_characters
        for text in _texts_of(passage):
            self.finder.forget(text, salt)
        return passage

    def _watch(self, passage: StoredPassage) -> None:
        heapq.heappush(self._expiries, (passage.expires, passage.id, passage.salt))
        total = sum(map(len, self._tenants.values()))
        if len(self._expiries) > 4 * total + 64:
            kept = [each for passages in self._tenants.values() for each in passages.values()]
            self._expiries = [(each.expires, each.id, each.salt) for each in kept]
            heapq.heapify(self._expiries)

    def _expire(self) -> None:
        now = self.now()
        while self._expiries and self._expiries[0][0] <= now:
            expires, passage_id, salt = heapq.heappop(self._expiries)
            passage = self._tenants.get(salt, {}).get(passage_id)
            if passage is not None and passage.expires == expires:
                self._remove(passage_id, salt)


def _texts_of(passage: StoredPassage) -> Sequence[str]:
    return [] if passage.text is None else [passage.text]
