"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from vllm_blend.detokenizer import TokenTexts, token_bytes_function, token_texts
from vllm_blend.entrypoints.openai.errors import bad_request
from vllm_blend.entrypoints.openai.generation import Generation, until_disconnected
from vllm_blend.entrypoints.openai.logprobs import CompletionLogprobsWriter, num_values, prompt_logprobs
from vllm_blend.entrypoints.openai.passages import parse_blend
from vllm_blend.entrypoints.openai.prompts import parse_completion_prompts
from vllm_blend.entrypoints.openai.protocol.completion import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionPrompt,
    CompletionRequest,
    CompletionResponse,
)
from vllm_blend.entrypoints.openai.sampling import (
    check_num_completions,
    check_prompt_logprobs,
    make_sampling_params,
    resolve_max_tokens,
)
from vllm_blend.entrypoints.openai.server import Server, note, server_of, tenant_of
from vllm_blend.entrypoints.openai.streaming import DONE, STREAMS, data_event, event_stream
from vllm_blend.entrypoints.openai.strict_json import StrictRoute
from vllm_blend.entrypoints.openai.usage import UsageCounter
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.outputs import CompletionOutput, RequestOutput
from vllm_blend.sampling_params import RequestOutputKind, SamplingParams

router = APIRouter(route_class=StrictRoute)

_DEFAULT_MAX_TOKENS = 16
_SLICE_CHARACTERS, _SLICE_PROMPTS = 1 << 16, 64  # that are tokenized before other requests have their turn


@router.post("/v1/completions", response_model=CompletionResponse, responses=STREAMS)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Complete one prompt or several."""
    server = server_of(request)
    server.check_model(body.model)
    prompts = body.prompts()
    if not prompts:
        raise bad_request("prompt is an empty list: give at least one prompt", "prompt")
    if len(prompts) > server.options.max_prompts:
        raise bad_request(
            f"prompt has {len(prompts)} prompts: send at most {server.options.max_prompts} in one request", "prompt"
        )
    check_num_completions(len(prompts), body, server)
    salt = tenant_of(request).combined_salt(body.cache_salt)
    jobs: list[_Job] = []
    for some in _slices(prompts):  # others have their turn between
        jobs += await server.prepare(_prepare, body, server, some, salt)
    check_prompt_logprobs(jobs, server.engine.vocab_size)
    parsed = [prompt for prompt, _ in jobs]
    request_id = body.request_id or request.state.request_id
    call = _Completion(body, server, f"cmpl-{request_id}", parsed)
    note(request, prompt_tokens=sum(len(prompt.token_ids) for prompt in parsed))
    generation = Generation.from_call(request, call.id, jobs, body.priority)
    if body.stream:
        return await event_stream(request, call.events(generation))
    outputs = await until_disconnected(request, generation.final())
    return await server.json_answer(lambda: call.response(outputs).to_json(), num_values(outputs))


_Job = tuple[ParsedPrompt, SamplingParams]


def _prepare(
    body: CompletionRequest, server: Server, given: Sequence[CompletionPrompt], salt: str | None
) -> list[_Job]:
    """Return the prompts with their sampling parameters. Raises ValueError, TypeError or APIError."""
    blend = parse_blend(body.blend, body.vllm_xargs)
    prompts = parse_completion_prompts(server, given, blend, salt)
    asked = body.max_tokens
    if asked == 0 and body.echo:  # the prompt's log-probabilities are wanted, and no token behind it
        asked = 1
    known: dict[int, SamplingParams] = {}  # by their `max_tokens`, in which alone they differ
    jobs: list[_Job] = []
    for prompt in prompts:
        num_tokens = len(prompt.token_ids)
        max_tokens = resolve_max_tokens(asked, "max_tokens", _DEFAULT_MAX_TOKENS, num_tokens, server.engine)
        if max_tokens not in known:
            known[max_tokens] = _sampling_params(body, server, max_tokens)
        jobs.append((prompt, known[max_tokens]))
    return jobs


def _slices(prompts: Sequence[CompletionPrompt]) -> Iterator[list[CompletionPrompt]]:
    """Yield prompts in groups that take some milliseconds to tokenize."""
    some: list[CompletionPrompt] = []
    size = 0
    for prompt in prompts:
        some.append(prompt)
        size += _SLICE_CHARACTERS // _SLICE_PROMPTS + _num_characters(prompt)
        if size >= _SLICE_CHARACTERS:
            yield some
            some, size = [], 0
    if some:
        yield some


def _num_characters(prompt: CompletionPrompt) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, list):
        return 0  # token ids
    return sum(len(each) for each in (prompt.prefix, prompt.suffix, *prompt.chunks) if isinstance(each, str))


def _sampling_params(body: CompletionRequest, server: Server, max_tokens: int) -> SamplingParams:
    params = make_sampling_params(
        body,
        server.engine,
        max_tokens,
        body.logprobs,
        output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
    )
    return replace(params, prompt_logprobs=body.logprobs) if body.echo and params.prompt_logprobs is None else params


@dataclass
class _Completion:
    """Writes the answer to a call, whole or as the chunks of a stream."""

    body: CompletionRequest
    server: Server
    id: str
    prompts: Sequence[ParsedPrompt]
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._writers: dict[int, _ChoiceWriter] = {}

    def response(self, outputs: Sequence[RequestOutput]) -> CompletionResponse:
        """Return the whole answer."""
        counter, choices = UsageCounter(), []
        for index, output in enumerate(outputs):
            output = self._without_unwanted_token(output)
            counter.add(index, output)
            choices += [self._choice(index, output, completion) for completion in output.outputs]
        return self._chunk(choices, usage=counter.usage())

    async def events(self, generation: Generation) -> AsyncGenerator[str, None]:
        """Yield the events of a stream."""
        counter = UsageCounter()
        async with aclosing(generation.outputs()) as outputs:
            async for index, output in outputs:
                output = self._without_unwanted_token(output)
                counter.add(index, output)
                for completion in output.outputs:
                    write = partial(self._event, index, output, completion, counter)
                    yield await self.server.write(write, num_values([output]))
        if self.body.reports_usage:
            yield data_event(self._chunk([], usage=counter.usage()).to_json())
        yield DONE

    def _event(self, index: int, output: RequestOutput, completion: CompletionOutput, counter: UsageCounter) -> str:
        usage = {"usage": counter.usage()} if self.body.reports_usage_always else {}
        return data_event(self._chunk([self._choice(index, output, completion)], **usage).to_json())

    def _chunk(self, choices: list[CompletionChoice], **others: Any) -> CompletionResponse:
        return CompletionResponse(
            id=self.id,
            object="text_completion",
            created=self.created,
            model=self.server.model_name,
            choices=choices,
            **others,
        )

    def _choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> CompletionChoice:
        number = index * (self.body.n or 1) + completion.index
        if number not in self._writers:
            self._writers[number] = _ChoiceWriter(number, self.body, self.server, self.prompts[index])
        return self._writers[number].write(output, completion)

    def _without_unwanted_token(self, output: RequestOutput) -> RequestOutput:
        """Drop the token that was generated for the sake of the prompt's log-probabilities alone (max_tokens=0)."""
        if self.body.max_tokens != 0:
            return output
        empty: dict[str, Any] = {"text": "", "token_ids": [], "logprobs": None, "finish_reason": "length"}
        return replace(output, outputs=[replace(each, **empty) for each in output.outputs])


class _ChoiceWriter:
    """Writes one choice, whole or piece by piece. The prompt comes first if it is to be echoed."""

    def __init__(self, number: int, body: CompletionRequest, server: Server, prompt: ParsedPrompt) -> None:
        self._number, self._body, self._prompt = number, body, prompt
        self._tokenizer = server.engine.get_tokenizer()
        as_ids = bool(body.return_tokens_as_token_ids or server.options.return_tokens_as_token_ids)
        bytes_of = token_bytes_function(self._tokenizer, len(self._tokenizer))
        self._logprobs = CompletionLogprobsWriter(as_ids, bytes_of)
        self._texts = TokenTexts(self._tokenizer, body.skip_special_tokens is not False, prompt.token_ids)
        self._begun = False

    def write(self, output: RequestOutput, completion: CompletionOutput) -> CompletionChoice:
        first, self._begun = not self._begun, True
        body, ids = self._body, list(completion.token_ids)
        entries: list[Any] = list(completion.logprobs or [])
        text = completion.text
        texts: list[str] = []
        if body.logprobs is not None:
            ends = completion.finish_reason is not None
            texts = [own for own, _ in self._texts.read(ids, completion.text, ends)]
        fields: dict[str, Any] = {}
        if first and body.echo:
            text = self._prompt_text(output) + text
            if output.prompt_logprobs is not None and body.logprobs is not None:
                entries = [*output.prompt_logprobs, *entries]
                ids = [*output.prompt_token_ids, *ids]
                texts = [*self._prompt_texts(output), *texts]
        if first and body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if body.return_token_ids:
            fields["token_ids"] = list(completion.token_ids)
            if first:
                fields["prompt_token_ids"] = list(output.prompt_token_ids)
        return CompletionChoice(
            index=self._number,
            text=text,
            logprobs=self._write_logprobs(ids, texts, entries),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            **fields,
        )

    def _write_logprobs(
        self, ids: Sequence[int], texts: Sequence[str], entries: Sequence[Mapping[int, Any] | None]
    ) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        return self._logprobs.write(ids[: len(entries)], texts[: len(entries)], entries)

    def _prompt_texts(self, output: RequestOutput) -> list[str]:
        """Return the texts of the prompt's tokens, which join to its text: BOS that the text does not have is empty."""
        ids, text = list(output.prompt_token_ids), self._prompt_text(output)
        bos, token = self._tokenizer.bos_token_id, self._tokenizer.bos_token
        num_silent = int(bos is not None and ids[:1] == [bos] and not text.startswith(str(token)))
        return [""] * num_silent + token_texts(self._tokenizer, ids[num_silent:])

    def _prompt_text(self, output: RequestOutput) -> str:
        text = output.prompt if output.prompt is not None else self._prompt.text
        return text if text is not None else str(self._tokenizer.decode(self._prompt.token_ids))
