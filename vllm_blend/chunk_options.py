"""What a prompt says about each of its chunks: their relevance and order, and which of them continue others."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from vllm_blend.checks import is_number


@dataclass(frozen=True)
class ChunkOptions:
    """What a prompt says about each of its chunks, as the fields of the same names in `ParsedPrompt`."""

    relevance: tuple[tuple[float, ...], ...] = ()
    chunk_ranking: tuple[int, ...] = ()
    in_place_chunks: tuple[int, ...] = ()
    continues: tuple[int | None, ...] = ()
    encode_after: tuple[tuple[int, ...], ...] = ()

    def reordered(self, numbers: Sequence[int]) -> ChunkOptions:
        """Return what is said about these chunks, which stand in this order. A chunk that continues one that is left
        out continues what that one does."""
        place = {number: index for index, number in enumerate(numbers)}

        def continued(number: int | None) -> int | None:
            while number is not None and number not in place:
                number = self.continues[number]
            return None if number is None else place[number]

        return ChunkOptions(
            tuple(tuple(signal[number] for number in numbers) for signal in self.relevance),
            tuple(place[number] for number in self.chunk_ranking if number in place),
            tuple(place[number] for number in self.in_place_chunks if number in place),
            tuple(continued(self.continues[number]) for number in numbers) if self.continues else (),
            tuple(self.encode_after[number] for number in numbers) if self.encode_after else (),
        )


def parse_order(
    order: Any, relevance: Any, num_chunks: int
) -> tuple[tuple[tuple[float, ...], ...], Literal["given", "free"]]:
    """Return the relevance scores of a prompt, by signal, and the order that its chunks may stand in. Raises TypeError
    or ValueError if one of them is wrong, or is given without the other."""
    if order not in ("given", "free"):
        raise ValueError(
            f"order is {order!r}: use 'given', or 'free' if chunks may stand in the order of their relevance"
        )
    scores = parse_relevance(relevance, num_chunks)
    if order == "free" and relevance is None:
        raise ValueError("order is 'free', but relevance is not given: give a score for each chunk, or leave order out")
    if order == "given" and scores:
        raise ValueError(
            "relevance is given, but only the order of the chunks goes by it: set order to 'free', or leave relevance "
            "out"
        )
    return scores, "free" if order == "free" else "given"


def parse_relevance(given: Any, num_chunks: int) -> tuple[tuple[float, ...], ...]:
    """Return relevance scores by signal, each with a score for every chunk; () for None. A chunk's None, as a retriever
    gives no score to what it did not find, comes after all scores: it is -inf.

    Raises TypeError or ValueError for anything but finite numbers and None, one for each chunk and not None alone, or
    several such lists.
    """
    if given is None:
        return ()
    if isinstance(given, (str, bytes, Mapping, Set)) or not hasattr(given, "__iter__"):
        raise TypeError(f"relevance must be a list with a score for each chunk, not {type(given).__name__}")
    scores = given.tolist() if hasattr(given, "tolist") else list(given)  # rerankers give arrays and tensors
    is_nested = bool(scores) and all(_is_list(entry) for entry in scores)
    signals = [list(signal) for signal in scores] if is_nested else [scores]
    for number, signal in enumerate(signals):
        name = f"relevance[{number}]" if is_nested else "relevance"
        if len(signal) != num_chunks:
            raise ValueError(f"{name} has {len(signal)} scores for {num_chunks} chunks: give one for each chunk")
        for index, score in enumerate(signal):
            if score is None:
                continue
            if not is_number(score):
                raise TypeError(f"{name}[{index}] is {score!r}: give a score, a number")
            if not _is_finite(score):
                raise ValueError(f"{name}[{index}] is {score}: scores must be finite")
        if signal and all(score is None for score in signal):
            raise ValueError(f"{name} has no score but None: leave it out, or give the scores of some chunks")
    return tuple(tuple(-math.inf if score is None else float(score) for score in signal) for signal in signals)


def _is_list(entry: Any) -> bool:
    return hasattr(entry, "__iter__") and not isinstance(entry, str) and getattr(entry, "ndim", 1) > 0


def _is_finite(score: Any) -> bool:
    try:
        return math.isfinite(score)
    except OverflowError:  # an integer that no float holds
        return False


def check_numbers(numbers: Any, name: str, num_chunks: int) -> tuple[int, ...]:
    if isinstance(numbers, (str, bytes)) or not hasattr(numbers, "__iter__"):
        raise TypeError(f"{name} must be a list of chunk numbers, not {type(numbers).__name__}")
    checked = [_index(entry, f"{name}[{index}]") for index, entry in enumerate(numbers)]
    seen: set[int] = set()
    for index, chunk in enumerate(checked):
        if not 0 <= chunk < num_chunks or chunk in seen:
            raise ValueError(
                f"{name}[{index}] is {chunk}: use the positions of the prompt's {num_chunks} chunks, from 0, each at "
                "most once"
            )
        seen.add(chunk)
    return tuple(checked)


def parse_continues(given: Any, num_chunks: int) -> tuple[int | None, ...]:
    """Return, for each chunk, the number of an earlier one that it continues on its page, or None; () for None. Raises
    TypeError or ValueError for anything but that."""
    if given is None:
        return ()
    if isinstance(given, (str, bytes, Mapping, Set)) or not hasattr(given, "__iter__"):
        raise TypeError(f"continues must be a list with one chunk number or None per chunk, not {type(given).__name__}")
    checked = [None if e is None else _index(e, f"continues[{index}]") for index, e in enumerate(given)]
    if len(checked) != num_chunks:
        raise ValueError(f"continues has {len(checked)} entries for {num_chunks} chunks: give one, or None, per chunk")
    for index, chunk in enumerate(checked):
        if chunk is not None and not 0 <= chunk < index:
            raise ValueError(
                f"continues[{index}] is {chunk}: name a chunk that stands before chunk {index} in the prompt, from 0, "
                "or None if none does"
            )
    return tuple(checked)


def _index(entry: Any, name: str) -> int:
    try:
        number = operator.index(entry)
    except TypeError:
        number = None
    if number is None or isinstance(entry, bool):
        raise TypeError(f"{name} is {entry!r}: give the number of a chunk, an integer")
    return number
