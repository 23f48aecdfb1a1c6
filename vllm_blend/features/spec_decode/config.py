"""The options of speculative decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from vllm_blend.checks import a_type, check_field_types, check_keys
from vllm_blend.config import FeatureConfig
from vllm_blend.features.spec_decode.drafters import Drafter, make_drafter
from vllm_blend.features.spec_decode.length import ROW_COST
from vllm_blend.options import Option

MAX_DRAFT_TOKENS = 64


@dataclass(frozen=True)
class SpeculativeConfig(FeatureConfig):
    """Speculative decoding without a change of the output: a step verifies tokens that a drafter has guessed.

    `method` is "ngram" (prompt lookup, with `prompt_lookup_max` and `prompt_lookup_min`: the tokens of a match) or
    "suffix" (suffix automata); with None nothing is drafted. `num_speculative_tokens` is the most that is drafted; how
    many tokens are depends on what was accepted lately. Drafting needs the tokens of the step before: the engine runs
    ahead of them (`async_scheduling`) only while drafting pauses, as it does if drafts fail or nothing is found to
    draft. With `offload_mode="resident"` what a step sees depends on the moves of chunks before it, so other steps may
    give other answers; nowhere else.

    Raises ValueError naming the option and the fix.
    """

    title: ClassVar[str] = "Speculative decoding"
    works_across_ranks: ClassVar[bool] = True
    name: ClassVar[str] = "speculative_config"
    extension: ClassVar[str | None] = "vllm_blend.features.spec_decode.extension:make_speculation"
    worker_extension: ClassVar[str | None] = "vllm_blend.features.spec_decode.passes:SpeculationPasses"

    method: str | None = None
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
        if self.method is not None:
            self.make_drafter()

    @property
    def is_on(self) -> bool:
        return self.method is not None

    def make_drafter(self) -> Drafter:
        """Return a new drafter of the method that was asked for."""
        assert self.method is not None
        return make_drafter(
            self.method, prompt_lookup_max=self.prompt_lookup_max, prompt_lookup_min=self.prompt_lookup_min
        )

    def most_rows(self, max_num_seqs: int) -> int:
        """Return the most rows of logits in a step of so many sequences. None of them drafts if that is too dear for
        all."""
        return max_num_seqs + min(max_num_seqs, int(1 / ROW_COST)) * self.num_speculative_tokens

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        """Return the one option, which has all of the fields, as in vLLM."""
        keys = ", ".join(each.name for each in fields(cls))
        text = f'speculative decoding, as JSON: {{"method": "ngram", "num_speculative_tokens": 8}}; it may have {keys}'
        return (Option(name=cls.name, type=dict[str, Any] | None, default=None, help=text),)

    @classmethod
    def from_values(cls, values: Mapping[str, Any], **others: Any) -> Self:
        return cls.from_dict(values[cls.name])

    @classmethod
    def from_dict(cls, options: Any) -> Self:
        """Return the settings that vLLM's `speculative_config` describes; None turns the feature off.

        Raises ValueError or TypeError naming the option and the fix.
        """
        if options is None:
            return cls()
        if not isinstance(options, Mapping):
            raise TypeError(
                f"speculative_config is {a_type(options)}: give a dict such as "
                '{"method": "ngram", "num_speculative_tokens": 8}'
            )
        check_keys("speculative_config", options, [item.name for item in fields(cls)])
        if options.get("method") is None:
            raise ValueError("speculative_config has no method: give one, such as 'ngram' or 'suffix'")
        return cls(**options)
