"""Copy what followed the longest run of last words that stood anywhere before, whatever its length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from vllm_blend.features.spec_decode.automaton import NO_MATCH, AutomatonCache, Match, SuffixAutomaton
from vllm_blend.features.spec_decode.drafters.base import Drafter, History

_LOOKBACK = 32  # tokens of the prompt's end that chunks are matched with: longer matches are no better guesses


@dataclass(frozen=True)
class Suffix(Drafter):
    """The tokens after the longest match of the text's end, in suffix automata (SAM decoding, Hu et al., 2024,
    arXiv:2411.10666; SuffixDecoding, Oliaro et al., 2024, arXiv:2411.04975).

    Each chunk of the prompt has an automaton of its own, built once for its content and shared by all requests with the
    same salt; another grows with what is outside the chunks and with the output. Of equally long matches the output's
    comes first, then that of the last chunk. A match is at least `min_match` tokens long.
    """

    name: ClassVar[str] = "suffix"
    min_match: int = 1
    chunks: AutomatonCache = field(default_factory=AutomatonCache, compare=False, repr=False)

    def propose(self, history: History, count: int) -> list[int]:
        if history.index is None:
            history.index = _Index.from_history(history, self.chunks)
        index: _Index = history.index
        for token in history.output_token_ids[index.num_read :]:
            index.read(token)
        [length, source] = max((match[1], source) for source, match in enumerate(index.matches))
        if length < self.min_match:
            return []
        automaton = index.automata[source]
        following = automaton.tokens[automaton.end(index.matches[source]) :][:count]
        if automaton is index.own:  # its end is the text's: a copy that reaches it goes on with what it has copied
            return np.resize(following, count).tolist()
        return following


@dataclass(eq=False)
class _Index:
    """The automata of a sequence and its matches in them. The last is its own, the others are those of its chunks."""

    automata: list[SuffixAutomaton]
    matches: list[Match]
    num_read: int = 0  # how many tokens of the output were read

    @property
    def own(self) -> SuffixAutomaton:
        return self.automata[-1]

    @classmethod
    def from_history(cls, history: History, chunks: AutomatonCache) -> _Index:
        prompt = history.prompt_token_ids
        shared = [chunks.get(prompt[start:stop], history.salt) for start, stop in history.chunk_bounds]
        own, match = SuffixAutomaton(), NO_MATCH
        for start, stop in _outside(history):
            for token in prompt[start:stop]:
                match = own.step(match, token)
                own.append(token)
        index = cls([*shared, own], [NO_MATCH] * len(shared) + [match])
        for token in prompt[-_LOOKBACK:]:
            index._match_chunks(token)
        return index

    def read(self, token: int) -> None:
        """Read one more token of the output."""
        self._match_chunks(token)
        self.matches[-1] = self.own.step(self.matches[-1], token)  # before it becomes a part of the text itself
        self.own.append(token)
        self.num_read += 1

    def _match_chunks(self, token: int) -> None:
        for index, automaton in enumerate(self.automata[:-1]):
            self.matches[index] = automaton.step(self.matches[index], token)


def _outside(history: History) -> Iterator[tuple[int, int]]:
    """Yield the parts of the prompt outside the chunks."""
    start = 0
    for chunk_start, chunk_stop in history.chunk_bounds:
        yield start, chunk_start
        start = chunk_stop
    yield start, len(history.prompt_token_ids)
