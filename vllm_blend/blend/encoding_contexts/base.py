"""The base of all encoding contexts: methods that say what stands before a chunk when it is encoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar

Tokens = tuple[int, ...]
# A prompt of n passages on one page would otherwise have n * n / 2 of them encoded: others would wait for one client.
MAX_PAGE_BEFORE = 128


@dataclass(frozen=True)
class ContextPieces:
    """A prompt's context as token ids, without the question. What a chunk is encoded after depends on nothing else:
    neither on the question nor on another prompt."""

    prefix: Tokens
    chunks: tuple[Tokens, ...]
    continues: tuple[int | None, ...] = ()  # for each chunk, the earlier one of its page that it continues
    encode_after: tuple[Tokens, ...] = ()  # for each chunk, the text that the prompt has it encoded after
    _joined: dict[int, Tokens] = field(default_factory=dict, repr=False)

    def page_before(self, index: int) -> list[int]:
        """Return the chunks that chunk `index` continues, in the order of their page: the nearest `MAX_PAGE_BEFORE`."""
        before: list[int] = []
        previous = self.continues[index] if self.continues else None
        while previous is not None and len(before) < MAX_PAGE_BEFORE:
            before.append(previous)
            previous = self.continues[previous]
        return before[::-1]

    def after_company(self, company: Tokens) -> Tokens:
        """Return the prefix and `company`, which is kept by its encoding context. The same object is returned each
        time, so that its digest need not be computed for each chunk."""
        if not company:
            return self.prefix
        if id(company) not in self._joined:
            self._joined[id(company)] = self.prefix + company
        return self._joined[id(company)]


class EncodingContext(ABC):
    """The base of all encoding contexts. A subclass is a dataclass, whose fields are its settings, with a `name` and
    `passages`."""

    name: ClassVar[str]

    @abstractmethod
    def passages(self, pieces: ContextPieces, index: int) -> Sequence[Tokens]:
        """Return what stands right before chunk `index` while that is encoded; the last passage is the nearest."""

    def head(self, pieces: ContextPieces) -> Tokens:
        """Return the tokens that every chunk is encoded after."""
        return pieces.prefix

    def company(self, pieces: ContextPieces, index: int) -> Tokens:
        """Return the tokens between the prefix and the passages of chunk `index`. Many chunks share them, so that their
        KV is stored."""
        return ()

    def before(self, pieces: ContextPieces, index: int, limit: int) -> Tokens:
        """Return the token ids that stand before chunk `index` while it is encoded: at most `limit`, or the head alone.
        What does not fit is left out, the farthest first: the company, then passages."""
        passages, company = self.passages(pieces, index), self.company(pieces, index)
        head = pieces.after_company(company) if company else self.head(pieces)
        if not passages and len(head) <= limit:
            return head
        head = self.head(pieces)
        limit -= len(head)
        kept: list[Tokens] = []
        for passage in reversed([company, *passages]):
            limit -= len(passage)
            if limit < 0:
                break
            kept.append(passage)
        return head + tuple(chain.from_iterable(reversed(kept)))
