"""Words as numbers, so that NumPy looks through the words of all passages of a prompt at once."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

_ZERO = np.zeros(1, np.int64)
STEM_LETTERS = 3  # "founded" and "founder" are alike then, "born" and "birth" are not
_ENTRY_BYTES = 100  # of a word or a beginning besides its text: measured, 73 to 102


class Numbering(dict[str, int]):
    """The numbers of words. One that is asked for the first time gets the next number. `stems` are the numbers of the
    beginnings of words, and `num_bytes` is the memory that all this takes.

    Prompts that share a numbering must not wait for each other's words. So there is no list of the words that begin
    alike: a prompt asks for the beginnings of its own words instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stems: dict[str, int] = {}
        self.num_bytes = 0
        self._stem_of = array("q")

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        self.num_bytes += sys.getsizeof(word) + _ENTRY_BYTES
        beginning = word[:STEM_LETTERS]
        stem = self.stems.get(beginning)
        if stem is None:
            stem = self.stems[beginning] = len(self.stems)
            self.num_bytes += sys.getsizeof(beginning) + _ENTRY_BYTES
        self._stem_of.append(stem)
        return number

    def stems_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the numbers of the beginnings of words, [n] int64."""
        stems: np.ndarray = np.frombuffer(self._stem_of, np.int64)  # not kept, as the array could not grow then
        return stems.take(numbers)


@dataclass(frozen=True, slots=True)
class Groups:
    """Arrays of numbers, one behind another, and where each of them stops."""

    numbers: np.ndarray  # [n] int64
    stops: np.ndarray  # [groups] int64

    @property
    def starts(self) -> np.ndarray:
        return np.concatenate([_ZERO, self.stops[:-1]])

    def find(self, is_wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where wanted numbers are, ascending, and the group of each."""
        places = is_wanted[self.numbers].nonzero()[0]
        return places, self.stops.searchsorted(places, side="right")


def mark(numbers: Sequence[int] | np.ndarray, size: int) -> np.ndarray:
    """Return which of `size` numbers are among these, [size] bool."""
    is_marked = np.zeros(size, bool)
    is_marked[numbers] = True
    return is_marked


def places_of(numbers: Sequence[int], size: int) -> np.ndarray:
    """Return where each of `size` numbers stands among these, which differ. It says nothing of other numbers."""
    places = np.empty(size, np.int64)
    places[numbers] = np.arange(len(numbers))
    return places


def fixed(*rows: Iterable[int]) -> np.ndarray:
    """Return an array of numbers that cannot be changed, [n] int64, or [rows, n]."""
    lists = list(map(list, rows))
    array = np.array(lists if len(lists) > 1 else lists[0], np.int64)
    array.setflags(write=False)
    return array
