"""How an engine speculates, as users give it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm_blend.checks import check_field_types
from vllm_blend.spec_decode.drafters import Drafter, make_drafter
from vllm_blend.spec_decode.length import ROW_COST

MAX_DRAFT_TOKENS = 64


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding without a change of the output: a step verifies tokens that a drafter has guessed.

    `method` is "ngram" (prompt lookup, with `prompt_lookup_max` and `prompt_lookup_min`: the tokens of a match) or
    "suffix" (suffix automata). `num_speculative_tokens` is the most that is drafted; how many are depends on what was
    accepted lately. Drafting needs the tokens of the step before: the engine runs ahead of them (`async_scheduling`)
    only while drafting pauses, as it does where drafts fail or nothing is found to draft. With
    `offload_mode="resident"` what a step sees depends on the moves of chunks before it, so other steps may give other
    answers; nowhere else.

    Raises ValueError naming the option and the fix.
    """

    method: str
    num_speculative_tokens: int = 8
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None

    def __post_init__(self) -> None:
        check_field_types(self, "speculative_config: ")
        for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"speculative_config: {name}={value!r} must be a positive number of tokens")
        if self.num_speculative_tokens > MAX_DRAFT_TOKENS:
            raise ValueError(
                f"speculative_config: num_speculative_tokens={self.num_speculative_tokens} is above "
                f"{MAX_DRAFT_TOKENS}: drafts of that length are hardly ever right to the end; lower it"
            )
        self.make_drafter()

    def make_drafter(self) -> Drafter:
        """A new drafter as it is asked for."""
        return make_drafter(
            self.method, prompt_lookup_max=self.prompt_lookup_max, prompt_lookup_min=self.prompt_lookup_min
        )

    def most_rows(self, max_num_seqs: int) -> int:
        """Rows of logits in a step of so many sequences: where drafts are too dear for all, nobody drafts."""
        return max_num_seqs + min(max_num_seqs, int(1 / ROW_COST)) * self.num_speculative_tokens

    @classmethod
    def from_dict(cls, options: Any) -> SpeculativeConfig:
        """Of vLLM's `speculative_config`. Raises ValueError or TypeError naming the option and the fix."""
        if not isinstance(options, Mapping):
            raise TypeError(
                f"speculative_config is a {type(options).__name__}: give a dict such as "
                '{"method": "ngram", "num_speculative_tokens": 8}'
            )
        known = [item.name for item in fields(cls)]
        for name in options:
            if name not in known:
                raise ValueError(f"speculative_config has no option {name!r}: use {', '.join(known)}")
        if "method" not in options:
            raise ValueError("speculative_config has no method: give one, such as 'ngram' or 'suffix'")
        return cls(**options)
