"""What an encoding context is: one method that says which passages stand before a chunk when it is encoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class ContextPieces:
    """A prompt's context as token ids. The question is no part of it, nor is any other prompt: what a chunk is encoded
    after depends on nothing else."""

    prefix: Tokens
    chunks: tuple[Tokens, ...]
    continues: tuple[int | None, ...] = ()  # of each chunk, the earlier one of its page that it goes on from
    encode_after: tuple[Tokens, ...] = ()  # of each chunk, what the prompt says it is to be encoded after

    def page_before(self, index: int) -> list[int]:
        """The chunks that chunk `index` goes on from, in the order of their page."""
        before: list[int] = []
        previous = self.continues[index] if self.continues else None
        while previous is not None:
            before.append(previous)
            previous = self.continues[previous]
        return before[::-1]


class EncodingContext(ABC):
    """Base of all. A subclass is a dataclass (its fields are its settings) with a `name` and `passages`."""

    name: ClassVar[str]

    @abstractmethod
    def passages(self, pieces: ContextPieces, index: int) -> Sequence[Tokens]:
        """What stands between the head and chunk `index` when that is encoded, last the passage right before it."""

    def head(self, pieces: ContextPieces) -> Tokens:
        """What every chunk is encoded after."""
        return pieces.prefix

    def before(self, pieces: ContextPieces, index: int, room: int) -> Tokens:
        """Token ids that stand before chunk `index` when it is encoded: at most `room`, or the head alone. Passages
        that do not fit are left out, those far from the chunk first."""
        head = self.head(pieces)
        room -= len(head)
        kept: list[Tokens] = []
        for passage in reversed(self.passages(pieces, index)):
            room -= len(passage)
            if room < 0:
                break
            kept.append(passage)
        return head + tuple(chain.from_iterable(reversed(kept)))
