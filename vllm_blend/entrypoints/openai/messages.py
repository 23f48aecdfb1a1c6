"""POST /v1/messages, for clients of Anthropic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request, Response

from vllm_blend.chunks.messages import parse_json_object
from vllm_blend.entrypoints.openai.block_answer import BlockAnswer
from vllm_blend.entrypoints.openai.blocks import Block, Step
from vllm_blend.entrypoints.openai.chat_request import ChatCall, prepare_chat
from vllm_blend.entrypoints.openai.errors import as_api_error, bad_request
from vllm_blend.entrypoints.openai.generation import Generation, until_disconnected
from vllm_blend.entrypoints.openai.messages_request import as_chat
from vllm_blend.entrypoints.openai.protocol.messages import (
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
    TokenCount,
)
from vllm_blend.entrypoints.openai.server import Server, note, server_of, tenant_of
from vllm_blend.entrypoints.openai.streaming import STREAMS, dump, event_stream
from vllm_blend.entrypoints.openai.strict_json import StrictRoute
from vllm_blend.entrypoints.openai.tenancy import Tenant
from vllm_blend.outputs import CompletionOutput, RequestOutput

router = APIRouter(route_class=StrictRoute)

_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


@router.post("/v1/messages", response_model=MessagesResponse, responses=STREAMS)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation in Anthropic's format."""
    server = server_of(request)
    server.check_model(body.model)
    if body.max_tokens is None:
        raise bad_request("max_tokens is missing: say how many tokens the answer may have", "max_tokens")
    call = await server.prepare(_prepare, server, body, tenant_of(request))
    note(request, prompt_tokens=len(call.prompt.token_ids))
    answer = _Answer(server, call, f"msg_{request.state.request_id}")
    generation = Generation.from_call(request, answer.id, [(call.prompt, call.params)], body.priority)
    if body.stream:
        return await event_stream(request, answer.events(generation), _error_event)
    [output] = await until_disconnected(request, generation.final())
    return Response(answer.response(output).to_json(), media_type="application/json")


@router.post("/v1/messages/count_tokens", response_model=TokenCount)
async def count_tokens(body: MessagesRequest, request: Request) -> Response:
    """Count the tokens of a conversation in Anthropic's format."""
    server = server_of(request)
    server.check_model(body.model)
    counted = body.model_copy(update={"max_tokens": 1, "blend": {"mode": "off"}})
    call = await server.in_tokenizing_thread(_prepare, server, counted, tenant_of(request))
    return Response(TokenCount(input_tokens=len(call.prompt.token_ids)).to_json(), media_type="application/json")


def _prepare(server: Server, body: MessagesRequest, tenant: Tenant) -> ChatCall:
    return prepare_chat(server, as_chat(body), tenant)


class _Answer(BlockAnswer):
    """Writes the answer to a call, as one message or as the events of a stream."""

    def response(self, output: RequestOutput) -> MessagesResponse:
        """Return the whole message."""
        stop = self._stop(self._read_whole(output))
        return self._message(content=[_content(block) for block in self._reader.blocks], **stop)

    def _first_events(self) -> Iterator[str]:
        message = self._message(content=[], stop_reason=None, stop_sequence=None)
        yield _event("message_start", message=message.model_dump())

    def _block_events(self, step: Step, block: Block, text: str) -> Iterator[str]:
        if step == "open":
            empty = _content(Block(block.index, block.kind, block.id, block.name))
            yield _event("content_block_start", index=block.index, content_block=empty)
        elif step == "close":
            yield _event("content_block_stop", index=block.index)
        else:
            kind, key = _DELTAS[block.kind]
            yield _event("content_block_delta", index=block.index, delta={"type": kind, key: text})

    def _last_events(self, completion: CompletionOutput) -> Iterator[str]:
        yield _event("message_delta", delta=self._stop(completion), usage=self._usage().model_dump())
        yield _event("message_stop")

    def _message(self, **others: Any) -> MessagesResponse:
        return MessagesResponse(
            id=self.id,
            type="message",
            role="assistant",
            model=self.server.model_name,
            usage=self._usage(),
            **others,
        )

    def _stop(self, completion: CompletionOutput) -> dict[str, Any]:
        """Return why an answer ended."""
        reason, by = completion.finish_reason, completion.stop_reason
        if reason == "stop" and self._reader.has_calls and not self._reader.is_cut_by(by):
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if reason == "stop" and isinstance(by, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": by}
        return {"stop_reason": "max_tokens" if reason == "length" else "end_turn", "stop_sequence": None}

    def _usage(self) -> MessagesUsage:
        usage = self._counter.usage()
        details = usage.prompt_tokens_details
        assert details is not None
        return MessagesUsage(
            input_tokens=details.recomputed_tokens,
            cache_read_input_tokens=details.cached_tokens,
            cache_creation_input_tokens=details.stored_tokens,
            output_tokens=usage.completion_tokens,
        )


def _content(block: Block) -> dict[str, Any]:
    """Return a block as messages have it."""
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": parse_json_object(block.text)}


def _event(name: str, **fields: Any) -> str:
    return f"event: {name}\ndata: {dump({'type': name, **fields})}\n\n"


def _error_event(error: Exception) -> str:
    return _event("error", **as_api_error(error).body)
