"""POST /v1/responses, without state: nothing is kept for a later request but KV."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response

from vllm_blend.entrypoints.openai.block_answer import BlockAnswer
from vllm_blend.entrypoints.openai.blocks import Block, Step
from vllm_blend.entrypoints.openai.chat_request import ChatCall, prepare_chat
from vllm_blend.entrypoints.openai.errors import as_api_error
from vllm_blend.entrypoints.openai.generation import Generation, until_disconnected
from vllm_blend.entrypoints.openai.protocol.responses import ResponsesRequest, ResponsesResponse
from vllm_blend.entrypoints.openai.responses_request import as_chat
from vllm_blend.entrypoints.openai.server import Server, note, server_of, tenant_of
from vllm_blend.entrypoints.openai.streaming import STREAMS, dump, event_stream
from vllm_blend.entrypoints.openai.strict_json import StrictRoute
from vllm_blend.entrypoints.openai.tenancy import Tenant
from vllm_blend.outputs import CompletionOutput, RequestOutput

router = APIRouter(route_class=StrictRoute)


@router.post("/v1/responses", response_model=ResponsesResponse, responses=STREAMS)
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation in the format of OpenAI's Responses."""
    server = server_of(request)
    server.check_model(body.model)
    call = await server.prepare(_prepare, server, body, tenant_of(request))
    note(request, prompt_tokens=len(call.prompt.token_ids))
    answer = _Answer(server, call, f"resp_{request.state.request_id}", body)
    generation = Generation.from_call(request, answer.id, [(call.prompt, call.params)], body.priority)
    if body.stream:
        return await event_stream(request, answer.events(generation), answer.error_event)
    [output] = await until_disconnected(request, generation.final())
    return Response(dump(answer.response(output)), media_type="application/json")


def _prepare(server: Server, body: ResponsesRequest, tenant: Tenant) -> ChatCall:
    return prepare_chat(server, as_chat(body), tenant)


@dataclass
class _Answer(BlockAnswer):
    """Writes the answer to a call, as one response or as the events of a stream."""

    body: ResponsesRequest
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._numbers = itertools.count()

    def response(self, output: RequestOutput) -> dict[str, Any]:
        """Return the whole response."""
        return self._response(self._read_whole(output).finish_reason)

    def _first_events(self) -> Iterator[str]:
        yield self._event("response.created", response=self._response(None))
        yield self._event("response.in_progress", response=self._response(None))

    def _last_events(self, completion: CompletionOutput) -> Iterator[str]:
        reason = completion.finish_reason
        name = "response.incomplete" if reason == "length" else "response.completed"
        yield self._event(name, response=self._response(reason))

    def error_event(self, error: Exception) -> str:
        """Return the event of an error in the midst of a stream."""
        found = as_api_error(error).body["error"]
        return self._event("error", code=found["code"], message=found["message"], param=found["param"])

    def _response(self, reason: str | None) -> dict[str, Any]:
        """Return the response as it is: in progress while there is no finish reason."""
        ends, is_cut = reason is not None, reason == "length"
        status = "incomplete" if is_cut else "completed" if ends else "in_progress"
        body, params = self.body, self.call.params
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.server.model_name,
            "output": [self._item(block, "completed") for block in self._reader.blocks] if ends else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"strict": None, "parameters": None, **tool} for tool in body.tools or ()],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": self._usage() if ends else None,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._counter.usage()
        assert usage.prompt_tokens_details is not None
        details = usage.prompt_tokens_details.model_dump()
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": details | {"cache_write_tokens": details["stored_tokens"]},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens()},
            "total_tokens": usage.total_tokens,
        }

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """Return a block as an item of the output."""
        item_id = f"{self.id}_{block.index}"
        if block.kind == "call":
            call = {"call_id": block.id, "name": block.name, "arguments": block.text}
            return {"type": "function_call", "id": f"fc_{item_id}", "status": status, **call}
        if block.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": block.text}] if block.text else []
            return {"type": "reasoning", "id": f"rs_{item_id}", "summary": [], "content": content, "status": status}
        content = [self._text_part(block)] if status == "completed" else []
        return {"type": "message", "id": f"msg_{item_id}", "role": "assistant", "status": status, "content": content}

    def _text_part(self, block: Block) -> dict[str, Any]:
        return _text_part(block.text, self._logprobs.of(block))

    def _block_events(self, step: Step, block: Block, text: str) -> Iterator[str]:
        item = self._item(block, "completed" if step == "close" else "in_progress")
        place: dict[str, Any] = {"item_id": item["id"], "output_index": block.index}
        part: dict[str, Any] = place | {"content_index": 0}
        if step == "open":
            yield self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "text":
            if step == "open":
                yield self._event("response.content_part.added", **part, part=_text_part("", []))
            elif step == "more":
                logprobs = _of_event(self._logprobs.new)
                yield self._event("response.output_text.delta", **part, delta=text, logprobs=logprobs)
            else:
                logprobs = _of_event(self._logprobs.of(block))
                yield self._event("response.output_text.done", **part, text=block.text, logprobs=logprobs)
                yield self._event("response.content_part.done", **part, part=item["content"][0])
        elif block.kind == "reasoning" and step != "open":
            name = "response.reasoning_text.delta" if step == "more" else "response.reasoning_text.done"
            yield self._event(name, **part, **({"delta": text} if step == "more" else {"text": block.text}))
        elif step == "more":
            yield self._event("response.function_call_arguments.delta", **place, delta=text)
        elif step == "close":
            done = {"arguments": block.text, "name": block.name}
            yield self._event("response.function_call_arguments.done", **place, **done)
        if step == "close":
            yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _event(self, name: str, /, **fields: Any) -> str:  # an event may have a field `name`, too
        event = {"type": name, "sequence_number": next(self._numbers), **fields}
        return f"event: {name}\ndata: {dump(event)}\n\n"


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _of_event(logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return log-probabilities as the events of text have them: without bytes, unlike those of the text itself."""

    def without_bytes(entry: dict[str, Any]) -> dict[str, Any]:
        return {"token": entry["token"], "logprob": entry["logprob"]}

    return [
        without_bytes(entry) | {"top_logprobs": [without_bytes(each) for each in entry["top_logprobs"]]}
        for entry in logprobs
    ]
