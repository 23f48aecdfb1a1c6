"""From a request's fields to `SamplingParams`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from vllm_blend.engine.async_llm import AsyncLLM
from vllm_blend.entrypoints.openai.errors import bad_request
from vllm_blend.entrypoints.openai.prompts import check_num_tokens
from vllm_blend.entrypoints.openai.protocol.common import ResponseFormat, SamplingFields
from vllm_blend.entrypoints.openai.server import Server
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.sampling_params import SamplingParams

MAX_PROMPT_LOGPROBS = 1 << 18  # in one answer
MAX_NAMED_TOKENS = 1 << 18  # in the lists of a request, counted for each of its completions

_NOT_COPIED = {"max_tokens", "logprobs", "prompt_logprobs", "structured_outputs"}  # endpoints give them other meanings
_COPIED = sorted({field.name for field in fields(SamplingParams)} & SamplingFields.model_fields.keys() - _NOT_COPIED)


def make_sampling_params(
    body: SamplingFields,
    engine: AsyncLLM,
    max_tokens: int,
    logprobs: int | None,
    call_schema: dict[str, Any] | None = None,
    **others: Any,
) -> SamplingParams:
    """Return the sampling parameters of a request: what it says, else the model's defaults. `call_schema` is what the
    answer must match if it is to call tools.

    Raises ValueError or TypeError naming the field.
    """
    _check_token_lists(body, engine.vocab_size)
    given = {name: getattr(body, name) for name in _COPIED}
    settings = dict(engine.default_sampling_settings)
    settings |= {name: value for name, value in (given | others).items() if value is not None}
    form = answer_form(body, call_schema)
    if form is not None:
        settings["structured_outputs"] = form
    if body.prompt_logprobs is not None:
        settings["prompt_logprobs"] = body.prompt_logprobs
    params = SamplingParams(**settings | {"max_tokens": max_tokens, "logprobs": logprobs})
    if params.bad_words:  # many take long to tokenize: from here on the engine knows their tokens
        params.bind(engine.get_tokenizer(), engine.vocab_size)
    return params


def _check_token_lists(body: SamplingFields, vocab_size: int) -> None:
    """Raise APIError (400) for lists of more tokens than there are, before any token of them is looked at."""
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        given = getattr(body, name) or ()
        if len(given) > vocab_size:
            raise bad_request(
                f"{name} has {len(given)} entries, but the vocabulary has {vocab_size} tokens: name each once", name
            )


def check_num_completions(num_prompts: int, body: SamplingFields, server: Server) -> None:
    """Raise APIError (400) for more completions than a request may have, or for more tokens that are named to all of
    them: every step goes through the tokens of every completion that runs."""
    limit, n = server.options.max_prompts, 1 if body.n is None else body.n
    if n > 1 and num_prompts * n > limit:
        raise bad_request(f"n={n} for {num_prompts} prompts: a request may have at most {limit} completions", "n")
    count = max(1, num_prompts * n)
    named = {name: len(getattr(body, name) or ()) for name in ("allowed_token_ids", "logit_bias", "bad_words")}
    total = sum(named.values())
    if count > 1 and total * count > MAX_NAMED_TOKENS:
        field = max(named, key=lambda name: named[name])
        raise bad_request(
            f"{field} and its like have {total} entries for {count} completions: the product may be at most "
            f"{MAX_NAMED_TOKENS}; send fewer prompts in one request, ask for fewer completions, or name fewer tokens",
            field,
        )


def check_prompt_logprobs(jobs: Sequence[tuple[ParsedPrompt, SamplingParams]], vocab_size: int) -> None:
    """Raise APIError (400) if the log-probabilities of the prompts would make a huge answer. They cost the client
    nothing to ask for, unlike those of an answer, and each takes a microsecond to write."""
    total = 0
    for prompt, params in jobs:
        k = params.prompt_logprobs
        if k is not None:
            total += len(prompt.token_ids) * ((vocab_size if k == -1 else k) + 1) * params.n
    if total > MAX_PROMPT_LOGPROBS:
        raise bad_request(
            f"the answer would have {total} log-probabilities of prompts, and may have {MAX_PROMPT_LOGPROBS}: send "
            "fewer or shorter prompts in one request, or ask for fewer log-probabilities",
            "logprobs",
        )


def answer_form(body: SamplingFields, call_schema: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the form of the answer as `SamplingParams.structured_outputs` takes it; None if it is free. Raises
    ValueError if a request asks for several forms."""
    forms = {
        "structured_outputs": body.structured_outputs,
        "response_format": None if body.response_format is None else _response_form(body.response_format),
        "tool_choice": None if call_schema is None else {"json": call_schema, "disable_any_whitespace": True},
    }
    given = {name: form for name, form in forms.items() if form is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} both say what the answer looks like: give one of them")
    return next(iter(given.values()), None)


def _response_form(given: ResponseFormat) -> dict[str, Any] | None:
    if given.type == "text":
        return None
    if given.type == "json_object":
        return {"json_object": True}
    if given.type == "structural_tag":
        return {"structural_tag": {"structures": given.structures, "triggers": given.triggers}}
    if given.type != "json_schema":
        raise ValueError(
            f"response_format.type={given.type!r} is unknown: use 'text', 'json_object', 'json_schema' or "
            "'structural_tag'"
        )
    schema = None if given.json_schema is None else given.json_schema.get("schema")
    if not isinstance(schema, dict):
        raise ValueError("response_format.json_schema.schema is missing: give a JSON schema, an object")
    return {"json": schema}


def resolve_max_tokens(
    asked: int | None, name: str, default: int | None, num_prompt_tokens: int, engine: AsyncLLM
) -> int:
    """Return how many tokens a prompt may get. Without a number it is the default, as far as the context allows.

    Raises APIError (400) if prompt and answer do not fit the context, as vLLM does.
    """
    limit = engine.max_model_len
    check_num_tokens(num_prompt_tokens, engine)
    free = limit - num_prompt_tokens
    if asked is None:
        own = engine.default_sampling_settings.get("max_tokens", default)
        return free if own is None else min(own, free)
    if asked > free:
        raise bad_request(
            f"{name}={asked} is too large: this model's maximum context length is {limit} tokens, and the prompt has "
            f"{num_prompt_tokens}; ask for at most {free}",
            name,
            "context_length_exceeded",
        )
    return asked
