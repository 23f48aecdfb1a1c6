"""Finds passages in plain text that a tenant has sent before, by what they say.

A passage is known once it has been seen, or registered, wherever it stands: a piece of a text, or a run of characters
that a piece has in common with an earlier one. What of a prompt is not known yet is remembered. What a prompt has in
common with an earlier one from its very beginning is left to the prefix cache, which is exact, where that covers more
than known passages do. Everything is kept by tenant (the salt of its requests): nothing that one tenant sends changes
what is found for another.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from vllm_blend.entrypoints.openai.passages.anchors import AnchoredText
from vllm_blend.entrypoints.openai.passages.known import ENTRY, MOVED, USED, KnownPassages, RegisteredPassages, digest
from vllm_blend.entrypoints.openai.passages.search import FoundPassages, PassageSearch, TextSection

__all__ = ["FoundPassages", "PassageFinder", "TextSection"]

MAX_PIECES = 8192  # of a prompt: one that has more is not looked at


class PassageFinder:
    """Knows the passages of every tenant. Any thread may use it.

    Passages have `min_characters`, and runs that are cut out of a longer piece twice as many. At most `max_passages`
    and `max_bytes` of text are remembered for a tenant, and four times as much for all, the latest; a passage takes
    about 500 bytes, and a byte of its text 2 to 3. At most `max_prefixes` beginnings of prompts are taken to be in the
    prefix cache.
    With `detects=False` only what a request names is a passage.
    """

    def __init__(
        self,
        detects: bool = True,
        min_characters: int = 64,
        max_passages: int = 32768,
        max_bytes: int = 1 << 25,
        max_prefixes: int = 4096,
    ) -> None:
        given = {"min_characters": min_characters, "max_passages": max_passages, "max_bytes": max_bytes}
        for name, value in given.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.detects, self.min_characters = detects, min_characters
        self.max_passages, self.max_bytes, self.max_prefixes = max_passages, max_bytes, max_prefixes
        self.max_total = 4 * (max_passages + max_prefixes + max_bytes // ENTRY)
        self._tenants: OrderedDict[str, KnownPassages] = OrderedDict()
        self._registered: dict[str, RegisteredPassages] = {}
        self._size = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return how much is remembered of all tenants, without registered passages: entries, and text as so many
        entries as take its memory."""
        return self._size

    def find(self, whole: str, sections: Sequence[TextSection], salt: str | None, names_some: bool) -> FoundPassages:
        """Return the chunks among the pieces of a prompt, and remember all pieces that may be passages.

        `names_some`: the request names passages itself, so that its prompt is blended in any case.
        """
        if not self.detects:
            sections = [section for section in sections if section.is_stored]
        if not 0 < sum(len(section.pieces) for section in sections) <= MAX_PIECES:
            return FoundPassages()
        name, text = _name(salt), AnchoredText(whole)
        with self._lock:
            tenant = self._tenant(name)
            before = tenant.size
            registered = self._registered.get(name, RegisteredPassages())
            found = PassageSearch(tenant, registered, self.min_characters, text).run(sections, names_some)
            self._trim(tenant, before)
        return found

    def see(self, passages: Iterable[str], salt: str | None) -> None:
        """Remember passages that a request names: from now on they are found in plain text, too."""
        if not self.detects:
            return
        with self._lock:
            tenant = self._tenant(_name(salt))
            before = tenant.size
            for passage in passages:
                text = AnchoredText(passage.strip())
                name = digest(text.data)
                tenant.remember(name, MOVED, USED)
                tenant.young.add(text, [((0, len(text.data)), name)])
            self._trim(tenant, before)

    def register(self, passage: str, salt: str | None) -> None:
        """Know a passage of any length until it is forgotten as often. It has text."""
        text = AnchoredText(passage.strip())
        name = digest(text.data)
        with self._lock:
            registered = self._registered.setdefault(_name(salt), RegisteredPassages())
            registered.counts[name] += 1
            registered.texts.add(text, [((0, len(text.data)), name)])

    def forget(self, passage: str, salt: str | None) -> None:
        """Undo one `register` of a passage, and forget that it has been seen."""
        text, name = digest(_encode(passage.strip())), _name(salt)
        with self._lock:
            registered = self._registered.get(name)
            if registered is None or not registered.counts[text]:
                return
            registered.forget(text)
            if not registered.counts:
                del self._registered[name]
            tenant = self._tenants.get(name)
            if tenant is not None:
                before = tenant.size
                tenant.seen.pop(text, None)
                tenant.young.forget(text)
                tenant.old.forget(text)
                self._size += tenant.size - before

    def _tenant(self, name: str) -> KnownPassages:
        tenant = self._tenants.setdefault(name, KnownPassages())
        self._tenants.move_to_end(name)
        return tenant

    def _trim(self, tenant: KnownPassages, size_before: int) -> None:
        """Forget what is too much: the oldest of this tenant, and of those that have not been here for longest."""
        tenant.trim(self.max_passages, self.max_bytes, self.max_prefixes)
        self._size += tenant.size - size_before
        while self._size > self.max_total or len(self._tenants) > self.max_passages:
            self._size -= self._tenants.popitem(last=False)[1].size


def _name(salt: str | None) -> str:
    """Return what a tenant is kept under: not the salt itself, which is a secret."""
    return "" if salt is None else hashlib.sha256(_encode(salt)).hexdigest()


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
