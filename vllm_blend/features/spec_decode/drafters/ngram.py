"""Copy what followed the last words when they stood in the text before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vllm_blend.features.spec_decode.drafters.base import Drafter, History


@dataclass(frozen=True)
class NGram(Drafter):
    """Prompt lookup decoding (Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding): the tokens after the last
    earlier occurrence of the longest run of `prompt_lookup_min` .. `prompt_lookup_max` tokens that the text ends in.

    A copy that reaches the end of the text goes on with what it has copied, so a loop is foreseen as a loop.
    """

    name: ClassVar[str] = "ngram"
    prompt_lookup_max: int = 3
    prompt_lookup_min: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ValueError(
                f"speculative_config: prompt_lookup_min={self.prompt_lookup_min} and prompt_lookup_max="
                f"{self.prompt_lookup_max}: matches have from 1 token on, and the least may not exceed the most"
            )

    def propose(self, history: History, count: int) -> list[int]:
        tokens = history.array()
        n = len(tokens)
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # of earlier runs that agree in their last tokens
        found = -1
        for length in range(1, self.prompt_lookup_max + 1):
            if length > 1:
                ends = ends[ends >= length - 1]
                ends = ends[tokens[ends - (length - 1)] == tokens[n - length]]
            if not len(ends):
                break
            if length >= self.prompt_lookup_min:
                found = int(ends[-1])
        return [] if found < 0 else np.resize(tokens[found + 1 : found + 1 + count], count).tolist()
