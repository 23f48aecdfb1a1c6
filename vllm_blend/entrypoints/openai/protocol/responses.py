"""Bodies of OpenAI's /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from vllm_blend.entrypoints.openai.protocol.chat import TokenLogprob
from vllm_blend.entrypoints.openai.protocol.common import (
    Metadata,
    PromptTokensDetails,
    RequestModel,
    ResponseModel,
    Settings,
    Strings,
    Whole,
)
from vllm_blend.entrypoints.openai.protocol.described import Documents, InputItems, ResponsesTools
from vllm_blend.unsupported import Unsupported

_NO_STATE = "this server keeps no state between requests: send the whole conversation as input"


class ResponsesRequest(RequestModel):
    """The body of a request to /v1/responses. The second part of the fields are those of vLLM and of this engine."""

    endpoint: ClassVar[str | None] = "/v1/responses"
    refused: ClassVar[dict[str, Unsupported]] = {
        "previous_response_id": Unsupported(None, _NO_STATE),
        "conversation": Unsupported(None, _NO_STATE),
        "background": Unsupported(False, _NO_STATE),
        "prompt": Unsupported(None, _NO_STATE),
        "truncation": Unsupported("disabled", "shorten the input before you send it"),
        "max_tool_calls": Unsupported(None, "the server calls no tools itself"),
    }
    ignored: ClassVar[frozenset[str]] = frozenset(
        (
            "store",
            "user",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "prompt_cache_options",
            "stream_options",
        )
    )

    model: str | None = None
    input: str | InputItems
    instructions: str | None = None
    max_output_tokens: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: ResponsesTools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = Field(None, description="format: text, json_object or json_schema")
    reasoning: dict[str, Any] | None = None
    metadata: Metadata | None = None
    include: Strings | None = Field(None, description='what else to return: "message.output_text.logprobs"')
    top_logprobs: Whole | None = Field(None, ge=0)
    stream: bool | None = None

    blend: Settings | None = None
    cache_salt: str | None = None
    chat_template_kwargs: Settings | None = None
    documents: Documents | None = None
    ignore_eos: bool | None = None
    priority: Whole | None = None
    seed: Whole | None = None
    stop: Strings | None = None
    top_k: Whole | None = None
    vllm_xargs: Settings | None = None


LOGPROBS = "message.output_text.logprobs"


class OutputText(ResponseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class ReasoningText(ResponseModel):
    type: Literal["reasoning_text"]
    text: str


class OutputItem(ResponseModel):
    """The fields that all items of an output have."""

    id: str
    status: Literal["in_progress", "completed"]


class MessageItem(OutputItem):
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(OutputItem):
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningText]


class FunctionCallItem(OutputItem):
    """A call; `arguments` is a JSON text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class IncompleteDetails(ResponseModel):
    reason: Literal["max_output_tokens"]


class ReasoningSettings(ResponseModel):
    effort: str | None
    summary: None


class InputTokensDetails(PromptTokensDetails):
    cache_write_tokens: int


class OutputTokensDetails(ResponseModel):
    reasoning_tokens: int


class ResponsesUsage(ResponseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponsesResponse(ResponseModel):
    """The answer of /v1/responses, and the `response` of its streams' events."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Annotated[MessageItem | ReasoningItem | FunctionCallItem, Field(discriminator="type")]]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: ReasoningSettings
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponsesUsage | None
