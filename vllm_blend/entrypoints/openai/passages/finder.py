"""Finds passages in plain text that a tenant has sent before, by what they say.

A passage is known once it has been seen, or registered. What a prompt has in common with an earlier one from its very
beginning is left to the prefix cache, which is exact, where that covers more than known passages do. Everything is
kept by tenant (the salt of its requests): nothing that one tenant sends changes what is found for another.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from vllm_blend.entrypoints.openai.passages.text_pieces import Span, TextPiece, split_text

T = TypeVar("T")

MAX_PIECES = 8192  # of a prompt: one that has more is not looked at
BLEND_COST = 1 / 3  # of computing the passages in full: the share that is computed again, and what encoding costs
_MOVED = b""  # in place of what stands before a passage that has stood behind different texts
_FIRST = b"system"  # in place of what stands before the first piece of a system prompt: dates and tools may change
_FIXED_AFTER = 4  # times that a piece stood in one place, until it counts as part of a fixed beginning
_MAX_LINES = 32  # of the first piece: an instruction may end in one of them, and a passage follow without a blank line


@dataclass(frozen=True)
class TextSection:
    """Pieces of one text of a prompt, a message or a part of one, with their places in the whole prompt. The last
    `num_kept` of them are no passages: they hold the question. Nor are the first `num_fixed`, if they stand at the
    beginning of the prompt and nowhere else: they are what a system prompt begins with. The pieces of a text that is to
    be stored are one passage together, which counts as known."""

    pieces: Sequence[TextPiece]
    num_kept: int = 0
    num_fixed: int = 0
    is_stored: bool = False

    @property
    def free(self) -> Sequence[TextPiece]:
        """Return the pieces that may be passages."""
        return self.pieces[: len(self.pieces) - self.num_kept]


@dataclass(frozen=True)
class FoundPassages:
    """What is a chunk in a prompt, in characters. `fixed` is where the pieces end that stand before all others and have
    always stood there, None if there are none."""

    chunks: tuple[Span, ...] = ()
    fixed: int | None = None


@dataclass
class _Tenant:
    """What has been seen lately. `seen`: a text -> what stood before it, and how often. `prefixes`: the beginnings of
    prompts that were computed without chunks."""

    seen: OrderedDict[bytes, tuple[bytes, int]] = field(default_factory=OrderedDict)
    prefixes: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    @property
    def size(self) -> int:
        return len(self.seen) + len(self.prefixes)

    def remember(self, text: bytes, before: bytes) -> None:
        last, count = self.seen.get(text, (before, 0))
        self.seen[text] = (before if last == before else _MOVED, count + 1)
        self.seen.move_to_end(text)


@dataclass
class _Registered:
    """Passages that are known until they are forgotten as often. `lengths`: by their first piece."""

    texts: Counter[bytes] = field(default_factory=Counter)
    lengths: dict[bytes, Counter[int]] = field(default_factory=dict)


class PassageFinder:
    """Knows the passages of every tenant. Any thread may use it.

    Pieces of fewer than `min_characters` are no passages. At most `max_passages` are remembered for a tenant and eight
    times as many for all, the latest; an entry takes about 300 bytes. At most `max_prefixes` beginnings of prompts are
    taken to be in the prefix cache. With `detects=False` only what a request names is a passage.
    """

    def __init__(
        self, detects: bool = True, min_characters: int = 64, max_passages: int = 32768, max_prefixes: int = 1024
    ) -> None:
        for name, value in (("min_characters", min_characters), ("max_passages", max_passages)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.detects, self.min_characters = detects, min_characters
        self.max_passages, self.max_total, self.max_prefixes = max_passages, 8 * max_passages, max_prefixes
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._registered: dict[str, _Registered] = {}
        self._size = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return how many entries are remembered for all tenants, without registered passages."""
        return self._size

    def find(self, whole: str, sections: Sequence[TextSection], salt: str | None, names_some: bool) -> FoundPassages:
        """Return the chunks among the pieces of a prompt, and remember all pieces that may be passages.

        `names_some`: the request names passages itself, so that its prompt is blended in any case.
        """
        if not self.detects:
            sections = [section for section in sections if section.is_stored]
        if not 0 < sum(len(section.pieces) for section in sections) <= MAX_PIECES:
            return FoundPassages()
        name = _name(salt)
        with self._lock:
            tenant = self._tenant(name)
            before = tenant.size
            registered = self._registered.get(name, _Registered())
            found = _Search(tenant, registered, self.min_characters, whole).run(sections, names_some)
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
                tenant.remember(_digest(passage.strip()), _MOVED)
            self._trim(tenant, before)

    def register(self, passage: str, salt: str | None) -> None:
        """Know a passage of any length until it is forgotten as often. It has text."""
        first, text, length = _identify(passage)
        with self._lock:
            registered = self._registered.setdefault(_name(salt), _Registered())
            registered.texts[text] += 1
            registered.lengths.setdefault(first, Counter())[length] += 1

    def forget(self, passage: str, salt: str | None) -> None:
        """Undo one `register` of a passage, and forget that it has been seen."""
        first, text, length = _identify(passage)
        name = _name(salt)
        with self._lock:
            registered = self._registered.get(name)
            if registered is None or not registered.texts[text]:
                return
            lengths = registered.lengths[first]
            _drop_one(registered.texts, text)
            _drop_one(lengths, length)
            if not lengths:
                del registered.lengths[first]
            if not registered.texts:
                del self._registered[name]
            tenant = self._tenants.get(name)
            if tenant is not None and tenant.seen.pop(text, None) is not None:
                self._size -= 1

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.setdefault(name, _Tenant())
        self._tenants.move_to_end(name)
        return tenant

    def _trim(self, tenant: _Tenant, size_before: int) -> None:
        """Forget what is too much: the oldest of this tenant, and of those that have not been here for longest."""
        while len(tenant.seen) > self.max_passages:
            tenant.seen.popitem(last=False)
        while len(tenant.prefixes) > self.max_prefixes:
            tenant.prefixes.popitem(last=False)
        self._size += tenant.size - size_before
        while self._size > self.max_total or len(self._tenants) > self.max_passages:
            self._size -= self._tenants.popitem(last=False)[1].size


@dataclass
class _Search:
    """One look through the pieces of a prompt, from left to right."""

    tenant: _Tenant
    registered: _Registered
    min_characters: int
    whole: str
    fixed: int | None = None
    cached: int = 0  # where the longest beginning ends that an earlier prompt had, too
    known: list[Span] = field(default_factory=list)
    ends: list[bytes] = field(default_factory=list)  # digests of the whole text up to the end of each piece
    places: list[tuple[bytes, bytes]] = field(default_factory=list)  # of pieces: the text, and what stands before it
    heads: list[bytes] = field(default_factory=list)  # digests of the beginnings of the first piece, line by line

    def __post_init__(self) -> None:
        self._running, self._position = hashlib.blake2b(digest_size=16), 0
        self._is_leading = True

    def run(self, sections: Sequence[TextSection], names_some: bool) -> FoundPassages:
        for section in sections:
            self._look_at(section)
        for text, before in self.places:
            self.tenant.remember(text, before)
        for head in self.heads:
            self.tenant.remember(head, _MOVED)
        if not names_some and not self._is_worth_blending():
            self.known = []
        if not (self.known or names_some):
            for end in self.ends:
                self.tenant.prefixes[end] = None
                self.tenant.prefixes.move_to_end(end)
        return FoundPassages(tuple(self.known), self.fixed)

    def _is_worth_blending(self) -> bool:
        """Return whether chunks spare more than the prefix cache does. That has all from the fixed beginning up to
        `cached`. A blend has the known passages of this and of the rest, and computes some of their tokens again."""
        known = sum(stop - start for start, stop in self.known)
        inside = sum(stop - start for start, stop in self.known if stop <= self.cached)
        cached = max(0, self.cached - (self.fixed or 0))
        return known - inside > BLEND_COST * known + cached - inside

    def _look_at(self, section: TextSection) -> None:
        free, skip_to = section.free, 0
        if section.is_stored and free:
            self.known.append((free[0].start, free[-1].end))
            skip_to, self._is_leading = free[-1].end, False
        for index, piece in enumerate(section.pieces):
            before, end = self._digest_up_to(piece.start), self._digest_up_to(piece.stop)
            self.ends.append(end)
            if end in self.tenant.prefixes:
                self.cached = piece.end
            if index >= len(free):
                self._is_leading = False
            elif piece.start >= skip_to:
                text = _digest(self.whole[piece.start : piece.stop])
                if index < section.num_fixed:
                    before = _FIRST
                self.places.append((text, before))
                registered = self._registered_at(free, index, text)
                if self._is_leading and registered is None:
                    fixed = self._end_of_fixed(piece, text, before)
                    self.fixed = self.fixed if fixed is None else fixed
                    if fixed == piece.end:
                        continue
                    if fixed is not None:  # a passage follows in the same piece
                        piece = piece.without_beginning(self.whole, fixed)
                        text = _digest(self.whole[piece.start : piece.stop])
                        self.places.append((text, _MOVED))
                self._is_leading = False
                if registered is not None:
                    self.known.append(registered)
                    skip_to = registered[1]
                elif self._is_known(piece, text):
                    self.known.append((piece.start, piece.end))
                else:
                    self.known += self._known_inside(piece)

    def _digest_up_to(self, position: int) -> bytes:
        """Return the digest of the whole text up to a position, which must not be below that of the last call."""
        self._running.update(_encode(self.whole[self._position : position]))
        self._position = position
        return self._running.digest()

    def _end_of_fixed(self, piece: TextPiece, text: bytes, before: bytes) -> int | None:
        """Return where the part of a piece ends that has always stood at the beginning of a prompt: with the piece, or
        with the last of its lines that all prompts have which begin with its first line. None if there is none."""
        if self.fixed is None and not piece.inner:
            ends = list(islice(_line_ends(self.whole, piece), _MAX_LINES))
            running, position, heads = hashlib.blake2b(before, digest_size=16), piece.start, []
            for end in (*ends, piece.stop):
                running.update(_encode(self.whole[position:end]))
                heads.append(running.copy().digest())
                position = end
            self.heads += heads
            counts = [self.tenant.seen.get(head, (_MOVED, 0))[1] for head in heads]
            if counts[-1] < counts[0]:
                return ends[max(index for index, count in enumerate(counts) if count == counts[0])]
        return piece.end if self._is_fixed(text, before) else None

    def _is_fixed(self, text: bytes, before: bytes) -> bool:
        """Return whether a piece at the beginning of a prompt has always stood there. The first one is taken to be an
        instruction, that of a system prompt at once; others may be passages that were not found elsewhere yet, so they
        have to stand there for longer."""
        last, count = self.tenant.seen.get(text, (before, 0))
        needed = 0 if before == _FIRST else 1 if self.fixed is None else _FIXED_AFTER
        return last == before and count >= needed

    def _is_known(self, piece: TextPiece, text: bytes) -> bool:
        return piece.stop - piece.start >= self.min_characters and text in self.tenant.seen

    def _registered_at(self, pieces: Sequence[TextPiece], index: int, text: bytes) -> Span | None:
        """Return the longest registered passage that begins with a piece, whose digest is `text`, and ends with it or
        another one."""
        lengths = self.registered.lengths.get(text)
        if lengths is None:
            return None
        start, ends = pieces[index].start, {piece.stop: piece.end for piece in pieces[index:]}
        for length in sorted(lengths, reverse=True):
            end = ends.get(start + length)
            if end is not None and _digest(self.whole[start : start + length]) in self.registered.texts:
                return start, end
        return None

    def _known_inside(self, piece: TextPiece) -> Iterator[Span]:
        """Yield the known passages in an element that is not known itself."""
        skip_to = 0
        for index, inner in enumerate(piece.inner):
            if inner.start >= skip_to:
                text = _digest(self.whole[inner.start : inner.stop])
                registered = self._registered_at(piece.inner, index, text)
                if registered is not None:
                    skip_to = registered[1]
                    yield registered
                elif self._is_known(inner, text):
                    yield inner.start, inner.end


def _line_ends(whole: str, piece: TextPiece) -> Iterator[int]:
    """Yield where the lines of a piece end, with their line breaks, without the last one."""
    end = whole.find("\n", piece.start, piece.stop) + 1
    while end:
        yield end
        end = whole.find("\n", end, piece.stop) + 1


def _identify(passage: str) -> tuple[bytes, bytes, int]:
    """Return the digests of a passage's first piece and of all of it, and its length."""
    core = passage.strip()
    first = split_text(core)[0]
    return _digest(core[first.start : first.stop]), _digest(core), len(core)


def _drop_one(counts: Counter[T], key: T) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def _name(salt: str | None) -> str:
    """Return what a tenant is kept under: not the salt itself, which is a secret."""
    return "" if salt is None else hashlib.sha256(_encode(salt)).hexdigest()


def _digest(text: str) -> bytes:
    return hashlib.blake2b(_encode(text), digest_size=16).digest()


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
