"""What the text of an answer says: reasoning, content and tool calls. The chat endpoints use this module alone.

choice = parse_tool_choice(body.tool_choice, parse_tools(body.tools), body.parallel_tool_calls)
parsers = check_output_parsers(choice, tool_call_parser, reasoning_parser)   # before the request is queued
if parsers.needs_special_tokens:
    sampling_params.skip_special_tokens = False
parser = parsers.make(prompt_text)                    # one for each choice of the answer
delta = parser.feed(text)                             # for each piece of text; delta.to_dict() if delta
delta = parser.finish()                               # at the end
message = parser.parse(text)                          # in place of both, for a whole text; message.to_dict()
reason = parser.finish_reason(output.finish_reason)   # "tool_calls" where OpenAI's API says so
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_blend.checks import closest
from vllm_blend.entrypoints.openai.reasoning import REASONING_PARSERS, ReasoningParser, opens_reasoning
from vllm_blend.entrypoints.openai.tool_calls import TOOL_PARSERS
from vllm_blend.entrypoints.openai.tool_calls.deltas import MessageDelta, ParsedMessage, join_deltas
from vllm_blend.entrypoints.openai.tool_calls.forced import NamedCall, RequiredCalls
from vllm_blend.entrypoints.openai.tool_calls.parser import ToolParser
from vllm_blend.entrypoints.openai.tool_calls.tool_choice import ToolChoice


@dataclass(frozen=True)
class OutputParsers:
    """Makes the parsers for the answers to a request."""

    choice: ToolChoice
    tool_parser: type[ToolParser] | None
    reasoning_parser: type[ReasoningParser] | None

    @property
    def needs_special_tokens(self) -> bool:
        """Return whether marks that the parsers look for may be special tokens, which texts usually leave out."""
        return self.choice.mode == "auto" and self.tool_parser is not None and self.tool_parser.needs_special_tokens

    @property
    def reasons(self) -> bool:
        """Return whether answers may begin with reasoning. A grammar holds forced calls from the first token on."""
        return self.reasoning_parser is not None and self.choice.mode not in ("named", "required")

    def make(self, prompt: str | None) -> OutputParser:
        """Return a parser for one answer to `prompt`."""
        choice = self.choice
        if choice.mode == "named":
            return OutputParser(choice, None, NamedCall(str(choice.name)))
        if choice.mode == "required":  # a grammar holds the answer to calls from its beginning
            return OutputParser(choice, None, RequiredCalls())
        reasoning = None if self.reasoning_parser is None else self.reasoning_parser(opens_reasoning(prompt))
        tools = None if self.tool_parser is None else self.tool_parser(choice.names)
        return OutputParser(choice, reasoning, tools)


def check_output_parsers(
    choice: ToolChoice, tool_call_parser: str | None, reasoning_parser: str | None
) -> OutputParsers:
    """Return what makes the parsers of a request. They are named as in vLLM; None stands for none.

    Raises ValueError if a name is unknown, or if the model may choose to call tools and no parser would see it.
    """
    if choice.mode == "auto" and tool_call_parser is None:
        raise ValueError(
            "tool_choice='auto' needs a tool parser, and the server has none for this model: start it with "
            f"--tool-call-parser (one of {TOOL_PARSERS.names()}), or use tool_choice='required', 'none' or a function"
        )
    tools = None if tool_call_parser is None else TOOL_PARSERS.find(tool_call_parser)
    if reasoning_parser is not None and reasoning_parser not in REASONING_PARSERS:
        meant = closest(reasoning_parser, REASONING_PARSERS)
        raise ValueError(
            f"reasoning_parser={reasoning_parser!r} is unknown: use one of {sorted(REASONING_PARSERS)}"
            + (f"; did you mean {meant!r}?" if meant else "")
        )
    reasoning = None if reasoning_parser is None else REASONING_PARSERS[reasoning_parser]
    return OutputParsers(choice, tools if choice.mode == "auto" else None, reasoning)


class OutputParser:
    """Reads one answer."""

    def __init__(self, choice: ToolChoice, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._choice, self._reasoning, self._tools = choice, reasoning, tools
        self._last_arguments: list[str] = []  # of the last call

    @property
    def num_held(self) -> int:
        """Return how many characters at the end of the answer so far are held back."""
        return sum(reader.num_held for reader in (self._reasoning, self._tools) if reader is not None)

    def feed(self, text: str) -> MessageDelta:
        """Return what can be told after `text`, the next piece of the answer."""
        delta = MessageDelta(text) if self._reasoning is None else self._reasoning.feed(text)
        return self._join([delta] if self._tools is None else [delta, self._tools.feed(delta.content)])

    def finish(self) -> MessageDelta:
        """Return what was held back until the end of the answer."""
        delta = MessageDelta() if self._reasoning is None else self._reasoning.finish()
        if self._tools is None:
            return delta
        return self._join([delta, self._tools.feed(delta.content), self._tools.finish()])

    def parse(self, text: str) -> ParsedMessage:
        """Return what a whole answer says. Use a new parser for each answer."""
        return join_deltas([self.feed(text), self.finish()])

    def finish_reason(self, reason: str | None, stop_reason: int | str | None = None) -> str | None:
        """Return the finish reason of OpenAI's API: "tool_calls" for an answer that stopped for its calls, but not for
        the call that the request named, nor for one that a stop string, the `stop_reason`, has cut."""
        has_calls = self._tools is not None and self._tools.num_calls > 0 and self._choice.mode != "named"
        return "tool_calls" if has_calls and reason == "stop" and not self.is_cut_by(stop_reason) else reason

    def is_cut_by(self, stop_reason: int | str | None) -> bool:
        """Return whether a stop string has ended the answer within a call."""
        if not isinstance(stop_reason, str) or self._tools is None or self._tools.num_calls == 0:
            return False
        try:
            json.loads("".join(self._last_arguments) or "{}")
        except (ValueError, RecursionError):
            return True
        return False

    def _join(self, deltas: Sequence[MessageDelta]) -> MessageDelta:
        """Put what the parsers say together, without the content that the first one gave to the second one."""
        first, *others = deltas
        if not others:
            return first
        limit = None if self._choice.is_parallel else 1
        calls = [call for delta in others for call in delta.calls if limit is None or call.index < limit]
        for call in calls:
            if call.id is not None:
                self._last_arguments.clear()
            self._last_arguments.append(call.arguments)
        return replace(first, content="".join(delta.content for delta in others), calls=tuple(calls))
