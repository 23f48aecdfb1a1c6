"""What a model's text says, in pieces: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class CallDelta:
    """More of the tool call number `index`: the first piece has its `id` and the function's `name`, all pieces have
    some of the JSON text of its `arguments`."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the piece as an entry of `delta.tool_calls` in a chunk of OpenAI's chat completions."""
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class MessageDelta:
    """More of a message. It is false if there is nothing in it."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()
    reasoning: str = ""

    def __bool__(self) -> bool:
        return bool(self.content or self.calls or self.reasoning)

    def to_dict(self) -> dict[str, Any]:
        """Return the keys of `delta` in a chunk of OpenAI's chat completions: those that have something to say."""
        delta: dict[str, Any] = {}
        if self.reasoning:
            delta |= {"reasoning": self.reasoning, "reasoning_content": self.reasoning}
        if self.content:
            delta["content"] = self.content
        if self.calls:
            delta["tool_calls"] = [call.to_dict() for call in self.calls]
        return delta


@dataclass(frozen=True)
class ToolCall:
    """A call of the function `name`; `arguments` is JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str

    def to_dict(self) -> dict[str, Any]:
        """Return the call as an entry of `message.tool_calls` in OpenAI's chat completions."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class ParsedMessage:
    """A whole message. `content` and `reasoning` are None if the text has none, as OpenAI's API writes them; an empty
    text has the content ""."""

    content: str | None
    calls: list[ToolCall] = field(default_factory=list)
    reasoning: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the keys of `message` in a chat completion of OpenAI's, without the role."""
        message: dict[str, Any] = {"content": self.content}
        if self.reasoning is not None:
            message |= {"reasoning": self.reasoning, "reasoning_content": self.reasoning}
        if self.calls:
            message["tool_calls"] = [call.to_dict() for call in self.calls]
        return message


def join_calls(pieces: Iterable[CallDelta]) -> list[CallDelta]:
    """Return one piece for each call."""
    heads: dict[int, CallDelta] = {}
    texts: dict[int, list[str]] = {}
    for piece in pieces:
        heads.setdefault(piece.index, piece)
        texts.setdefault(piece.index, []).append(piece.arguments)
    return [replace(head, arguments="".join(texts[index])) for index, head in heads.items()]


def join_deltas(deltas: Sequence[MessageDelta]) -> ParsedMessage:
    """Put the pieces of a message together."""
    content = "".join(delta.content for delta in deltas)
    reasoning = "".join(delta.reasoning for delta in deltas)
    calls = join_calls(call for delta in deltas for call in delta.calls)
    return ParsedMessage(
        content if content or not (calls or reasoning) else None,
        [ToolCall(call.id or "", call.name or "", call.arguments) for call in calls],
        reasoning or None,
    )
