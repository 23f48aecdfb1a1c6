"""The pieces of a text that may be passages: what stands between blank lines, in `<source>` and `<document>` elements,
and between LMCache's separators.

Every function here takes a time that is linear in the text's length, as clients send what they like.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

Span = tuple[int, int]

_BLANK_LINE = "\n\n"
_TAG = re.compile(r"<(/?)(source|document)\b[^<>]{0,1000}>", re.IGNORECASE)
_SEPARATOR = re.compile(r"\r?\n[ \t]*\r?\n\s*| # # ")


@dataclass(frozen=True)
class TextPiece:
    """Characters `start` to `stop` - 1, which begin and end with text. `end` is where the piece ends with the blank
    line that follows it, if that is as usual. `inner` are the pieces of an element."""

    start: int
    stop: int
    end: int
    inner: tuple[TextPiece, ...] = ()

    def moved(self, offset: int) -> TextPiece:
        """Return the same piece of a text that begins at `offset` in another one."""
        inner = tuple(piece.moved(offset) for piece in self.inner)
        return TextPiece(self.start + offset, self.stop + offset, self.end + offset, inner)

    def without_beginning(self, text: str, stop: int) -> TextPiece:
        """Return what is left of the piece behind `stop`, from its first character that is no white space."""
        part = text[stop : self.stop]
        return TextPiece(stop + len(part) - len(part.lstrip()), self.stop, self.end)


def split_text(text: str) -> list[TextPiece]:
    """Return the pieces of a text in order, without those that are white space."""
    pieces: list[TextPiece] = []
    position = 0
    for start, stop, content in _elements(text):
        pieces += _split_at_separators(text, position, start)
        element = _piece(text, *content)
        if element is not None:
            inner = tuple(_split_at_separators(text, *content))
            pieces.append(TextPiece(element.start, element.stop, element.stop, inner if len(inner) > 1 else ()))
        position = stop
    return pieces + _split_at_separators(text, position, len(text))


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
    for separator in _SEPARATOR.finditer(text, start, stop):
        piece = _piece(text, position, separator.start())
        if piece is not None:
            is_usual = separator[0] == _BLANK_LINE and piece.stop == separator.start() and separator.end() < len(text)
            pieces.append(TextPiece(piece.start, piece.stop, separator.end() if is_usual else piece.stop))
        position = separator.end()
    last = _piece(text, position, stop)
    return pieces if last is None else [*pieces, last]


def _piece(text: str, start: int, stop: int) -> TextPiece | None:
    part = text[start:stop]
    core = part.strip()
    if not core:
        return None
    start += len(part) - len(part.lstrip())
    return TextPiece(start, start + len(core), start + len(core))
