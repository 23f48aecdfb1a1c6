"""The pieces of a text that may be passages: what stands between blank lines, in `<source>` and `<document>` elements,
and between LMCache's separators, without a number before it, such as `[1]` or `Document 3:`.

Every function here takes a time that is linear in the text's length, as clients send what they like.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

Span = tuple[int, int]

_BLANK_LINE = "\n\n"
_USUAL = re.compile(rf"{_BLANK_LINE}(?=\S)")
_TAG = re.compile(r"<(/?)(source|document)\b[^<>]{0,1000}>", re.IGNORECASE)
_SEPARATOR = re.compile(r"\n[ \t]*\r?\n\s*")
_SEPARATORS = re.compile(rf"{_SEPARATOR.pattern}| # # ")  # which takes ten times as long
_LABEL = r"[\[({#*]{0,3}(?:\w{1,20}[ _]?)?[\[({#]{0,2}\d{1,4}[\])}:.*]{1,4}\s{1,8}"
_LABEL_HERE = re.compile(_LABEL)
_LABELLED_LINE = re.compile(rf"\n[ \t]{{0,8}}{_LABEL}")
_MIN_LABELLED = 64  # characters: the items of an ordinary list are shorter


class TextPiece(NamedTuple):
    """Characters `start` to `stop` - 1, which begin and end with text."""

    start: int
    stop: int

    def moved(self, offset: int) -> TextPiece:
        """Return the same piece of a text that begins at `offset` in another one."""
        return TextPiece(self.start + offset, self.stop + offset)

    def before_question(self, text: str) -> TextPiece | None:
        """Return what stands before the last two lines of the piece, None if there is nothing."""
        last = text.rfind("\n", self.start, self.stop)
        return piece_between(text, self.start, max(text.rfind("\n", self.start, max(last, self.start)), self.start))


def split_text(text: str) -> list[TextPiece]:
    """Return the pieces of a text in order, without those that are white space."""
    pieces: list[TextPiece] = []
    position = 0
    for start, stop, content in _elements(text):
        pieces += _split_at_separators(text, position, start)
        element = piece_between(text, *content)
        pieces += [] if element is None else _without_labels(text, element)
        position = stop
    return pieces + _split_at_separators(text, position, len(text))


def _without_labels(text: str, piece: TextPiece) -> list[TextPiece]:
    """Return a piece without the number before it, or what stands behind the numbers that begin its lines, if all that
    is long."""
    label = _LABEL_HERE.match(text, piece.start, piece.stop)
    start = label.end() if label else piece.start
    lines = list(_LABELLED_LINE.finditer(text, start, piece.stop))
    starts, stops = [start, *(each.end() for each in lines)], [*(each.start() for each in lines), piece.stop]
    if lines and min(map(int.__sub__, stops[1:], starts[1:])) >= _MIN_LABELLED:
        parts = [piece_between(text, *span) for span in zip(starts, stops, strict=True)]
        return [part for part in parts if part is not None]
    rest = piece if label is None else piece_between(text, start, piece.stop)
    return [] if rest is None else [rest]


def _elements(text: str) -> Iterator[tuple[int, int, Span]]:
    """Yield the outermost elements: where each starts and stops with its tags, and where its content does."""
    opened: list[tuple[str, int, int]] = []
    num_open: Counter[str] = Counter()
    found: list[tuple[int, int, Span]] = []
    for tag in _TAG.finditer(text):
        name = tag[2].lower()
        if not tag[1]:
            if not tag[0].endswith("/>"):
                opened.append((name, tag.start(), tag.end()))
                num_open[name] += 1
            continue
        while num_open[name]:
            inner, start, begin = opened.pop()
            num_open[inner] -= 1
            if inner == name:
                while found and found[-1][0] > start:  # elements of this one
                    found.pop()
                found.append((start, tag.end(), (begin, tag.start())))
                break
    return iter(found)


def _split_at_separators(text: str, start: int, stop: int) -> list[TextPiece]:
    pieces, position = [], start
    separators = _SEPARATOR if text.find(" # # ", start, stop) < 0 else _SEPARATORS
    for separator in separators.finditer(text, start, stop):
        piece = piece_between(text, position, separator.start())
        if piece is not None:
            pieces += _without_labels(text, piece)
        position = separator.end()
    last = piece_between(text, position, stop)
    return pieces if last is None else pieces + _without_labels(text, last)


def piece_between(text: str, start: int, stop: int) -> TextPiece | None:
    """Return what of a text stands between two places, without white space around it, None if nothing does."""
    part = text[start:stop].rstrip()
    core = part.lstrip()
    stop = start + len(part)
    return TextPiece(stop - len(core), stop) if core else None


def end_of_passage(text: str, stop: int) -> int:
    """Return where a passage ends whose text ends at `stop`: after the blank line that follows, if that is as usual."""
    return stop + len(_BLANK_LINE) if _USUAL.match(text, stop) else stop
