"""Assigns the tokens of an answer, with their log-probabilities, to its blocks of text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from vllm_blend.entrypoints.openai.blocks import Block, BlockReader, Step
from vllm_blend.entrypoints.openai.protocol.chat import TokenLogprob


class BlockLogprobs:
    """Gives tokens to blocks as their text comes: a token to the block that shows any of its text, with the first piece
    that does. Those of marks between blocks belong to none."""

    def __init__(self) -> None:
        self.new: list[dict[str, Any]] = []  # those that the last text gave to its block
        self._taken: dict[int, list[dict[str, Any]]] = {}  # by the block's index
        self._starts: dict[int, int] = {}  # where the text of each block begins
        self._text = ""  # of the answer, as far as it has been read
        self._waiting: deque[tuple[int, int, TokenLogprob]] = deque()  # with the places where its text begins and ends
        self._num_characters = 0  # of all tokens: the text lags behind while it may end with a stop string

    def of(self, block: Block) -> list[dict[str, Any]]:
        """Return the log-probabilities of the tokens of a block."""
        return self._taken.get(block.index, [])

    def add(self, tokens: Sequence[TokenLogprob]) -> None:
        """Add the next tokens, the text of which may come later."""
        for token in tokens:
            start, self._num_characters = self._num_characters, self._num_characters + len(token.token)
            if token.bytes:  # what the text leaves out has none
                self._waiting.append((start, self._num_characters, token))

    def steps(self, reader: BlockReader, text: str, ends: bool) -> Iterator[tuple[Step, Block, str]]:
        """Yield what the next text of the answer does to the blocks (see `BlockReader.feed`), and give these its
        tokens: the text is read in pieces that end where tokens do."""
        pieces = self._split(text)
        for number, piece in enumerate(pieces, start=1):
            self._text += piece
            for step, block, more in reader.feed(piece, ends and number == len(pieces)):
                self._take(block, more, len(self._text) - reader.num_held)
                yield step, block, more

    def _split(self, text: str) -> list[str]:
        begin, end = len(self._text), len(self._text) + len(text)
        places = [begin, *dict.fromkeys(stop for _, stop, _ in self._waiting if begin < stop < end), end]
        return [text[first - begin : last - begin] for first, last in pairwise(places)]

    def _take(self, block: Block, text: str, end: int) -> None:
        """Give tokens to a block that has just got more text. What was read so far of the answer ends at `end`."""
        self.new = []
        if block.kind != "text" or not text:
            return
        if block.index not in self._starts:
            ends_here = self._text[max(0, end - len(text)) : end] == text  # else a call follows it in the same token
            self._starts[block.index] = end - len(text) if ends_here else max(0, self._text.rfind(text))
        start = self._starts[block.index]
        stop = start + len(block.text)
        while self._waiting:
            begin, end, token = self._waiting[0]
            if begin >= stop:
                break
            self._waiting.popleft()
            if end > start or (begin == end == start):
                self.new.append(token.model_dump())
        self._taken.setdefault(block.index, []).extend(self.new)
