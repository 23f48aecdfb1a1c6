"""Bodies of the small endpoints: models, tokenization, version."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import ConfigDict, model_validator

from vllm_blend.entrypoints.openai.protocol.common import RequestModel, ResponseModel, Settings, WholeList
from vllm_blend.entrypoints.openai.protocol.described import ChatMessages, Documents, Tools, either


class ModelCard(ResponseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None = None
    max_model_len: int


class ModelList(ResponseModel):
    object: Literal["list"]
    data: list[ModelCard]


_OF_CHATS = ("tools", "documents")  # a text has no place for them, so nothing would look whether they are right


class TokenizeRequest(RequestModel):
    """Text (`prompt`), or a chat (`messages`), whose token ids are asked for."""

    model_config = ConfigDict(json_schema_extra=either("prompt", "messages", _OF_CHATS))

    ignored: ClassVar[frozenset[str]] = frozenset(("mm_processor_kwargs",))

    model: str | None = None
    prompt: str | None = None
    messages: ChatMessages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Tools | None = None
    documents: Documents | None = None
    chat_template: str | None = None
    chat_template_kwargs: Settings | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _check_one_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt and messages: give one of them")
        if self.prompt is not None:
            for name in _OF_CHATS:
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} belongs to a conversation: leave it out beside prompt, or send messages")
        return self


class TokenizeResponse(ResponseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: WholeList


class DetokenizeResponse(ResponseModel):
    prompt: str


class VersionResponse(ResponseModel):
    version: str
