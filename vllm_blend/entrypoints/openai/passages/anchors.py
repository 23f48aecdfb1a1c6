"""What a text has in common with earlier ones, wherever it stands in them.

An anchor is a place in a text that its content alone chooses: where the hash of the next bytes is small. So a passage
has the same anchors in every text. An index knows where each anchor stood last. That earlier place is a candidate: it
is compared byte by byte, and the common run is extended to both sides.

Time and memory are linear in the text's length, whatever a client sends: an anchor has one candidate in an index, and
a text whose places are nearly all anchors, as that of one repeated character, counts as having none.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_blend.entrypoints.openai.passages.text_pieces import Span

Array = npt.NDArray[Any]

WINDOW = 32  # bytes that an anchor is found by
_HALF = WINDOW // 2  # bytes that decide whether a place is an anchor
_SPACING = 32  # bytes from one anchor to the next, on average
_MOST = 8  # a text with an anchor every so many bytes has none: ordinary text has a quarter of that
_BASE, _MIX = 0x9E3779B1, 0x85EBCA6B  # odd: nothing is lost when hashes are multiplied by them
_SENTENCE, _WORD = 24, 64  # characters by which an end of a run is moved at most, to one of a sentence or of a word
_MIN_SLOTS = 32
_STEP = 64  # bytes that are compared first
_COST = 256  # of looking at a candidate, in bytes compared


class AnchoredText:
    """A text, its bytes (UTF-8), and its anchors, which are places among these."""

    def __init__(self, text: str) -> None:
        self.text, self.data = text, text.encode("utf-8", "surrogatepass")

    @cached_property
    def _hashes(self) -> Array:
        return _hash_windows(self.data)

    @cached_property
    def _is_anchor(self) -> Array:
        chosen: Array = self._hashes[: max(0, len(self.data) - WINDOW + 1)] < (1 << 32) // _SPACING
        if np.count_nonzero(chosen) * _MOST > len(self.data):
            chosen[:] = False
        return chosen

    @cached_property
    def anchors(self) -> Array:
        return np.flatnonzero(self._is_anchor)

    def anchors_and(self, places: Iterable[int]) -> Array:
        """Return the anchors and those of other places at which a whole window begins, in order."""
        chosen = self._is_anchor.copy()
        chosen[[place for place in places if place < len(chosen)]] = True
        return np.flatnonzero(chosen)

    def keys(self, places: Array) -> Array:
        """Return the hashes of the windows at these places."""
        hashes: Array = self._hashes[places] * np.uint32(_BASE) + self._hashes[places + _HALF]
        return hashes

    @cached_property
    def _characters(self) -> Array | None:
        """The bytes at which characters begin, and the end; None if every character is one byte."""
        if len(self.data) == len(self.text):
            return None
        codes = np.frombuffer(self.data, np.uint8)
        return np.append(np.flatnonzero((codes & 0xC0) != 0x80), len(codes))

    def byte(self, character: int) -> int:
        return character if self._characters is None else int(self._characters[character])

    def characters_within(self, start: int, stop: int) -> Span:
        """Return the characters that lie within a span of bytes."""
        if self._characters is None:
            return start, stop
        first, last = np.searchsorted(self._characters, start), np.searchsorted(self._characters, stop, "right") - 1
        return int(first), max(int(first), int(last))


def _hash_windows(data: bytes) -> Array:
    """Return the hashes of `_HALF` bytes from each place: a polynomial of the four integers that they are."""
    count = len(data) - _HALF + 1
    if count <= 0:
        return np.zeros(0, np.uint32)
    words: Array = np.ndarray((len(data) - 3,), "<u4", data, 0, (1,))
    pairs = words[:-4] * np.uint32(_BASE)
    pairs += words[4:]
    hashes = pairs[:-8] * np.uint32(_BASE * _BASE % (1 << 32))
    hashes += pairs[8:]
    return hashes


class TextIndex:
    """Texts by number, each with a name, and where anchors stood last in them. Forgotten texts keep their numbers."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.names: list[bytes] = []
        self.numbers: dict[bytes, int] = {}
        self.num_forgotten = 0  # bytes
        self._starts = array("q", [0])  # where each text starts, and where all end
        self._table: Array = np.zeros(_MIN_SLOTS, np.uint64)  # by the key's hash: the key, and its place + 1
        self._num_added = 0  # to the table, since it was counted

    def span(self, number: int) -> Span:
        return self._starts[number], self._starts[number + 1]

    def add(self, text: AnchoredText, named: Iterable[tuple[Span, bytes]]) -> None:
        """Add texts that are spans of bytes of this one, in order, but for those whose names are known."""
        begins, ends, shifts = [], [], []
        for (start, stop), name in named:
            if name not in self.numbers:
                begins.append(start)
                ends.append(stop)
                shifts.append(len(self.data) - start)
                self.data += text.data[start:stop]
                self._starts.append(len(self.data))
                self.numbers[name] = len(self.names)
                self.names.append(name)
        if not begins:
            return
        starts, stops, moves = (np.array(given) for given in (begins, ends, shifts))
        places = np.concatenate([text.anchors, starts])
        spans = np.searchsorted(starts, places, "right") - 1
        is_inside = (spans >= 0) & (places + WINDOW <= stops[spans])
        places, spans = places[is_inside], spans[is_inside]
        self._insert(text.keys(places), places + moves[spans])

    def forget(self, name: bytes) -> None:
        number = self.numbers.pop(name, None)
        if number is not None:
            start, stop = self.span(number)
            self.data[start:stop] = b"\xff" * (stop - start)  # UTF-8 has no such byte
            self.num_forgotten += stop - start

    def compacted(self) -> TextIndex:
        """Return an index of the texts that are not forgotten."""
        fresh = TextIndex()
        for name, number in self.numbers.items():
            text = AnchoredText(self.data[slice(*self.span(number))].decode("utf-8", "surrogatepass"))
            fresh.add(text, [((0, len(text.data)), name)])
        return fresh

    def look_up(self, text: AnchoredText, places: Array) -> tuple[_Found, Array]:
        """Return the candidates at places of a text, in order, and the places that have none."""
        keys = text.keys(places).astype(np.uint64)
        entries = self._table[self._slots(keys)]
        is_hit = (entries >> np.uint64(32) == keys) & (entries != 0)
        found, stood = places[is_hit], (entries[is_hit] & np.uint64(0xFFFFFFFF)).astype(np.int64) - 1
        starts = np.frombuffer(self._starts, np.int64)
        numbers = np.searchsorted(starts, stood, "right") - 1
        return _Found(self, found, numbers, found - (stood - starts[numbers])), places[~is_hit]

    def _slots(self, keys: Array) -> Array:
        return (keys * np.uint64(_MIX) & np.uint64(0xFFFFFFFF)) >> np.uint64(33 - len(self._table).bit_length())

    def _insert(self, keys: Array, places: Array) -> None:
        """Put places into the table, which keeps the last one in each slot. A quarter of it is in use at most."""
        self._num_added += len(keys)
        if 4 * self._num_added > len(self._table):
            entries = self._table[self._table != 0]
            self._num_added = len(entries) + len(keys)
            if 4 * self._num_added > len(self._table):
                self._table = np.zeros(1 << (4 * self._num_added).bit_length(), np.uint64)
                self._table[self._slots(entries >> np.uint64(32))] = entries
        keys = keys.astype(np.uint64)
        self._table[self._slots(keys)] = (keys << np.uint64(32)) | (places + 1).astype(np.uint64)


class _Found:
    """Candidates of one index, by place."""

    def __init__(self, known: TextIndex, places: Array, numbers: Array, begins: Array) -> None:
        self.known, self._arrays = known, (places, numbers, begins)

    def __bool__(self) -> bool:
        return len(self._arrays[0]) > 0

    @cached_property
    def _all(self) -> list[list[int]]:
        return [each.tolist() for each in self._arrays]

    @cached_property
    def _changes(self) -> list[list[int]]:
        """Those candidates whose text does not begin where that of the candidate before does."""
        _, numbers, begins = self._arrays
        chosen = np.append(0, np.flatnonzero((np.diff(numbers) != 0) | (np.diff(begins) != 0)) + 1)
        return [each[chosen].tolist() for each in self._arrays]

    def between(self, start: int, stop: int, only_changes: bool = False) -> Iterator[tuple[int, int, int]]:
        """Return the candidates within a span of bytes: a place, a text's number, and where that would begin."""
        places, numbers, begins = self._changes if only_changes else self._all
        chosen = slice(bisect_left(places, start), bisect_left(places, stop))
        return zip(places[chosen], numbers[chosen], begins[chosen], strict=True)


class Comparison:
    """Compares a text with those of indexes, at its anchors and at other places. A place is looked up in an index if
    those before it do not have it. `spent` is what that has cost so far, in bytes compared: when `limit` is used up,
    nothing more is found."""

    def __init__(self, text: AnchoredText, places: Iterable[int], indexes: Sequence[TextIndex]) -> None:
        self.text, self.spent, self.limit = text, 0, 8 * len(text.data) + 64 * _COST
        self._found = []
        looked_at = text.anchors_and(places)
        for index in indexes:
            found, looked_at = index.look_up(text, looked_at)
            self._found += [found] if found else []

    def wholes(self, start: int, stop: int) -> Iterator[tuple[Span, TextIndex, int]]:
        """Yield where whole texts stand whose first anchor here is within a span of bytes, and their numbers."""
        data, spans = self.text.data, set()
        for found in self._found:
            known = found.known
            for _, number, begin in found.between(start, stop, only_changes=True):
                first, last = known.span(number)
                span = begin, begin + last - first
                if begin < 0 or span[1] > len(data) or span in spans or not self._pay(last - first):
                    continue
                if data[begin : span[1]] == known.data[first:last]:
                    spans.add(span)
                    yield span, known, number

    def runs(self, start: int, stop: int, min_characters: int) -> Iterator[tuple[Span, TextIndex, int]]:
        """Yield the characters, from left to right, that have been in other texts, of those within a span of bytes.
        They begin and end at words, lines or sentences, if there are any nearby."""
        candidates = [(*each, found.known) for found in self._found for each in found.between(start, stop)]
        for place, number, begin, known in sorted(candidates, key=itemgetter(0)):
            if place >= start and self._pay(0):
                run = self._extended(place, known, number, begin, (start, stop))
                found = self._trimmed(run, (start, stop))
                if found[1] - found[0] >= min_characters:
                    yield found, known, number
                    start = self.text.byte(found[1])

    def _pay(self, num_bytes: int) -> bool:
        if self.spent > self.limit:
            return False
        self.spent += num_bytes + _COST
        return True

    def _extended(self, place: int, known: TextIndex, number: int, begin: int, within: Span) -> Span:
        """Return the longest common run around a place, within a span of bytes."""
        first, last = known.span(number)
        stood = first + place - begin
        after = self._common(known.data, place, stood, min(within[1] - place, last - stood), 1)
        if after < WINDOW:
            return place, place
        before = self._common(known.data, place, stood, min(place - within[0], stood - first), -1)
        return place - before, place + after

    def _common(self, other: bytearray, place: int, stood: int, limit: int, way: int) -> int:
        """Return how many bytes are the same to the right of two places (`way` 1), or to the left (-1)."""
        data = self.text.data

        def is_same(begin: int, end: int) -> bool:
            self.spent += end - begin
            if way < 0:
                begin, end = -end, -begin
            return data[place + begin : place + end] == other[stood + begin : stood + end]

        same, step, high = 0, _STEP, limit
        while same < limit:
            end = min(same + step, limit)
            if not is_same(same, end):
                high = end - 1
                break
            same, step = end, 2 * step
        while same < high:
            middle = (same + high + 1) // 2
            if is_same(same, middle):
                same = middle
            else:
                high = middle - 1
        return same

    def _trimmed(self, run: Span, within: Span) -> Span:
        """Return a run of bytes as characters, its ends moved to the next line or sentence inside it, or else to a
        word. Ends of the span that it is within need not be moved."""
        text, (start, stop) = self.text.text, self.text.characters_within(*run)
        if run[0] > within[0]:
            places = range(start, min(start + _WORD, stop))
            start = _choose(text, places, start)
        if run[1] < within[1]:
            places = range(stop, max(stop - _WORD, start), -1)
            stop = _choose(text, places, stop)
        part = text[start:stop]
        return stop - len(part.lstrip()), start + len(part.rstrip())


def _choose(text: str, places: Sequence[int], default: int) -> int:
    """Return the first place where a line or a sentence ends, or else a word."""
    words = None
    for at, place in enumerate(places):
        before, after = text[place - 1 : place], text[place : place + 1]
        is_end = "\n" in (before, after) or before in "。！？" or (before in ".!?" and not after.isalnum())
        if is_end and at < _SENTENCE:
            return place
        if words is None and (before.isspace() or after.isspace()):
            words = place
    return default if words is None else words
