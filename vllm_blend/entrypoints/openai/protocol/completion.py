"""Bodies of /v1/completions."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from vllm_blend.entrypoints.openai.protocol.common import (
    IGNORED_ANYWHERE,
    REFUSED_ANYWHERE,
    ListOf,
    RequestModel,
    ResponseModel,
    SamplingFields,
    UsageInfo,
    Whole,
    WholeList,
)
from vllm_blend.unsupported import Unsupported


class ChunkedPromptBody(RequestModel):
    """A prompt in pieces; each is text or token ids. See `vllm_blend.inputs.ChunkedPrompt`."""

    prefix: str | WholeList = ""
    chunks: ListOf[str | WholeList]
    suffix: str | WholeList
    continues: ListOf[Whole | None] | None = Field(
        None, description="for each chunk the number of an earlier one that it continues on its page, or null"
    )


CompletionPrompt = str | WholeList | ChunkedPromptBody


class CompletionRequest(SamplingFields):
    """The body of a request to /v1/completions."""

    endpoint: ClassVar[str | None] = "/v1/completions"
    refused: ClassVar[dict[str, Unsupported]] = REFUSED_ANYWHERE | {
        "add_special_tokens": Unsupported(True, "give the prompt as token ids"),
        "suffix": Unsupported(None, "no supported model fills in the middle", ("",)),
    }
    ignored: ClassVar[frozenset[str]] = IGNORED_ANYWHERE

    prompt: CompletionPrompt | ListOf[CompletionPrompt] = Field(
        description="text, token ids, a prompt in pieces, or a list of such prompts"
    )
    echo: bool | None = None
    logprobs: Whole | None = Field(None, ge=0)

    def prompts(self) -> list[CompletionPrompt]:
        """Return the prompts one by one. A list of integers is one prompt."""
        if not isinstance(self.prompt, list):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            ids: Any = self.prompt
            return [ids]
        many: Any = self.prompt
        return list(many)


class CompletionLogprobs(ResponseModel):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class CompletionChoice(ResponseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class CompletionResponse(ResponseModel):
    """The answer of /v1/completions, whole or as a chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo | None = None
