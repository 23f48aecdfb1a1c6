"""Words as numbers, so that NumPy looks through the words of all passages of a prompt at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

_ZERO = np.zeros(1, np.int64)
STEM_LETTERS = 3  # "founded" and "founder" are alike then, "born" and "birth" are not


class Numbering(dict[str, int]):
    """The numbers of words. One that is asked for the first time gets the next number. `with_stem` has, for each
    beginning of words, the numbers of those that begin so."""

    def __init__(self) -> None:
        super().__init__()
        self.with_stem: dict[str, list[int]] = {}

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        self.with_stem.setdefault(word[:STEM_LETTERS], []).append(number)
        return number


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


def ones(bits: int) -> Iterator[int]:
    """Yield which bits of a number are set, ascending."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
