"""Drafting for the sequences of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_blend.spec_decode.drafters import Drafter, History
from vllm_blend.spec_decode.length import DraftLength


@dataclass(eq=False)
class Speculation:
    """One sequence: what a drafter sees of it, and how much is worth drafting."""

    owner: Speculator
    history: History
    length: DraftLength

    def propose(self, num_sequences: int, limit: int) -> list[int]:
        """Tokens that may come next, at most `limit`, for a step in which `num_sequences` decode."""
        count = min(self.length.next(num_sequences), limit)
        drafts = self.owner.drafter.propose(self.history, count) if count > 0 else []
        if count > 0 and self.owner.runs_ahead:
            self.length.found(bool(drafts))
        self.owner.latest = self.length
        return drafts

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a draft that was verified."""
        self.length.verified(num_drafted, num_accepted)


@dataclass(eq=False)
class Speculator:
    """A drafter and what it has achieved. New sequences begin where the latest one stands, so that drafts which fail
    for all are tried rarely, however short the sequences are. `runs_ahead`: the engine does so while nobody looks."""

    drafter: Drafter
    num_speculative_tokens: int
    runs_ahead: bool = False
    latest: DraftLength = field(init=False)

    def __post_init__(self) -> None:
        self.latest = DraftLength(self.num_speculative_tokens)

    def begin(
        self, prompt: Sequence[int], output: Sequence[int], chunk_bounds: Sequence[tuple[int, int]], salt: bytes = b""
    ) -> Speculation:
        """Begin to draft for a sequence whose `output` list will grow."""
        return Speculation(self, History(prompt, output, chunk_bounds, salt), self.latest.successor())
