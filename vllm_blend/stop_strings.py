"""Finds stop strings in text while it grows, in time that does not depend on how many there are: Aho and Corasick's
automaton (1975), made once for all completions of a request."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from weakref import WeakValueDictionary

_CHARACTERS = 0x110000  # Unicode has so many
_known: WeakValueDictionary[tuple[str, ...], StopStrings] = WeakValueDictionary()


class StopStrings:
    """An automaton over some strings. A state stands for the longest end of the text read so far that begins one of
    them; 0 is the state of an empty text."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: dict[int, int] = {}  # state * _CHARACTERS + character -> the state of one character more
        self._fallback = array("i", [0])  # the state of the next shorter end that begins a string
        self.found = array("i", [0])  # the length of the longest string that ends here, 0 for none
        self.held = array("i", [0])  # the length of the longest end that may still become a string
        for string in strings:
            self._insert(string)
        self._link()

    @classmethod
    def of(cls, strings: Sequence[str]) -> StopStrings:
        """Return the automaton of these strings, the same one as long as anything uses it."""
        key = tuple(strings)
        known = _known.get(key)
        if known is None:
            known = _known[key] = cls(key)
        return known

    @property
    def num_states(self) -> int:
        return len(self.found)

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character. A whole text takes at most two look-ups for each."""
        following, code = self._next, ord(character)
        while True:
            after = following.get(state * _CHARACTERS + code)
            if after is not None:
                return after
            if state == 0:
                return 0
            state = self._fallback[state]

    def _insert(self, string: str) -> None:
        state = 0
        for character in string:
            key = state * _CHARACTERS + ord(character)
            if key not in self._next:
                self._next[key] = len(self.found)
                for values in (self._fallback, self.found, self.held):
                    values.append(0)
            state = self._next[key]
        self.found[state] = len(string)

    def _link(self) -> None:
        """Fill in what follows from shorter states, the shortest first."""
        edges: list[list[tuple[str, int]]] = [[] for _ in self.found]
        for key, after in self._next.items():
            edges[key // _CHARACTERS].append((chr(key % _CHARACTERS), after))
        queue = deque((0, 0, character, after) for character, after in edges[0])
        while queue:
            before, depth, character, state = queue.popleft()
            fallback = self.step(self._fallback[before], character) if before else 0
            self._fallback[state] = fallback
            self.found[state] = max(self.found[state], self.found[fallback])
            self.held[state] = depth + 1 if edges[state] else self.held[fallback]
            queue.extend((state, depth + 1, character, after) for character, after in edges[state])
