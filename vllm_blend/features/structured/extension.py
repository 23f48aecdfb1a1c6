"""Structured outputs in the engine: forms are compiled when a request comes, and its sampling gets a constraint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from vllm_blend.engine.extension import EngineParts, Extension
from vllm_blend.engine.metrics import Counter, Metric
from vllm_blend.features.structured.compiler import GrammarCompiler
from vllm_blend.features.structured.config import StructuredOutputsConfig
from vllm_blend.features.structured.constraint import FollowedAnswer, GrammarConstraint
from vllm_blend.features.structured.library import llguidance
from vllm_blend.features.structured.vocabulary import Vocabulary
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.request import Request
from vllm_blend.sampling_params import SamplingParams


@dataclass(eq=False)
class StructuredOutputs(Extension):
    """Gives requests that ask for a form a matcher of their own, which the sampler asks for masks.

    Sampling such a request needs the tokens before it, so where the engine runs ahead its draw waits for them
    (`SamplingState.follows_tokens`); drafts are verified with a mask for each.
    """

    compiler: GrammarCompiler
    num_requests: int = 0

    def needs_preparation(self, params: SamplingParams) -> bool:
        """Return whether the form that a request asks for is new."""
        return params.structured_outputs is not None and not self.compiler.is_known(params.structured_outputs)

    def prepare(self, params: SamplingParams) -> None:
        """Compile the form that a request asks for, if it is new."""
        if params.structured_outputs is not None:
            self.compiler.prepare(params.structured_outputs)

    def check(self, parsed: ParsedPrompt, params: SamplingParams) -> None:
        """Raise ValueError for a form that is wrong, or takes too long to compile."""
        if params.structured_outputs is not None:
            self.compiler.matcher(params.structured_outputs)

    def begin(self, requests: Sequence[Request], parsed: ParsedPrompt, params: SamplingParams) -> None:
        """Give requests the constraint that holds their answers to the form."""
        if params.structured_outputs is None:
            return
        self.num_requests += len(requests)
        matcher, vocabulary = self.compiler.matcher(params.structured_outputs)
        for index, request in enumerate(requests):
            assert request.sampling is not None
            own = matcher.deep_copy() if index else matcher
            answer = FollowedAnswer(own, vocabulary, request.output_token_ids)
            request.sampling.constraint = GrammarConstraint(answer, self._executor)

    def gauges(self) -> list[Metric]:
        """Return how many completions asked for a form, and how many forms were compiled or found compiled."""
        return [
            Counter("vllm_blend:structured_requests", self.num_requests),
            Counter("vllm_blend:grammars_compiled", self.compiler.num_compiled),
            Counter("vllm_blend:grammars_found", self.compiler.num_found),
        ]

    @cached_property
    def _executor(self) -> Any:
        return llguidance().LLExecutor()


@dataclass(eq=False)
class CurrentVocabulary:
    """The vocabulary of the engine's tokenizer, made again when that changes."""

    parts: EngineParts
    _made_of: tuple[PreTrainedTokenizerBase | None, frozenset[int]] | None = None
    _made: Vocabulary | None = None

    def __call__(self) -> Vocabulary:
        """Return it. Raises ValueError if answers cannot be held to a form with the tokenizer."""
        with self.parts.lock:  # which the tokenizer belongs to
            tokenizer, eos = self.parts.get_tokenizer(), frozenset(self.parts.eos_token_ids)
            if (
                self._made is None
                or self._made_of is None
                or self._made_of[0] is not tokenizer
                or self._made_of[1] != eos
            ):
                vocab_size = self.parts.worker.hf_config.vocab_size
                self._made = Vocabulary.from_tokenizer(tokenizer, vocab_size, tuple(sorted(eos)))
                self._made_of = tokenizer, eos
            return self._made


def make_structured_outputs(config: StructuredOutputsConfig, parts: EngineParts) -> Extension:
    """Return the feature."""
    return StructuredOutputs(GrammarCompiler(config, CurrentVocabulary(parts)))
