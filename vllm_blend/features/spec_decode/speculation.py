"""Drafting for the sequences of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_blend.features.spec_decode.drafters import Drafter, History
from vllm_blend.features.spec_decode.length import DraftLength
from vllm_blend.request import StateKey


@dataclass(eq=False)
class Speculation:
    """The drafting of one sequence: what a drafter sees of it, and how many tokens are worth drafting."""

    owner: Speculator
    history: History
    length: DraftLength

    def propose(self, num_sequences: int, limit: int) -> list[int]:
        """Return tokens that may come next, at most `limit`, for a step in which `num_sequences` decode."""
        count = min(self.length.next(num_sequences), limit)
        drafts = self.owner.drafter.propose(self.history, count) if count > 0 else []
        if count > 0 and self.owner.runs_ahead:
            self.length.searched(bool(drafts))
        self.owner.latest = self.length
        return drafts


SPECULATION: StateKey[Speculation] = StateKey("spec_decode")


@dataclass(eq=False)
class Speculator:
    """A drafter and what it has achieved. New sequences begin where the latest one stands, so that drafts which fail
    for all are tried rarely, however short the sequences are. `runs_ahead`: the engine does so while none drafts."""

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
