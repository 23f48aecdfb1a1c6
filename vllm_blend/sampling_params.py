"""Sampling parameters: how the next token of a request is chosen, and when its generation ends."""

from __future__ import annotations

import copy
import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from vllm_blend.logits_process import check_processors
from vllm_blend.sampling_checks import (
    check_integer,
    check_n,
    check_number,
    flat_logprobs_by_default,
    parse_logit_bias,
    parse_num_logprobs,
    parse_strings,
    parse_token_ids,
)
from vllm_blend.structured_outputs import StructuredOutputsParams, parse_structured_outputs
from vllm_blend.unsupported import accept_defaults
from vllm_blend.unsupported.sampling_params import UNSUPPORTED_SAMPLING_PARAMS

_COMPRESSION = (
    "target_compression_rate",
    "max_cache_tokens",
    "protected_window_size",
    "num_sinks",
    "compress_once",
)
_SWITCHES = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "flat_logprobs",
)
MAX_PENALTY = 1e30  # a logit times or divided by more may leave the range of 32 bits
GREEDY_TEMPERATURE = 1e-5  # below this, the most likely token is taken instead of drawing one


class RequestOutputKind(enum.Enum):
    """What the outputs of a request that is streamed hold."""

    CUMULATIVE = 0  # all that was generated so far
    DELTA = 1  # what is new since the last output
    FINAL_ONLY = 2  # all, once, at the end


@accept_defaults(UNSUPPORTED_SAMPLING_PARAMS, "sampling parameter")
@dataclass
class SamplingParams:
    """Sampling settings of one request, with vLLM's names and meanings.

    n: completions per prompt, at most 16384 (VLLM_MAX_N_SEQUENCES); drawn independently, so greedy decoding allows 1
        only.
    presence_penalty, frequency_penalty: -2..2, subtracted from the logits of generated tokens, once and per occurrence.
    repetition_penalty: 1e-30..1e30; divides the logits of tokens of the prompt and the output (multiplies negative
        ones).
    temperature: >= 0; below 1e-5 is greedy.
    top_p, top_k, min_p: nucleus mass in (0, 1]; number of candidates, 0 or -1 for all; least probability in 0..1 of a
        candidate, relative to the best one's.
    seed: makes the draws of this request reproducible, whatever else is in the batch.
    stop, stop_token_ids: text or tokens that end the generation. Neither counts before `min_tokens` tokens.
    reasoning_marks: what opens and closes the reasoning that the output may begin with: ("<think>", "</think>"). Stop
        strings do not count in it. An empty first mark: the prompt has opened it.
    ignore_eos: go on after the end-of-sequence token.
    max_tokens: most tokens generated, None until the context is full.
    min_tokens: tokens generated before any may stop the request.
    logprobs: log-probabilities of this many most likely tokens and of the chosen one, at each output position (0: of
        the chosen one only, -1: of the whole vocabulary), in the model's own distribution, before every other setting.
    prompt_logprobs: the same for each prompt position.
    flat_logprobs: report both as `FlatLogprobs` in place of lists of dicts; None: as VLLM_FLAT_LOGPROBS (0 or 1) says.
    detokenize: whether to produce text. Without it nothing is decoded: texts are "", and `decoded_token` of a
        log-probability is None. An engine without a tokenizer never produces text.
    skip_special_tokens: leave special tokens out of the text.
    spaces_between_special_tokens: keep the spaces a tokenizer's decoder puts between adjacent added tokens.
    include_stop_str_in_output: keep the matched stop string at the end of the text.
    logit_bias: token id -> number added to its logit. allowed_token_ids: the only tokens that may be generated.
    bad_words: strings that are never completed, with or without a space before them.
    logits_processors: functions of (output token ids, logits) or (prompt token ids, output token ids, logits) that
        return the logits [vocabulary] to go on with. They run in this order, before every other setting, and once per
        token: a request that has some is never decoded speculatively. One that raises ends this request alone. Those
        with a `clone()` method are cloned for every completion, others are shared.
    structured_outputs: the form of the answer: a JSON schema, a regular expression, a grammar, ... (see
        `StructuredOutputsParams`). `guided_decoding` is vLLM's earlier name for it, and becomes it.
    target_compression_rate, max_cache_tokens, protected_window_size, num_sinks, compress_once: with `enable_kvc`, how
        much of this request's KV is kept; None: as the engine was told (see `CompressionSettings`).
    output_kind: what the outputs of `AsyncLLM.generate` hold. `LLM.generate` returns final outputs in any case.

    vLLM's parameters that do not exist here may be None or have vLLM's default (see `UNSUPPORTED_SAMPLING_PARAMS`).
    Raises ValueError or TypeError naming the field, its value and the fix.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logits_processors: list[Any] | None = None
    target_compression_rate: float | None = None
    max_cache_tokens: int | None = None
    protected_window_size: int | None = None
    num_sinks: int | None = None
    compress_once: bool | None = None
    flat_logprobs: bool | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: Any = None
    reasoning_marks: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if self.flat_logprobs is None:
            self.flat_logprobs = flat_logprobs_by_default()
        if self.output_kind is None:
            self.output_kind = RequestOutputKind.CUMULATIVE
        if not isinstance(self.output_kind, RequestOutputKind):
            raise TypeError(
                f"output_kind={self.output_kind!r} must be a RequestOutputKind: CUMULATIVE, DELTA, FINAL_ONLY"
            )
        self.structured_outputs = parse_structured_outputs(self.structured_outputs, self.guided_decoding)
        self.guided_decoding = None
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} must be True or False")
        check_n(self.n)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_number("repetition_penalty", self.repetition_penalty, 1 / MAX_PENALTY, MAX_PENALTY)
        check_number("temperature", self.temperature, 0.0)
        check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_integer("top_k", self.top_k, -1)
        check_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed == -1:
            self.seed = None
        if self.seed is not None:
            check_integer("seed", self.seed, -(2**63))
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1)
        check_integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}: lower one or raise the other"
            )
        self.logprobs = parse_num_logprobs("logprobs", self.logprobs)
        self.prompt_logprobs = parse_num_logprobs("prompt_logprobs", self.prompt_logprobs)
        self.stop = [self.stop] if isinstance(self.stop, str) else parse_strings("stop", self.stop)
        self.stop_token_ids = parse_token_ids("stop_token_ids", self.stop_token_ids)
        self.bad_words = parse_strings("bad_words", self.bad_words)
        self.logit_bias = parse_logit_bias(self.logit_bias)
        self.logits_processors = check_processors(self.logits_processors)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = parse_token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise ValueError(
                    "allowed_token_ids is empty, so no token could be generated: list some, or leave it None"
                )
        for field, strings in (("stop", self.stop), ("bad_words", self.bad_words)):
            if any(not s.strip() if field == "bad_words" else not s for s in strings):
                raise ValueError(f"{field}={strings!r} holds an empty string: remove it")
        marks = self.reasoning_marks
        if marks is not None:
            if not (isinstance(marks, (tuple, list)) and [type(each) for each in marks] == [str, str] and marks[1]):
                raise ValueError(
                    f"reasoning_marks={marks!r}: give two strings, of which the second is not empty, or None"
                )
            self.reasoning_marks = (marks[0], marks[1])
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need text, but detokenize=False: use stop_token_ids, or detokenize=True")
        if self.greedy and self.n > 1:
            raise ValueError(
                f"n={self.n} with temperature={self.temperature}: greedy completions are all alike, use n=1"
            )

    @property
    def __struct_fields__(self) -> tuple[str, ...]:
        """Return the names of the fields: vLLM's class is a msgspec.Struct, which callers copy field by field."""
        return tuple(field.name for field in fields(self))

    @property
    def greedy(self) -> bool:
        """Return whether the most likely token is taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def compression(self) -> dict[str, Any]:
        """Return the settings of KV-Compress; None stands for the engine's."""
        return {name: getattr(self, name) for name in _COMPRESSION}

    def clone(self) -> SamplingParams:
        """Return a deep copy. Logits processors are shared, but for those that have a `clone()` method.

        Raises ValueError if one of these methods fails.
        """
        given = self.logits_processors or ()
        return copy.deepcopy(self, dict(zip(map(id, given), _clones(given), strict=True)))

    def for_completions(self) -> list[SamplingParams]:
        """Return the settings of each of `n` completions: n=1, and a seed of its own if there is one. They are checked
        again, as callers may have changed a field, and share nothing that callers can change. Lists they share with one
        another, as lists may be long and `n` large."""
        form = copy.deepcopy(self.structured_outputs)  # of the other fields, checking makes new lists and dicts
        processors = _clones(self.logits_processors)
        several = [replace(self, n=1, logits_processors=processors, structured_outputs=form)]
        for index in range(1, self.n):
            other = copy.copy(several[0])
            if self.seed is not None:
                other.seed = (self.seed + index) % 2**63
            if processors:
                other.logits_processors = _clones(self.logits_processors)
            several.append(other)
        return several

    def bind(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> list[tuple[int, ...]]:
        """Check what depends on the vocabulary, before any work starts; return the token sequences of `bad_words`.

        Each bad word is encoded alone and after a space, without special tokens. Raises ValueError naming the field.
        """
        assert isinstance(self.stop_token_ids, list)
        for field, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logit_bias", self.logit_bias or ()),
        ):
            outside = [token for token in ids if token >= vocab_size]
            if outside:
                named = f"{outside[:16]}{'...' if len(outside) > 16 else ''}"
                raise ValueError(f"{field} names {named}, outside the vocabulary of {vocab_size} tokens: remove them")
        for field, k in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if k is not None and k > vocab_size:
                raise ValueError(f"{field}={k} is above the vocabulary of {vocab_size} tokens: use -1 for all of them")
        if tokenizer is None:
            for field in ("stop", "bad_words"):
                if getattr(self, field):
                    raise ValueError(
                        f"{field}={getattr(self, field)!r} needs a tokenizer, and the engine has none: give one"
                    )
            return []
        sequences: dict[tuple[int, ...], None] = {}
        num_tokens = len(tokenizer) if self.bad_words else 0
        for word in self.bad_words or ():
            for sequence in _encode_word(tokenizer, num_tokens, word):
                if not sequence or any(token >= vocab_size for token in sequence):
                    raise ValueError(f"bad_words: {word!r} has no tokens in the vocabulary of {vocab_size}: remove it")
                sequences[sequence] = None
        return list(sequences)


def _clones(processors: Sequence[Any] | None) -> list[Any]:
    """Return logits processors for one request: those that have a `clone()` method as clones, one for each, as often as
    it is listed. Raises ValueError if one of these methods fails, and TypeError as `check_processors` does."""
    given = check_processors(processors)
    try:
        clones = {id(own): own.clone() if hasattr(own, "clone") else own for own in given}
    except Exception as error:
        raise ValueError(f"logits_processors: clone() raised {type(error).__name__}: {error}") from error
    return [clones[id(own)] for own in given]


@lru_cache(maxsize=4096)
def _encode_word(tokenizer: PreTrainedTokenizerBase, _: int, word: str) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of a word alone and after a space. The second argument, how many tokens the tokenizer has,
    makes a tokenizer that has learnt some another one: requests of one call name the same words again and again."""
    bare = word.lstrip()
    return tuple(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (bare, " " + bare))
