"""One look through a prompt: which of its pieces, and which runs of characters in them, are known."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from vllm_blend.entrypoints.openai.passages.anchors import AnchoredText, Comparison
from vllm_blend.entrypoints.openai.passages.known import (
    BARE,
    MOVED,
    PART,
    SEEN,
    USED,
    KnownPassages,
    RegisteredPassages,
    digest,
)
from vllm_blend.entrypoints.openai.passages.text_pieces import Span, TextPiece, end_of_passage, piece_between

BLEND_COST = 1 / 3  # of computing the passages in full: the share that is computed again, and what encoding costs
_FIRST = b"system"  # in place of what stands before the first piece of a system prompt: dates and tools may change
_FIXED_AFTER = 4  # times that a piece stood in one place, until it counts as part of a fixed beginning
_MAX_LINES = 32  # of the first piece: an instruction may end in one of them, and a passage follow without a blank line
_RUN = 2  # times as long as other passages are those that are cut out of a piece at least
_MARKS = 128  # bytes at least from one place in a piece to the next up to which beginnings are compared
_NEAR = 64  # bytes


@dataclass(frozen=True)
class TextSection:
    """Pieces of one text of a prompt, a message or a part of one, with their places in the whole prompt. The last
    `num_kept` of them hold the question: their last two lines are no passages. Nor are the first `num_fixed`, if they
    stand at the beginning of the prompt and nowhere else: they are what a system prompt begins with. The pieces of a
    text that is to be stored are one passage together, which counts as known."""

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


class _Passage(NamedTuple):
    """A known passage in a prompt: its characters and its name."""

    start: int
    stop: int
    name: bytes
    is_registered: bool = False


class PassageSearch:
    """One look through the pieces of a prompt, from left to right."""

    def __init__(
        self, tenant: KnownPassages, registered: RegisteredPassages, min_characters: int, text: AnchoredText
    ) -> None:
        self.tenant, self.registered, self.min_characters = tenant, registered, min_characters
        self.text, self.whole = text, text.text
        self.fixed: int | None = None
        self.cached = 0  # where the longest beginning ends that an earlier prompt had, too
        self.known: list[Span] = []
        self.beginnings: list[bytes] = []  # digests of the whole text up to the end of each piece, and to marks
        self.places: list[tuple[bytes, bytes, int]] = []  # of pieces: the text, what stands before it, and its kind
        self.texts: list[tuple[Span, bytes]] = []  # to be found again: spans of bytes, and their names
        self._running, self._position, self._last = hashlib.blake2b(digest_size=16), 0, b""
        self._is_leading = True
        self._cursor = 0  # characters before it have been looked at

    def run(self, sections: Sequence[TextSection], names_some: bool) -> FoundPassages:
        self._starts = [piece.start for section in sections for piece in section.pieces]
        for section in sections:
            self._look_at(section)
        for text, before, kind in self.places:
            self.tenant.remember(text, before, kind)
        self.tenant.young.add(self.text, sorted(self.texts))
        if not names_some and not self._is_worth_blending():
            self.known = []
        if not (self.known or names_some):
            for each in self.beginnings:
                self.tenant.prefixes[each] = None
                self.tenant.prefixes.move_to_end(each)
        return FoundPassages(tuple(self.known), self.fixed)

    @cached_property
    def _comparison(self) -> Comparison:
        indexes = (self.registered.texts, self.tenant.young, self.tenant.old)
        return Comparison(self.text, map(self.text.byte, self._starts), [each for each in indexes if each.names])

    def _is_worth_blending(self) -> bool:
        """Return whether chunks spare more than the prefix cache does. That has all from the fixed beginning up to
        `cached`. A blend has the known passages of this and of the rest, and computes some of their tokens again."""
        known = sum(stop - start for start, stop in self.known)
        inside = sum(max(0, min(stop, self.cached) - start) for start, stop in self.known)
        cached = max(0, self.cached - (self.fixed or 0))
        return known - inside > BLEND_COST * known + cached - inside

    def _look_at(self, section: TextSection) -> None:
        free = section.free
        parts = [piece.before_question(self.whole) for piece in section.pieces[len(free) :]]
        stops = [piece.stop for piece in (*free, *parts) if piece is not None]
        self._cursor = max([self._cursor, *(piece.start for piece in section.pieces[:1])])
        if section.is_stored and free:
            self.known.append((free[0].start, end_of_passage(self.whole, free[-1].stop)))
            self._cursor, self._is_leading = free[-1].stop, False
        for index, piece in enumerate(section.pieces):
            before = self._before(piece.start)
            self._mark(piece.stop)
            part = piece if index < len(free) else parts[index - len(free)]
            if part is not None and part.start < self._cursor:
                part, before = piece_between(self.whole, self._cursor, part.stop), MOVED
            self._is_leading &= index < len(free)
            if part is not None:
                self._look_into(part, _FIRST if index < section.num_fixed else before, stops[-1], index < len(free))

    def _look_into(self, piece: TextPiece, before: bytes, limit: int, is_free: bool) -> None:
        """Look for passages in a piece, or if it is not free in what stands before the question. They end at `limit` at
        the latest."""
        text = self._name(piece.start, piece.stop)
        passages = self._passages_in(piece, text, limit)
        if self._is_leading and not (passages and passages[0].start <= piece.start and passages[0].is_registered):
            fixed = self._end_of_fixed(piece, text, before)
            self.fixed = self.fixed if fixed is None else fixed
            rest = piece if fixed is None else piece_between(self.whole, fixed, piece.stop)
            if rest is None:
                self._remember(piece.start, piece.stop, text, before, SEEN)
                self._cursor = piece.stop
                return
            if fixed is not None:  # a passage follows in the same piece
                self.places.append((text, before, PART))
                self._cursor, piece, before = fixed, rest, MOVED
                text = self._name(piece.start, piece.stop)
                passages = self._passages_in(piece, text, limit)
        self._is_leading = False
        kind = SEEN if is_free else PART
        if passages or piece.stop - piece.start >= self.min_characters:  # else a passage may begin with it
            self._cursor = max(piece.stop, passages[-1].stop) if passages else piece.stop
        for each in passages:
            end = end_of_passage(self.whole, each.stop)
            if end == each.stop or self.tenant.kind(each.name) == BARE:  # so that it has the same tokens everywhere
                end, used = each.stop, BARE
            else:
                used = USED
            self.known.append((each.start, end))
            self._remember(each.start, each.stop, each.name, before if each.name == text else MOVED, used)
        if not passages:
            self._remember(piece.start, piece.stop, text, before, kind)
        elif passages[0].name != text:
            start = piece.start
            for stop, after in [*(each[:2] for each in passages), (piece.stop, piece.stop)]:
                part = piece_between(self.whole, start, stop) if stop - start >= self.min_characters else None
                if part is not None and part.stop - part.start >= self.min_characters:
                    self._remember(part.start, part.stop, self._name(part.start, part.stop), MOVED, kind)
                start = after

    def _passages_in(self, piece: TextPiece, text: bytes, limit: int) -> list[_Passage]:
        """Return the known passages in a piece, the last of which may reach beyond it; `text` is its own name."""
        is_registered = text in self.registered.counts
        is_long = piece.stop - piece.start >= self.min_characters
        is_known = is_registered or (is_long and self.tenant.kind(text) != PART)
        wholes = self._wholes_in(piece, limit) if self.registered.counts or (is_long and not is_known) else []
        if is_known and not (wholes and wholes[-1].is_registered and wholes[-1].stop > piece.stop):
            return [_Passage(piece.start, piece.stop, text, is_registered)]
        passages, position = [], piece.start
        for whole in wholes:
            passages += [*self._runs(position, whole.start), whole]
            position = whole.stop
        return [*passages, *self._runs(position, piece.stop)]

    def _wholes_in(self, piece: TextPiece, limit: int) -> list[_Passage]:
        """Return known passages that stand there as they are, whatever is beside them: of those that overlap the
        longest."""
        found = []
        for span, known, number in self._comparison.wholes(self.text.byte(self._cursor), self.text.byte(piece.stop)):
            name, is_registered = known.names[number], known is self.registered.texts
            start, stop = self.text.characters_within(*span)
            is_long = is_registered or (stop - start >= self.min_characters and self.tenant.kind(name) != PART)
            if is_long and self._cursor <= start and stop <= limit:
                found.append(_Passage(start, stop, name, is_registered))
        if len(found) < 2:
            return found
        chosen: list[_Passage] = []
        for each in sorted(found, key=lambda each: (each.start - each.stop, not each.is_registered)):
            at = bisect_right(chosen, each)
            if (not at or chosen[at - 1].stop <= each.start) and (at == len(chosen) or each.stop <= chosen[at].start):
                chosen.insert(at, each)
        return chosen

    def _runs(self, start: int, stop: int) -> Iterator[_Passage]:
        """Yield what characters `start` to `stop` - 1 have in common with earlier texts. One of which this is the
        greater part is no longer a passage as a whole, unless it has been a chunk."""
        if stop - start < _RUN * self.min_characters:
            return
        span = self.text.byte(start), self.text.byte(stop)
        for run, known, number in self._comparison.runs(*span, _RUN * self.min_characters):
            first, last = known.span(number)
            if 2 * (self.text.byte(run[1]) - self.text.byte(run[0])) > last - first:
                self.tenant.break_up(known.names[number])
            yield _Passage(*run, self._name(*run))

    def _remember(self, start: int, stop: int, text: bytes, before: bytes, kind: int) -> None:
        self.places.append((text, before, kind))
        if text not in self.tenant.young.numbers:
            self.texts.append(((self.text.byte(start), self.text.byte(stop)), text))

    def _name(self, start: int, stop: int) -> bytes:
        return digest(self.text.data[self.text.byte(start) : self.text.byte(stop)])

    def _before(self, position: int) -> bytes:
        """Return what stands before a position, as a name: the last digest, and what follows that."""
        end = self.text.byte(position)
        if end - self._position > _NEAR:
            self._mark(position)
        return self._last + self.text.data[self._position : end]

    def _mark(self, position: int) -> None:
        """Take the text up to a position for one of the prompt's beginnings, and up to some places before that. If an
        earlier prompt began so, that is in the prefix cache."""
        stop = self.text.byte(position)
        while self._position < stop:
            step = max(_MARKS, 1 << max(self._position.bit_length() - 4, 0))  # an eighth of what stands before, at most
            place = min((self._position // step + 1) * step, stop)
            self._running.update(self.text.data[self._position : place])
            self._position, self._last = place, self._running.digest()
            self.beginnings.append(self._last)
            if self._last in self.tenant.prefixes:
                self.cached = position if place == stop else self.text.characters_within(place, place)[0]

    def _end_of_fixed(self, piece: TextPiece, text: bytes, before: bytes) -> int | None:
        """Return where the part of a piece ends that has always stood at the beginning of a prompt: with the piece, or
        with the last of its lines that all prompts have which begin with its first line. None if there is none."""
        if self.fixed is None:
            ends = list(islice(_line_ends(self.whole, piece), _MAX_LINES))
            running, position, heads = hashlib.blake2b(before, digest_size=16), piece.start, []
            for end in (*ends, piece.stop):
                running.update(self.whole[position:end].encode("utf-8", "surrogatepass"))
                heads.append(running.digest())
                position = end
            self.places += [(head, MOVED, PART) for head in heads]
            counts = [self.tenant.seen.get(head, (MOVED, 0))[1] for head in heads]
            if counts[-1] < counts[0]:
                return ends[max(index for index, count in enumerate(counts) if count == counts[0])]
        is_short = piece.stop - piece.start < self.min_characters
        return end_of_passage(self.whole, piece.stop) if self._is_fixed(text, before, is_short) else None

    def _is_fixed(self, text: bytes, before: bytes, is_short: bool) -> bool:
        """Return whether a piece at the beginning of a prompt has always stood there. The first one is taken to be an
        instruction, that of a system prompt at once; others may be passages that were not found elsewhere yet, unless
        they are too short, so they have to stand there for longer."""
        last, count, *_ = self.tenant.seen.get(text, (before, 0))
        needed = 0 if before == _FIRST else 1 if self.fixed is None or is_short else _FIXED_AFTER
        return last == before and count >= needed


def _line_ends(whole: str, piece: TextPiece) -> Iterator[int]:
    """Yield where the lines of a piece end, with their line breaks, without the last one."""
    end = whole.find("\n", piece.start, piece.stop) + 1
    while end:
        yield end
        end = whole.find("\n", end, piece.stop) + 1
