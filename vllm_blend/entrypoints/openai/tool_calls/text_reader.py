"""A text that arrives in pieces, read as if it were whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import TypeVar

from vllm_blend.entrypoints.openai.tool_calls.deltas import MessageDelta, ParsedMessage, join_deltas
from vllm_blend.entrypoints.openai.tool_calls.json_scanner import SPACE

T = TypeVar("T")
Steps = Generator[None, None, T]


class TextReader(ABC):
    """Reads a text by a generator that yields where it needs more of it, and tells what it has read in pieces.

    What has been read, but may not be told yet, is held back. With `feed` and `finish`, the pieces put together are
    what `parse` returns for the whole text, and every character is read once.
    """

    def __init__(self) -> None:
        self._text, self._position, self._ended = "", 0, False
        self._held: list[str] = []
        self._steps = self._run()

    @property
    def num_held(self) -> int:
        """Return how many characters at the end of the text are held back."""
        return sum(map(len, self._held)) + len(self._text) - self._position

    def feed(self, delta: str) -> MessageDelta:
        """Return what can be told after `delta`, the next piece of the text."""
        self._text = self._text[self._position :] + delta
        self._position = 0
        next(self._steps, None)
        return self._take_delta()

    def finish(self) -> MessageDelta:
        """Return what was held back until the end of the text."""
        self._ended = True
        next(self._steps, None)
        return self._take_delta()

    def parse(self, text: str) -> ParsedMessage:
        """Return what a whole text says. Use a new reader for each text."""
        return join_deltas([self.feed(text), self.finish()])

    @abstractmethod
    def _run(self) -> Steps[None]:
        """Read a whole text."""

    @abstractmethod
    def _take_delta(self) -> MessageDelta:
        """Return what was told since the last time."""

    def _hold(self, length: int) -> None:
        self._held.append(self._text[self._position : self._position + length])
        self._position += length

    def _next(self) -> Steps[str]:
        """Skip white space; return the character that follows, and "" at the end of the text."""
        while True:
            match = SPACE.match(self._text, self._position)
            self._hold(match.end() - self._position if match else 0)
            if self._position < len(self._text):
                return self._text[self._position]
            if self._ended:
                return ""
            yield

    def _accept(self, mark: str) -> Steps[bool]:
        """Go behind `mark` if it is what follows."""
        while not self._ended and len(self._text) - self._position < len(mark):
            if not mark.startswith(self._text[self._position :]):
                return False
            yield
        found = self._text.startswith(mark, self._position)
        self._hold(len(mark) if found else 0)
        return found

    def _until(self, mark: str | None, tell: Callable[[str], None]) -> Steps[bool]:
        """Tell the text up to a mark, or to its end; return whether the mark was found. Half a mark is not told."""
        while True:
            found = self._text.find(mark, self._position) if mark else -1
            stop = found if found >= 0 else len(self._text)
            if found < 0 and mark and not self._ended:
                stop -= _length_of_partial(mark, self._text, self._position)
            tell(self._text[self._position : stop])
            self._position = stop
            if found >= 0 or self._ended:
                return found >= 0
            yield


def _length_of_partial(mark: str, text: str, start: int) -> int:
    """Return how many characters at the end of `text` may be the beginning of `mark`."""
    lengths = range(min(len(mark) - 1, len(text) - start), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)
