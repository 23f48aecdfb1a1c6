"""From what a request sends to token ids: the thin layer between the endpoints and the parsers of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from vllm_blend.chunks.chat_prompt import hide_special_tokens, revealed
from vllm_blend.chunks.chat_template import ChatTemplate, make_chat_template
from vllm_blend.chunks.messages import Message, parse_conversations
from vllm_blend.engine.async_llm import AsyncLLM
from vllm_blend.entrypoints.openai.errors import bad_request
from vllm_blend.entrypoints.openai.passages import BlendOptions, chat_prompt, completion_prompt, parse_documents
from vllm_blend.entrypoints.openai.protocol.completion import ChunkedPromptBody, CompletionPrompt
from vllm_blend.entrypoints.openai.server import Server
from vllm_blend.inputs import ParsedPrompt


def parse_completion_prompts(
    server: Server, prompts: Sequence[CompletionPrompt], blend: BlendOptions, salt: str | None
) -> list[ParsedPrompt]:
    """Return the prompts of a completion request as token ids. Raises ValueError or TypeError."""
    engine = server.engine
    for prompt in prompts:
        if isinstance(prompt, list):
            check_num_tokens(len(prompt), engine)
    return [
        completion_prompt(
            server.passages,
            _plain(prompt),
            blend,
            salt,
            engine.get_tokenizer(),
            engine.vocab_size,
            engine.max_model_len,
            engine.config.blend.enable_blending,
            engine.config.model.trusted_chunks,
        )
        for prompt in prompts
    ]


def check_num_tokens(num_tokens: int, engine: AsyncLLM) -> None:
    """Raise APIError (400) for a prompt that leaves no token of the context to the answer."""
    if num_tokens >= engine.max_model_len:
        raise bad_request(
            f"This model's maximum context length is {engine.max_model_len} tokens, but the prompt has {num_tokens} "
            "tokens: shorten it",
            code="context_length_exceeded",
        )


def _plain(prompt: CompletionPrompt) -> Any:
    """Return a prompt as the parser takes it."""
    if isinstance(prompt, ChunkedPromptBody):
        pages = {} if prompt.continues is None else {"continues": prompt.continues}
        return {"prefix": prompt.prefix, "chunks": prompt.chunks, "suffix": prompt.suffix, **pages}
    return prompt


def parse_chat_prompt(
    server: Server,
    template: ChatTemplate,
    messages: Sequence[Message],
    documents: Any,
    blend: BlendOptions,
    salt: str | None,
) -> ParsedPrompt:
    """Return a conversation as token ids. Raises ValueError, TypeError, or APIError if it is too long for the model."""
    engine = server.engine
    num_texts = sum(max(1, len(message.texts)) + _num_calls(message) for message in messages) + len(documents or ())
    if num_texts > engine.max_model_len:  # each has a token at least; and rendering them takes its time
        raise bad_request(
            f"This model's maximum context length is {engine.max_model_len} tokens, but the conversation has "
            f"{num_texts} messages, parts, tool calls and documents: shorten it",
            "messages",
            "context_length_exceeded",
        )
    trusts = engine.config.model.trusted_chunks
    if not trusts:
        template, messages = hide_special_tokens(template, messages)
    prompt = chat_prompt(
        server.passages,
        template,
        messages,
        parse_documents(documents, partial(server.stored.text_of, salt=salt), template.text),
        blend,
        salt,
        engine.vocab_size,
        engine.max_model_len,
        engine.config.blend.enable_blending,
        trusts,
    )
    return revealed(prompt, template)


def _num_calls(message: Message) -> int:
    calls = message.fields.get("tool_calls")
    return len(calls) if isinstance(calls, list) else 0


def make_template(
    server: Server,
    template: str | None,
    template_kwargs: Mapping[str, Any] | None,
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    **variables: Any,
) -> ChatTemplate:
    """Return the chat template of a request. Raises ValueError or APIError (400)."""
    if template is not None and not server.options.trust_request_chat_template:
        raise bad_request(
            "chat_template: this server uses no templates of requests: leave it out, or start the server with "
            "--trust-request-chat-template",
            "chat_template",
        )
    if (template_kwargs or {}).get("documents"):
        raise bad_request(
            "chat_template_kwargs.documents: give documents, so that they are passages, and text to the tokenizer",
            "chat_template_kwargs",
        )
    given = {name: value for name, value in variables.items() if value is not None}
    kwargs = (server.options.default_chat_template_kwargs or {}) | given | dict(template_kwargs or {})
    continues = bool(continue_final_message)
    return make_chat_template(
        server.engine.get_tokenizer(),
        server.chat_template if template is None else template,
        server.options.chat_template_content_format,
        tools,
        kwargs,
        not continues if add_generation_prompt is None else add_generation_prompt,
        continues,
    )


def parse_messages(messages: Any) -> list[Message]:
    """Return the checked messages of one conversation. Raises ValueError or TypeError that names the message."""
    if not messages:
        raise ValueError("messages is an empty list: a conversation needs at least one message")
    [conversation] = parse_conversations([messages] if not isinstance(messages[0], Mapping) else messages)
    return conversation
