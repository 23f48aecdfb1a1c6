"""From a chat request to a prompt and its sampling parameters; every endpoint that takes messages uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_blend.chunks.chat_template import ChatTemplate
from vllm_blend.chunks.messages import Message
from vllm_blend.entrypoints.openai.errors import bad_request
from vllm_blend.entrypoints.openai.output_parser import OutputParsers, check_output_parsers
from vllm_blend.entrypoints.openai.passages import parse_blend
from vllm_blend.entrypoints.openai.prompts import make_template, parse_chat_prompt, parse_messages
from vllm_blend.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm_blend.entrypoints.openai.reasoning import detect_reasoning_parser, reasoning_marks
from vllm_blend.entrypoints.openai.sampling import (
    check_num_completions,
    check_prompt_logprobs,
    make_sampling_params,
    resolve_max_tokens,
)
from vllm_blend.entrypoints.openai.server import Server
from vllm_blend.entrypoints.openai.tenancy import Tenant
from vllm_blend.entrypoints.openai.tool_calls import detect_tool_parser
from vllm_blend.entrypoints.openai.tool_calls.tool_choice import ToolChoice, parse_tool_choice, parse_tools
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.sampling_params import RequestOutputKind, SamplingParams


@dataclass(frozen=True)
class ChatCall:
    """A chat request, ready to run. `role` is that of the answer."""

    prompt: ParsedPrompt
    params: SamplingParams
    role: str
    parsers: OutputParsers


def prepare_chat(server: Server, body: ChatCompletionRequest, tenant: Tenant) -> ChatCall:
    """Render and tokenize a conversation, and check its settings. Raises ValueError, TypeError or APIError."""
    check_format(server)
    check_num_completions(1, body, server)
    messages = parse_messages(body.messages)
    choice = parse_tool_choice(body.tool_choice, parse_tools(body.tools), body.parallel_tool_calls)
    template = make_template(
        server,
        body.chat_template,
        body.chat_template_kwargs,
        choice.template_tools,
        body.add_generation_prompt,
        body.continue_final_message,
        reasoning_effort=body.reasoning_effort,
    )
    messages = _known_roles(messages, template.text)
    parsers = _output_parsers(server, choice, template)
    blend, salt = parse_blend(body.blend, body.vllm_xargs), tenant.combined_salt(body.cache_salt)
    prompt = parse_chat_prompt(server, template, messages, body.documents, blend, salt)
    role = messages[-1].role if body.continue_final_message else server.options.response_role
    params = _sampling_params(body, server, prompt, parsers)
    check_prompt_logprobs([(prompt, params)], server.engine.vocab_size)
    return ChatCall(prompt, params, role, parsers)


def check_format(server: Server) -> None:
    """Raise APIError (400) for a model whose answers are in a format that the chat endpoints do not read."""
    if server.engine.model_config.hf_config.model_type == "gpt_oss":
        raise bad_request(
            f"{server.model_name!r} is a gpt-oss model: it reads and writes OpenAI's harmony format, which the chat "
            "endpoints do not: render the conversation with the package openai-harmony, send the token ids to "
            "/v1/completions with return_token_ids=true, and have the package parse those of the answer; or use "
            "LLM.chat, offline",
            "model",
            "model_not_supported",
        )


def _output_parsers(server: Server, choice: ToolChoice, template: ChatTemplate) -> OutputParsers:
    """Return what reads the answers: the parsers that the server names, else those that fit the template."""
    options = server.options
    tools = options.tool_call_parser or detect_tool_parser(template.text)
    reasoning = options.reasoning_parser or detect_reasoning_parser(template.text)
    return check_output_parsers(choice, tools if options.enable_auto_tool_choice else None, reasoning)


def check_top_logprobs(count: int | None, limit: int) -> None:
    """Raise APIError (400) for more `top_logprobs` than the engine allows, of which -1 is any number."""
    if count is not None and 0 <= limit < count:
        raise bad_request(
            f"top_logprobs={count} is too large: this server allows {limit} (--max-logprobs)", "top_logprobs"
        )


def _sampling_params(
    body: ChatCompletionRequest, server: Server, prompt: ParsedPrompt, parsers: OutputParsers
) -> SamplingParams:
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked: int | None = getattr(body, name)
    max_tokens = resolve_max_tokens(asked, name, None, len(prompt.token_ids), server.engine)
    others: dict[str, Any] = {
        "output_kind": RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
    }
    if parsers.needs_special_tokens:
        others["skip_special_tokens"] = False
    if parsers.reasons:
        others["reasoning_marks"] = reasoning_marks(prompt.text)
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    check_top_logprobs(num_logprobs, server.engine.config.model.max_logprobs)
    return make_sampling_params(body, server.engine, max_tokens, num_logprobs, parsers.choice.json_schema, **others)


def _known_roles(messages: Sequence[Message], template: str) -> list[Message]:
    """Give developers the role of the system unless the template knows their own."""
    if "developer" in template:
        return list(messages)
    return [
        replace(message, fields={**message.fields, "role": "system"}) if message.role == "developer" else message
        for message in messages
    ]
