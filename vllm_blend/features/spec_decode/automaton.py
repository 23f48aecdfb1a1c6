"""The suffix automaton of a text: it holds every run of tokens, in space and time linear in the text."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

Match = tuple[int, int]  # a state, and how many of the last tokens read lead there
NO_MATCH: Match = (0, 0)


class SuffixAutomaton:
    """The smallest automaton of a text's suffixes, built token by token (Blumer et al., 1985; a token costs constant
    time on average). A state stands for runs that occur at the same places; each knows where its first one ends.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]  # by state: that of its longest suffix that occurs elsewhere, too
        self._length = [0]  # by state: the length of its longest run
        self._end = [0]  # by state: the position after its first occurrence
        self._last = 0
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Add a token to the text. Matches stay valid."""
        self.tokens.append(token)
        new = self._add({}, -1, len(self.tokens), len(self.tokens))
        state = self._last
        self._last = new
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state < 0:
            self._link[new] = 0
            return
        target = self._next[state][token]
        if self._length[target] == self._length[state] + 1:
            self._link[new] = target
            return
        shorter = self._add(dict(self._next[target]), self._link[target], self._length[state] + 1, self._end[target])
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = shorter
            state = self._link[state]
        self._link[target] = self._link[new] = shorter

    def step(self, match: Match, token: int) -> Match:
        """Read one more token, and return the longest run of the text that what was read ends in."""
        state, length = match
        # since then, an append may have split the state and given its shorter runs to another
        while state and length <= self._length[self._link[state]]:
            state = self._link[state]
        while state and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        if token not in self._next[state]:
            return NO_MATCH
        return self._next[state][token], length + 1

    def end(self, match: Match) -> int:
        """Return the position after the first occurrence of a match that is not empty."""
        return self._end[match[0]]

    def _add(self, following: dict[int, int], link: int, length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1


class AutomatonCache:
    """Automata of chunks by content and salt, so that a chunk is read only once.

    They hold at most `max_tokens` tokens in all, about half a kilobyte each; the least recently used leave first.
    """

    def __init__(self, max_tokens: int = 2**18) -> None:
        self.max_tokens, self.num_tokens, self.num_built = max_tokens, 0, 0
        self._automata: OrderedDict[tuple[bytes, tuple[int, ...]], SuffixAutomaton] = OrderedDict()

    def get(self, tokens: Iterable[int], salt: bytes = b"") -> SuffixAutomaton:
        """Return the automaton of a chunk for sequences with this salt. Do not append to it."""
        key = (salt, tuple(tokens))
        automaton = self._automata.pop(key, None)
        if automaton is None:
            automaton = SuffixAutomaton(key[1])
            self.num_built += 1
            self.num_tokens += len(key[1])
        self._automata[key] = automaton
        while self.num_tokens > self.max_tokens and len(self._automata) > 1:
            (_, dropped), _ = self._automata.popitem(last=False)
            self.num_tokens -= len(dropped)
        return automaton
