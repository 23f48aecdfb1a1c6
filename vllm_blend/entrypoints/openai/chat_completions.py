"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response

from vllm_blend.detokenizer import TokenTexts, token_bytes_function
from vllm_blend.entrypoints.openai.chat_request import ChatCall, prepare_chat
from vllm_blend.entrypoints.openai.generation import Generation, until_disconnected
from vllm_blend.entrypoints.openai.logprobs import chat_logprobs, num_values, prompt_logprobs
from vllm_blend.entrypoints.openai.output_parser import OutputParser
from vllm_blend.entrypoints.openai.protocol.chat import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatLogprobs,
    ChatMessage,
)
from vllm_blend.entrypoints.openai.server import Server, note, server_of, tenant_of
from vllm_blend.entrypoints.openai.streaming import DONE, STREAMS, data_event, event_stream
from vllm_blend.entrypoints.openai.strict_json import StrictRoute
from vllm_blend.entrypoints.openai.usage import UsageCounter
from vllm_blend.outputs import CompletionOutput, RequestOutput

router = APIRouter(route_class=StrictRoute)


@router.post("/v1/chat/completions", response_model=ChatCompletionResponse, responses=STREAMS)
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation."""
    server = server_of(request)
    server.check_model(body.model)
    call = await server.prepare(prepare_chat, server, body, tenant_of(request))
    note(request, prompt_tokens=len(call.prompt.token_ids))
    request_id = body.request_id or request.state.request_id
    answer = _Answer(body, server, call, f"chatcmpl-{request_id}")
    generation = Generation.from_call(request, answer.id, [(call.prompt, call.params)], body.priority)
    if body.stream:
        return await event_stream(request, answer.events(generation))
    [output] = await until_disconnected(request, generation.final())
    return await server.json_answer(lambda: answer.response(output).to_json(), num_values([output]))


@dataclass
class _Answer:
    """Writes the answer to a call, whole or as the chunks of a stream."""

    body: ChatCompletionRequest
    server: Server
    call: ChatCall
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._parsers: dict[int, OutputParser] = {}
        self._texts: dict[int, TokenTexts] = {}

    def response(self, output: RequestOutput) -> ChatCompletionResponse:
        """Return the whole answer."""
        counter = UsageCounter()
        counter.add(0, output)
        others: dict[str, Any] = {}
        if self.body.return_token_ids:
            others["prompt_token_ids"] = list(output.prompt_token_ids)
        if self.body.prompt_logprobs is not None:
            others["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return ChatCompletionResponse(
            id=self.id,
            object="chat.completion",
            created=self.created,
            model=self.server.model_name,
            choices=[self._choice(completion) for completion in output.outputs],
            usage=counter.usage(),
            **others,
        )

    async def events(self, generation: Generation) -> AsyncGenerator[str, None]:
        """Yield the events of a stream: the role of every choice, its pieces, and the usage if it is wanted."""
        counter = UsageCounter()
        async with aclosing(generation.outputs()) as outputs:
            async for index, output in outputs:
                counter.add(index, output)
                for completion in output.outputs:
                    for choice, others in self._pieces(output, completion):
                        if self.body.reports_usage_always:
                            others["usage"] = counter.usage()
                        yield data_event(self._chunk([choice], **others).to_json())
        if self.body.reports_usage:
            yield data_event(self._chunk([], usage=counter.usage()).to_json())
        yield DONE

    def _chunk(self, choices: list[ChatChunkChoice], **others: Any) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.server.model_name,
            choices=choices,
            **others,
        )

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        parser = self._make_parser()
        message = self._shown(parser.parse(completion.text).to_dict())
        return ChatChoice(
            index=completion.index,
            message=ChatMessage.model_validate({"role": self.call.role, **message, "refusal": None}),
            finish_reason=parser.finish_reason(completion.finish_reason, completion.stop_reason),
            stop_reason=completion.stop_reason,
            **self._token_fields(completion),
        )

    def _pieces(
        self, output: RequestOutput, completion: CompletionOutput
    ) -> list[tuple[ChatChunkChoice, dict[str, Any]]]:
        """Return what an output adds to a choice, as choices of chunks and what else the chunks have."""
        found, index = [], completion.index
        if index not in self._parsers:
            self._parsers[index] = self._make_parser()
            role = ChatMessage(role=self.call.role, content="")
            others = {"prompt_token_ids": list(output.prompt_token_ids)} if self.body.return_token_ids else {}
            found.append((ChatChunkChoice(index=index, delta=role, logprobs=None, finish_reason=None), others))
        parser, reason = self._parsers[index], completion.finish_reason
        deltas = [parser.feed(completion.text)]
        if reason is not None and (rest := parser.finish()):
            deltas = [*filter(None, deltas), rest]
        for number, delta in enumerate(deltas):
            own: dict[str, Any] = {"logprobs": None} if number else self._token_fields(completion)
            ends = reason is not None and number == len(deltas) - 1
            if ends:
                own["stop_reason"] = completion.stop_reason
            if delta or ends or own["logprobs"] is not None or own.get("token_ids"):
                message = ChatMessage.model_validate(self._shown(delta.to_dict()))
                finish_reason = parser.finish_reason(reason, completion.stop_reason) if ends else None
                found.append((ChatChunkChoice(index=index, delta=message, finish_reason=finish_reason, **own), {}))
        return found

    def _shown(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the keys of a message, without reasoning if the request does not want it."""
        if self.body.include_reasoning is not False:
            return message
        return {key: value for key, value in message.items() if key not in ("reasoning", "reasoning_content")}

    def _make_parser(self) -> OutputParser:
        return self.call.parsers.make(self.call.prompt.text)

    def _token_fields(self, completion: CompletionOutput) -> dict[str, Any]:
        """Return the fields of a choice that are about its tokens."""
        fields: dict[str, Any] = {"logprobs": self._logprobs(completion)}
        return fields | {"token_ids": list(completion.token_ids)} if self.body.return_token_ids else fields

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not self.body.logprobs or completion.logprobs is None:
            return None
        as_ids = bool(self.body.return_tokens_as_token_ids or self.server.options.return_tokens_as_token_ids)
        entries: Sequence[Any] = completion.logprobs
        tokenizer = self.server.engine.get_tokenizer()
        if completion.index not in self._texts:
            skip = self.call.params.skip_special_tokens
            self._texts[completion.index] = TokenTexts(tokenizer, skip, self.call.prompt.token_ids)
        ids = completion.token_ids
        texts = self._texts[completion.index].read(ids, completion.text, completion.finish_reason is not None)
        bytes_of = token_bytes_function(tokenizer, len(tokenizer))
        return chat_logprobs(ids, texts, entries, self.body.top_logprobs or 0, as_ids, bytes_of)
