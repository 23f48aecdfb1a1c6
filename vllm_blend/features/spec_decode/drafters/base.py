"""The base of drafters: one method that guesses how a sequence goes on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray


@dataclass(eq=False)
class History:
    """One sequence, as a drafter sees it.

    `output_token_ids` is the owner's list: read here, never written, and it only grows. `chunk_bounds` are the (start,
    stop) positions of the prompt's chunks, ascending; empty for a plain prompt. What a drafter keeps for other
    sequences serves those with the same `salt`. `index` is what a drafter remembers of the sequence between its calls;
    nothing else reads it.
    """

    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    chunk_bounds: Sequence[tuple[int, int]] = ()
    salt: bytes = field(default=b"", repr=False)
    index: Any = field(default=None, repr=False)
    _buffer: NDArray[np.int64] = field(init=False, repr=False, default_factory=lambda: np.empty(0, np.int64))
    _filled: int = field(init=False, repr=False, default=0)

    def array(self) -> NDArray[np.int64]:
        """Return prompt and output [tokens], not to be written to. A step costs its new tokens, not all of them."""
        first_output = len(self.prompt_token_ids)
        n = first_output + len(self.output_token_ids)
        if n > len(self._buffer):
            larger = np.empty(n + max(64, n // 2), np.int64)
            if self._filled:
                larger[: self._filled] = self._buffer[: self._filled]
            else:
                larger[:first_output] = self.prompt_token_ids
                self._filled = first_output
            self._buffer = larger
        self._buffer[self._filled : n] = self.output_token_ids[self._filled - first_output :]
        self._filled = n
        return self._buffer[:n]


class Drafter(ABC):
    """Base of all drafters. A subclass is a dataclass (its fields are its settings) with a `name` and a `propose`."""

    name: ClassVar[str]

    @abstractmethod
    def propose(self, history: History, count: int) -> list[int]:
        """Return at most `count` tokens (1 or more are asked for) that may come next; none where nothing suggests any.

        A wrong guess costs time and never changes an output. A drafter sees one sequence only, and no batch mates.
        """
