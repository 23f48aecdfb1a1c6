"""Bodies of /v1/chat/completions."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from vllm_blend.entrypoints.openai.protocol.common import (
    IGNORED_ANYWHERE,
    REFUSED_ANYWHERE,
    ResponseModel,
    SamplingFields,
    Settings,
    UsageInfo,
    Whole,
)
from vllm_blend.entrypoints.openai.protocol.described import ChatMessages, Documents, Tools
from vllm_blend.unsupported import Unsupported

_TEXT_ONLY = "the supported models take and give text only"


class ChatCompletionRequest(SamplingFields):
    """The body of a request to /v1/chat/completions."""

    endpoint: ClassVar[str | None] = "/v1/chat/completions"
    refused: ClassVar[dict[str, Unsupported]] = REFUSED_ANYWHERE | {
        "modalities": Unsupported(None, _TEXT_ONLY, (["text"],)),
        "audio": Unsupported(None, _TEXT_ONLY),
        "prediction": Unsupported(None, "give speculative_config to the engine: it drafts from the prompt"),
        "web_search_options": Unsupported(None, "the server does not search: send what you found as documents"),
        "functions": Unsupported(None, "give tools", ([],)),
        "function_call": Unsupported(None, "give tool_choice", ("none",)),
        "echo": Unsupported(False, "it belongs to /v1/completions"),
        "add_special_tokens": Unsupported(False, "the chat template writes them"),
        "verbosity": Unsupported(None, "no template knows it: say in a message how long the answer is to be", (), True),
    }
    ignored: ClassVar[frozenset[str]] = IGNORED_ANYWHERE

    messages: ChatMessages
    documents: Documents | None = Field(None, description="passages: strings, {title, text} or {id, data}")
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = Field(None, ge=0)
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Settings | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs={self.top_logprobs} needs logprobs=true: give both, or neither")
        return self


class TopLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    content: list[TokenLogprob] | None
    refusal: None = None


class FunctionCall(ResponseModel):
    name: str | None = None
    arguments: str | None = None


class ToolCall(ResponseModel):
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None  # in streams
    function: FunctionCall


class ChatMessage(ResponseModel):
    """A message of the model, whole or what a chunk of a stream adds to it."""

    role: str | None = None
    content: str | None = None
    refusal: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(ResponseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionResponse(ResponseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class ChatChunkChoice(ResponseModel):
    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(ResponseModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageInfo | None = None
    prompt_token_ids: list[int] | None = None
