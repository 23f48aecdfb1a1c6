"""Bodies of OpenAI's /v1/responses."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from vllm_blend.entrypoints.openai.protocol.common import RequestModel, Whole
from vllm_blend.unsupported import Unsupported

_NO_STATE = "this server keeps no state between requests: send the whole conversation as input"


class ResponsesRequest(RequestModel):
    """The body of a request to /v1/responses. The second part of the fields are those of vLLM and of this engine."""

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
            "include",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "prompt_cache_options",
            "stream_options",
            "top_logprobs",
        )
    )

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = Field(None, description="format: text, json_object or json_schema")
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None

    blend: dict[str, Any] | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[Any] | None = None
    ignore_eos: bool | None = None
    priority: Whole | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    top_k: Whole | None = None
    vllm_xargs: dict[str, Any] | None = None
