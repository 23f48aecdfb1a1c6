"""Tool calls in the text of an answer: one file a format, and one registry of all under vLLM's names.

Endpoints need `parse_tools` and `parse_tool_choice` of tool_choice.py, which check a request, and
`output_parser.make_output_parser`, which reads its answers. `detect_tool_parser` guesses the format from a chat
template, for servers that are not told which one it is.
"""

from __future__ import annotations

from vllm_blend.entrypoints.openai.tool_calls.deltas import CallDelta, MessageDelta, ParsedMessage, ToolCall
from vllm_blend.entrypoints.openai.tool_calls.hermes import Hermes
from vllm_blend.entrypoints.openai.tool_calls.llama3_json import Llama3Json
from vllm_blend.entrypoints.openai.tool_calls.mistral import Mistral
from vllm_blend.entrypoints.openai.tool_calls.parser import ToolParser
from vllm_blend.registry import Registry

TOOL_PARSERS: Registry[type[ToolParser]] = Registry("tool parser", "tool_call_parser", (Hermes, Llama3Json, Mistral))
register_tool_parser = TOOL_PARSERS.register  # as a decorator, it makes a class of your own usable by its `name`

# What only the templates of a format write; the first that a template has is its format.
_MARKS = {"[TOOL_CALLS]": "mistral", "<tool_call>": "hermes", "<|python_tag|>": "llama3_json"}


def detect_tool_parser(chat_template: str | None) -> str | None:
    """Return the name of the parser for the calls that a chat template writes; None if it writes none that a parser
    here reads."""
    if chat_template is None or "<function=" in chat_template:  # calls in XML, between marks that are those of Hermes
        return None
    return next((name for mark, name in _MARKS.items() if mark in chat_template), None)


__all__ = [
    "TOOL_PARSERS",
    "CallDelta",
    "MessageDelta",
    "ParsedMessage",
    "ToolCall",
    "ToolParser",
    "detect_tool_parser",
    "register_tool_parser",
]
