"""Beam search, built on ordinary requests of one token each: the prefix cache holds what their prompts share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tqdm.auto import tqdm

from vllm_blend.checks import a_type, check_field_types, require
from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.engine.request_builder import check_length
from vllm_blend.inputs import ParsedPrompt, PromptType
from vllm_blend.outputs import Logprob, RequestOutput
from vllm_blend.sampling_params import SamplingParams

Run = Callable[[list[ParsedPrompt], SamplingParams], list[RequestOutput]]


@dataclass
class BeamSearchParams:
    """Settings of a beam search, with vLLM's names and meanings.

    beam_width: how many sequences are kept after each token, and returned.
    max_tokens: the most tokens that a sequence may add to its prompt.
    ignore_eos: treat the end-of-sequence tokens as any other token.
    temperature: sequences are always scored in the model's own distribution. Above 0, each sequence may also be
        continued by a token that is drawn at this temperature, besides its 2 * beam_width most likely ones.
    length_penalty: sequences are ranked by cum_logprob / length**length_penalty. The length counts the prompt, as in
        vLLM, but not the token that ended the sequence.
    include_stop_str_in_output: keep the text of the end-of-sequence token. `tokens` has this token in any case.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        check_field_types(self)
        for name in ("beam_width", "max_tokens"):
            require(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be at least 1")
        require(self.temperature >= 0, f"temperature={self.temperature} must be at least 0")


@dataclass
class BeamSearchSequence:
    """A sequence that a beam search found.

    `tokens` and `text` begin with the prompt; `text` is None without a tokenizer. `logprobs` has the candidates at each
    generated token, and `cum_logprob` is the sum over the chosen ones. `finish_reason` is "stop" if an
    end-of-sequence token, which is then `stop_reason`, ended the sequence, else "length".
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None

    def score(self, length_penalty: float, num_tokens: int | None = None) -> float:
        """Return the score that sequences are ranked by; with `num_tokens`, its score at that length."""
        length = len(self.tokens) - (self.finish_reason == "stop") if num_tokens is None else num_tokens
        penalty: float = length**length_penalty
        return self.cum_logprob / penalty


@dataclass
class BeamSearchOutput:
    """The best sequences for a prompt, best first, at most `beam_width`."""

    sequences: list[BeamSearchSequence]


@dataclass
class _Search:
    """The search for one prompt. `max_length` is the most tokens that a sequence may have, with the prompt."""

    prompt: ParsedPrompt
    max_length: int
    beams: list[BeamSearchSequence]
    ended: list[BeamSearchSequence] = field(default_factory=list)


def beam_search(
    engine: LLMEngine,
    run: Run,
    prompts: Sequence[PromptType],
    params: BeamSearchParams,
    use_tqdm: bool = False,
    concurrency_limit: int | None = None,
) -> list[BeamSearchOutput]:
    """Return the best sequences for every prompt. `run` completes prompts, and `concurrency_limit` prompts at a time
    are searched. Raises ValueError or TypeError before any work if a prompt or a setting is wrong."""
    if not isinstance(params, BeamSearchParams):
        raise TypeError(f"params is {a_type(params)}: give BeamSearchParams")
    if concurrency_limit is not None and (not isinstance(concurrency_limit, int) or concurrency_limit < 1):
        raise ValueError(f"concurrency_limit={concurrency_limit!r} must be a positive integer, or None for no limit")
    step = _step_params(engine, params)
    with engine.lock:
        searches = [_begin(engine, prompt, index, params) for index, prompt in enumerate(prompts)]
    waiting = iter(searches)
    with tqdm(total=len(searches), desc="Beam search", disable=not use_tqdm) as bar:
        while group := list(islice(waiting, concurrency_limit)):
            while running := [search for search in group if search.beams]:
                _advance(running, engine, run, params, step)
                bar.update(sum(not search.beams for search in running))
    with engine.lock:
        return [_output(engine, search, params) for search in searches]


def _step_params(engine: LLMEngine, params: BeamSearchParams) -> SamplingParams:
    """Return the parameters of the requests: twice as many candidates as there are beams, so that enough go on even if
    each beam may end."""
    count = min(2 * params.beam_width, engine.hf_config.vocab_size)
    most = engine.config.model.max_logprobs
    if 0 <= most < count:
        raise ValueError(
            f"beam_width={params.beam_width} needs the log-probabilities of {count} tokens, but the engine allows "
            f"{most}: lower beam_width, or raise max_logprobs"
        )
    return SamplingParams(max_tokens=1, logprobs=count, temperature=params.temperature)


def _begin(engine: LLMEngine, prompt: PromptType, index: int, params: BeamSearchParams) -> _Search:
    parsed = engine.parse(prompt)
    check_length(parsed, engine.max_model_len)
    if engine.planner.blends(parsed) or engine.decoder.cache_fuse_metadata.get("check"):
        raise ValueError(
            f"prompts[{index}] would be blended, which a beam search cannot do: every sequence would be computed over "
            "another blend. Give it as plain text or token ids"
        )
    max_length = min(engine.max_model_len, len(parsed.token_ids) + params.max_tokens)
    return _Search(parsed, max_length, [BeamSearchSequence(parsed.token_ids)])


def _advance(
    searches: list[_Search], engine: LLMEngine, run: Run, params: BeamSearchParams, step: SamplingParams
) -> None:
    """Extend every beam of these searches by one token."""
    prompts = [ParsedPrompt(beam.tokens, salt=search.prompt.salt) for search in searches for beam in search.beams]
    outputs = iter(run(prompts, step))
    for search in searches:
        continued = []
        for beam in search.beams:
            for candidate in _candidates(beam, next(outputs)):
                token = candidate.tokens[-1]
                if token in engine.eos_token_ids and not params.ignore_eos:
                    candidate.finish_reason, candidate.stop_reason = "stop", token
                    search.ended.append(candidate)
                else:
                    continued.append(candidate)
        search.beams = _best(continued, params)
        if any(len(beam.tokens) == search.max_length for beam in search.beams):
            for beam in search.beams:
                beam.finish_reason = "length"
            search.ended += search.beams
            search.beams = []
        elif _is_decided(search, params):
            search.beams = []


def _candidates(beam: BeamSearchSequence, output: RequestOutput) -> Iterator[BeamSearchSequence]:
    """Yield the beam continued by each of its most likely tokens."""
    if output.error is not None:
        raise RuntimeError(f"the beam search cannot go on, as one of its requests failed: {output.error}")
    assert output.outputs[0].logprobs is not None
    [entry] = output.outputs[0].logprobs
    for token, found in entry.items():
        yield BeamSearchSequence([*beam.tokens, token], [*beam.logprobs, entry], beam.cum_logprob + found.logprob)


def _best(sequences: list[BeamSearchSequence], params: BeamSearchParams) -> list[BeamSearchSequence]:
    ranked = sorted(sequences, key=lambda sequence: sequence.score(params.length_penalty), reverse=True)
    return ranked[: params.beam_width]


def _is_decided(search: _Search, params: BeamSearchParams) -> bool:
    """Return whether no beam can still rank among the best that have ended: log-probabilities only add up to less, and
    a positive length penalty favours a sequence most at its greatest length."""
    search.ended = _best(search.ended, params)
    if len(search.ended) < params.beam_width:
        return False
    longest = search.max_length if params.length_penalty > 0 else None
    worst = search.ended[-1].score(params.length_penalty)
    return all(beam.score(params.length_penalty, longest) <= worst for beam in search.beams)


def _output(engine: LLMEngine, search: _Search, params: BeamSearchParams) -> BeamSearchOutput:
    best = _best(search.ended, params)
    for sequence in best:
        if engine.tokenizer is not None:
            hides_end = sequence.finish_reason == "stop" and not params.include_stop_str_in_output
            shown = sequence.tokens[:-1] if hides_end else sequence.tokens
            sequence.text = str(engine.tokenizer.decode(shown))
    return BeamSearchOutput(best)
