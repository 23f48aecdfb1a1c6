"""The seam between the sampler and a feature that says which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray


class TokenConstraint(Protocol):
    """What may follow the tokens of one sequence. It knows the sequence's output, and follows it as it grows."""

    def after(self, token_ids: Sequence[int]) -> Self:
        """Return what may follow if these guessed tokens come next."""
        ...

    def has_ended(self) -> bool:
        """Return whether the output, whose last token is an end of sequence, ends there: if that token is text, such as
        a newline, it may be text of the answer instead."""
        ...

    def fill_masks(self, constraints: Sequence[Any], words: NDArray[np.int32]) -> dict[int, str]:
        """Write the packed masks (see `ops.keep_allowed`) of several constraints of this kind, itself among them.

        words [rows, n] int32 is all ones on entry, and has a row for each constraint. Returns errors by row; the mask
        of such a row has no meaning.
        """
        ...
