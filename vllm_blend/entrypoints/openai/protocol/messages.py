"""Bodies of Anthropic's /v1/messages."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from vllm_blend.entrypoints.openai.protocol.common import (
    ErrorInfo,
    FewStrings,
    ListOf,
    RequestModel,
    ResponseModel,
    Settings,
    Whole,
)
from vllm_blend.entrypoints.openai.protocol.described import MAX_TOOLS, Blocks
from vllm_blend.unsupported import Unsupported


class AnthropicMessage(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class MessagesRequest(RequestModel):
    """The body of a request to /v1/messages. The second part of the fields are those of this engine."""

    endpoint: ClassVar[str | None] = "/v1/messages"
    refused: ClassVar[dict[str, Unsupported]] = {
        "mcp_servers": Unsupported(None, "the server calls no other servers: give tools", ([],)),
        "container": Unsupported(None, "the server runs no code"),
        "context_management": Unsupported(None, "send the messages that the model is to see", ({}, {"edits": []})),
    }
    ignored: ClassVar[frozenset[str]] = frozenset(("metadata", "service_tier", "betas", "inference_geo"))

    model: str | None = None
    messages: ListOf[AnthropicMessage]
    max_tokens: Whole | None = Field(None, description="most tokens of the answer; /v1/messages needs it")
    system: str | ListOf[dict[str, Any]] | None = None
    stop_sequences: FewStrings | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    tools: Annotated[ListOf[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = Field(None, description="format: json_schema; effort")
    output_format: dict[str, Any] | None = Field(None, description="as output_config.format")
    stream: bool | None = None
    cache_control: dict[str, Any] | None = Field(None, description="that of the last block")

    blend: Settings | None = None
    cache_salt: str | None = None
    chat_template_kwargs: Settings | None = None
    priority: Whole | None = None
    vllm_xargs: Settings | None = None


class MessagesUsage(ResponseModel):
    """The three counts of the input make up the prompt: computed, found in a cache, computed for the store."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class MessagesResponse(ResponseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(ResponseModel):
    input_tokens: int


class MessagesErrorResponse(ResponseModel):
    type: Literal["error"]
    error: ErrorInfo
