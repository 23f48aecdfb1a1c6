"""Follows an answer through its grammar, and says which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_blend.features.structured.vocabulary import Vocabulary
from vllm_blend.ops.token_masks import words_for


@dataclass(eq=False)
class FollowedAnswer:
    """Where the answer of one sequence stands in its grammar. `output_token_ids` is the list of the sequence, which
    grows: only tokens that are there, which count for good, are followed."""

    matcher: Any
    vocabulary: Vocabulary  # of the matcher
    output_token_ids: list[int]
    error: str | None = None
    has_ended: bool = False  # all that may follow is another end of sequence
    _num_followed: int = 0

    def catch_up(self) -> None:
        """Follow the tokens that have been added to the answer since the last call."""
        for token in self.output_token_ids[self._num_followed :]:
            if self.has_ended or self.error is not None:
                break
            if self.vocabulary.ends(token, self.matcher.is_accepting):
                self.has_ended = True
            elif not self.matcher.consume_token(token):
                self.look_for_error()
        self._num_followed = len(self.output_token_ids)

    def look_for_error(self) -> None:
        """Keep the matcher's error if it has one: it stops above its limits."""
        if self.error is None and self.matcher.is_error():
            reason = " ".join(self.matcher.get_error().replace("<non-verbose/>", "").split())
            self.error = f"structured_outputs: the answer cannot be followed any further: {reason[:300]}"


@dataclass(frozen=True, eq=False)
class GrammarConstraint:
    """What may follow an answer and the guesses `drafts` (a `layers.token_constraint.TokenConstraint`). `executor`
    computes masks in several threads."""

    answer: FollowedAnswer
    executor: Any
    drafts: tuple[int, ...] = ()

    def after(self, token_ids: Sequence[int]) -> GrammarConstraint:
        """Return what may follow if these guesses come next."""
        return replace(self, drafts=(*self.drafts, *token_ids))

    def has_ended(self) -> bool:
        """Return whether the output ends here: by a special token, or by another end of sequence after all that the
        form needs."""
        self.answer.catch_up()
        return self.answer.has_ended

    def fill_masks(self, constraints: Sequence[GrammarConstraint], words: NDArray[np.int32]) -> dict[int, str]:
        """Write the masks of `constraints`; those of one answer follow one another, each with one guess more.

        Rows after a guess that the grammar forbids keep their ones: that guess is not drawn, so they do not count.
        """
        width = words_for(self.answer.vocabulary.size)
        masks = words if width == words.shape[1] else np.full((len(words), width), -1, np.int32)
        runs = _runs(constraints)
        asked: list[tuple[Any, int, list[int]]] = []
        for run in runs:
            answer, first = constraints[run.start].answer, constraints[run.start].drafts
            answer.catch_up()
            if answer.has_ended:
                masks[run.start : run.stop] = answer.vocabulary.mask_of_ends(width)
            elif answer.error is None and _advance(answer.matcher, first):
                asked.append((answer.matcher, run.start, list(constraints[run.stop - 1].drafts[len(first) :])))
        if asked:
            _compute(self.executor, asked, masks)
        for matcher, row, drafts in asked:
            constraints[row].answer.vocabulary.allow_ends(masks[row : row + len(drafts) + 1])
            if constraints[row].drafts and not matcher.is_error():
                matcher.rollback(len(constraints[row].drafts))
        if masks is not words:
            words[:] = masks[:, : words.shape[1]]
        errors: dict[int, str] = {}
        for run in runs:
            constraints[run.start].answer.look_for_error()
            errors |= {row: error for row in run if (error := constraints[row].answer.error) is not None}
        return errors


def _runs(constraints: Sequence[GrammarConstraint]) -> list[range]:
    """Return the rows of each answer."""
    starts = [row for row, one in enumerate(constraints) if row == 0 or one.answer is not constraints[row - 1].answer]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(constraints)], strict=True)]


def _advance(matcher: Any, drafts: tuple[int, ...]) -> bool:
    """Follow guesses, all or none; return whether the grammar allows them. Large batches are split anywhere, so the
    first of an answer's rows may have some."""
    if not drafts:
        return True
    count = matcher.try_consume_tokens(list(drafts))
    if count < len(drafts) and not matcher.is_error():
        matcher.rollback(count)
    return bool(count == len(drafts))


def _compute(executor: Any, asked: list[tuple[Any, int, list[int]]], masks: NDArray[np.int32]) -> None:
    from llguidance import numpy as library

    single = [(matcher, row) for matcher, row, drafts in asked if not drafts]
    drafted = [each for each in asked if each[2]]
    if single:
        library.fill_next_token_bitmask_par(executor, single, masks)
    if drafted:
        library.fill_next_token_bitmask_par_with_draft_tokens(executor, drafted, masks)
