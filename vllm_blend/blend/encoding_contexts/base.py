"""The base of all encoding contexts: methods that say what stands before a chunk when it is encoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
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
    _joined: dict[int, Tokens] = field(default_factory=dict, repr=False, compare=False)

    def after(self, company: Tokens) -> Tokens:
        """Return the prefix and `company`: for the same object the same one, as long as the caller holds it."""
        if not company:
            return self.prefix
        if id(company) not in self._joined:
            self._joined[id(company)] = self.prefix + company
        return self._joined[id(company)]

    def page_before(self, index: int) -> list[int]:
        """Return the chunks that chunk `index` continues, in the order of their page: the nearest `MAX_PAGE_BEFORE`."""
        before: list[int] = []
        previous = self.continues[index] if self.continues else None
        while previous is not None and len(before) < MAX_PAGE_BEFORE:
            before.append(previous)
            previous = self.continues[previous]
        return before[::-1]

    @cached_property
    def are_alone(self) -> bool:
        """Whether the chunks are all there is before the question: one, or one page in its order."""
        count = len(self.chunks)
        return count == 1 or list(self.continues) == [None, *range(count - 1)]

    @property
    def has_instruction(self) -> bool:
        """Whether the prefix is more than the token that begins every prompt. Otherwise the first chunk may be the
        instruction: LMCache's prompts have it there."""
        return len(self.prefix) > 1

    def is_alone(self, index: int) -> bool:
        """Whether no chunk of another page stands before chunk `index`, nor would in another order."""
        if self.are_alone or self.has_instruction:
            return self.are_alone
        return index == 0 or self.page_before(index)[:1] == [0]


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

    def company(self, is_alone: bool) -> Tokens:
        """Return the tokens between the head and the passages of a chunk that is alone, or of one that is not. They are
        the same for all such chunks, so their KV is stored."""
        return ()

    def before(self, pieces: ContextPieces, index: int, limit: int, is_alone: bool | None = None) -> Tokens:
        """Return the token ids that stand before chunk `index` while it is encoded: at most `limit`, or the head alone.
        What does not fit is left out, the farthest first: the company, then passages. `is_alone`: whether the chunk is
        taken for one that is alone; without it, what it is in the prompt counts."""
        company = self.company(pieces.is_alone(index) if is_alone is None else is_alone)
        head, passages = self.head(pieces), self.passages(pieces, index)
        if not passages and head is pieces.prefix and len(whole := pieces.after(company)) <= limit:
            return whole
        limit -= len(head)
        kept: list[Tokens] = []
        for passage in reversed([company, *passages]):
            limit -= len(passage)
            if limit < 0:
                break
            kept.append(passage)
        return head + tuple(chain.from_iterable(reversed(kept)))
