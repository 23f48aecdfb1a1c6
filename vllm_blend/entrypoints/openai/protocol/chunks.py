"""Bodies of /v1/chunks."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from vllm_blend.entrypoints.openai.protocol.common import (
    ListOf,
    Metadata,
    RequestModel,
    ResponseModel,
    Whole,
    WholeList,
)
from vllm_blend.entrypoints.openai.protocol.described import either


class RetentionFields(RequestModel):
    """How long a passage is kept, and how much it matters. `ttl` is another name of `retention_seconds`."""

    priority: Whole | None = Field(None, ge=0, le=100, description="larger ones leave the memory later; 50 by default")
    retention_seconds: float | Whole | str | None = Field(None, description='seconds, or text such as "5m" or "2h"')
    ttl: float | Whole | str | None = None
    metadata: Metadata | None = None

    @model_validator(mode="after")
    def _check_one_time(self) -> RetentionFields:
        if self.ttl is not None and self.retention_seconds is not None:
            raise ValueError("ttl and retention_seconds are both given: give one of them")
        return self


class ChunkRequest(RetentionFields):
    """A passage to store: its text or its token ids, and what stands before it in the prompts that will have it."""

    model_config = ConfigDict(json_schema_extra=either("token_ids", "text", ("messages", "title")))

    model: str | None = None
    text: str | None = None
    title: str | None = None
    token_ids: WholeList | None = None
    prefix: str | WholeList | None = Field(None, description="what /v1/completions prompts have before their chunks")
    messages: ListOf[dict[str, Any]] | None = Field(
        None, description="what conversations begin with: the system prompt"
    )
    cache_salt: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> ChunkRequest:
        if (self.text is None) == (self.token_ids is None):
            raise ValueError("text and token_ids: give one of them")
        if self.prefix is not None and self.messages is not None:
            raise ValueError("prefix and messages are both given: a passage is stored for one of them")
        if self.token_ids is not None and (self.messages is not None or self.title is not None):
            raise ValueError("token_ids are for chunks of completions: leave messages and title out, or give the text")
        return self


class ChunkUpdate(RetentionFields):
    """What is to change of a stored passage."""


class ChunkObject(ResponseModel):
    """A stored passage."""

    id: str
    object: Literal["chunk"]
    created_at: int
    expires_at: int
    num_tokens: int
    priority: int
    title: str | None
    text: str | None
    metadata: dict[str, str]


class ChunkList(ResponseModel):
    object: Literal["list"]
    data: list[ChunkObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ChunkDeleted(ResponseModel):
    id: str
    object: Literal["chunk"]
    deleted: bool
