"""Messages of a conversation: checked before any work starts, and their contents as texts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from vllm_blend.checks import a_type, is_number

ContentFormat = Literal["string", "openai", "none"]

# What a content part of text is called, in OpenAI's APIs, and the key of its text.
_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
# The fields of a content part that ask for it to be kept, and for how many seconds if they do not say.
_KEPT_SECONDS = {"cache_control": 300.0, "prompt_cache_breakpoint": 1800.0}
_TIME = re.compile(r"([0-9]{1,9})(s|m|h|d)")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST = 30 * 86400
INVALID_JSON = "INVALID_JSON"  # the key of arguments that are no JSON object, as in Anthropic's API
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")


@dataclass(frozen=True)
class Message:
    """A message whose content is `texts`, one for each of its parts; a content that is a string has one part. `fields`
    are its other keys, the role among them. `kept` has, for each part, the seconds for which it is asked to be kept
    (`cache_control` or `prompt_cache_breakpoint`), 0 for a part that is not; it is empty where none is. `in_parts` says
    whether the content was a list."""

    fields: Mapping[str, Any]
    texts: tuple[str, ...]
    kept: tuple[float, ...] = ()
    in_parts: bool = False

    @property
    def role(self) -> str:
        return str(self.fields["role"])

    def render(self, content_format: ContentFormat, texts: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the message as templates want it, with its own texts or others: one string, in which parts are joined
        by newlines, a list of parts, or nothing."""
        texts = self.texts if texts is None else texts
        if content_format == "none":
            return {**self.fields, "content": None}
        if content_format == "openai":
            return {**self.fields, "content": [{"type": "text", "text": text} for text in texts]}
        return {**self.fields, "content": "\n".join(texts)}


def parse_conversations(messages: Any) -> list[list[Message]]:
    """Check a conversation, or a list of conversations, and return its messages.

    Raises TypeError or ValueError that names the message, what is wrong with it and what to do.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(
            f"messages is {a_type(messages)}: give a list of messages, "
            "[{'role': 'user', 'content': '...'}], or a list of such lists"
        )
    if messages and not isinstance(messages[0], Mapping):
        return [_parse_conversation(each, f"messages[{index}]") for index, each in enumerate(messages)]
    return [_parse_conversation(messages, "messages")]


def _parse_conversation(messages: Any, name: str) -> list[Message]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(f"{name} is {a_type(messages)}: give a list of messages, or lists of messages alone")
    if not messages:
        raise ValueError(f"{name} is an empty list: a conversation needs at least one message")
    return [_parse_message(message, f"{name}[{index}]") for index, message in enumerate(messages)]


def _parse_message(message: Any, name: str) -> Message:
    if not isinstance(message, Mapping):
        raise TypeError(f"{name} is {a_type(message)}: give a dict with 'role' and 'content'")
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise ValueError(f"{name} has the role {message.get('role')!r}: give a string such as 'user' or 'assistant'")
    fields = {key: value for key, value in message.items() if key not in ("content", "tool_calls")}
    if message.get("tool_calls"):  # templates take an empty list for a message with calls
        fields["tool_calls"] = _parse_tool_calls(message["tool_calls"], f"{name}['tool_calls']")
    if not fields.get("reasoning_content"):
        fields.pop("reasoning_content", None)
        if isinstance(message.get("reasoning"), str) and message["reasoning"]:
            fields["reasoning_content"] = message["reasoning"]  # as templates call it
    content = message.get("content")
    if content is None:
        if message["role"] == "assistant" and ("tool_calls" in fields or "reasoning_content" in fields):
            return Message(fields, ())
        raise ValueError(
            f"{name} has no content, which only an assistant's message with tool_calls or reasoning may leave out: "
            "give a string or a list of text parts"
        )
    texts = tuple(_texts(content, f"{name}['content']"))
    parts = [] if isinstance(content, str) else content
    kept = [_kept_seconds(part, f"{name}['content'][{index}]") for index, part in enumerate(parts)]
    return Message(fields, texts, tuple(kept) if any(kept) else (), in_parts=not isinstance(content, str))


def _texts(content: Any, name: str) -> list[str]:
    if isinstance(content, str):
        return [_check_text(content, name)]
    if isinstance(content, (bytes, Mapping)) or not isinstance(content, Sequence):
        raise TypeError(f"{name} is {a_type(content)}: give a string or a list of text parts")
    return [_text(part, f"{name}[{index}]") for index, part in enumerate(content)]


def _text(part: Any, name: str) -> str:
    if isinstance(part, str):
        return _check_text(part, name)
    if not isinstance(part, Mapping):
        raise TypeError(f"{name} is {a_type(part)}: give {{'type': 'text', 'text': '...'}}")
    kind = part.get("type")
    if not isinstance(kind, str | None):
        raise TypeError(f"{name}['type'] is {kind!r}, {a_type(kind)}: give a string, {{'type': 'text', 'text': '...'}}")
    if kind not in _TEXT_KEYS:
        raise ValueError(
            f"{name} is of type {kind!r}, but this engine takes text alone: give {{'type': 'text', 'text': '...'}}"
        )
    return _check_text(part.get(_TEXT_KEYS[kind]), f"{name}[{_TEXT_KEYS[kind]!r}]")


def _kept_seconds(part: Any, name: str) -> float:
    """Return for how many seconds a part asks to be kept: by Anthropic's field or by OpenAI's."""
    if not isinstance(part, Mapping):
        return 0.0
    asked = [
        _parse_ttl(part[field], f"{name}[{field!r}]", default)
        for field, default in _KEPT_SECONDS.items()
        if part.get(field) is not None
    ]
    return max(asked, default=0.0)


def _parse_ttl(mark: Any, name: str, default: float) -> float:
    if not isinstance(mark, Mapping):
        raise TypeError(f"{name} is {a_type(mark)}: give an object, which may have a 'ttl' such as '5m'")
    ttl = mark.get("ttl")
    return default if ttl is None else parse_seconds(ttl, f"{name}['ttl']")


def parse_seconds(value: Any, name: str) -> float:
    """Return a time in seconds that is given as a number of them, or as text such as "90s", "5m", "1h" or "2d".

    Raises TypeError or ValueError that names the field, also for none and for more than 30 days.
    """
    if isinstance(value, str) and (found := _TIME.fullmatch(value)) is not None:
        seconds = float(found[1]) * _UNITS[found[2]]
    elif isinstance(value, str):
        raise ValueError(f"{name}={value[:50]!r} is no time: give seconds, or text such as '5m' or '1h'")
    elif not is_number(value):
        raise TypeError(f"{name} is {value!r}: give a number of seconds, or text such as '5m' or '1h'")
    else:
        seconds = value
    if not 0 < seconds <= _LONGEST:
        raise ValueError(f"{name}={value!r} must be more than 0 and at most {_LONGEST} seconds, which are 30 days")
    return float(seconds)


def _check_text(text: Any, name: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{name} is {a_type(text)}: give a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} holds half of a surrogate pair, which is not a character ({error}): remove it"
        ) from error
    return text


def _parse_tool_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    """Return tool calls with arguments as dicts, which templates expect; OpenAI's API has them as a text. One that is
    no JSON object, as an answer that was cut off may have it, stands alone under the key of an error."""
    if isinstance(calls, (str, bytes, Mapping)) or not isinstance(calls, Sequence):
        raise TypeError(f"{name} is {a_type(calls)}: give a list of calls")
    parsed = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"{name}[{index}] is not a function call: give {{'type': 'function', 'function': {{'name': '...', "
                "'arguments': '{...}'}}"
            )
        arguments = _parse_arguments(function.get("arguments"), f"{name}[{index}]['function']['arguments']")
        parsed.append({**call, "function": {**function, "arguments": arguments}})
    return parsed


def _parse_arguments(given: Any, name: str) -> dict[str, Any]:
    if given is None or given == "":  # vLLM's clients leave them out of calls without any
        return {}
    if isinstance(given, str):
        return parse_json_object(_check_text(given, name))
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} is of type {type(given).__name__}: give an object, or its JSON")
    return dict(given)


def parse_json_object(text: str) -> dict[str, Any]:
    """Return the JSON object in a text. A text that is not one becomes an object with the text under an error key."""
    try:
        value = json.loads(text or "{}")
        json.dumps(value, ensure_ascii=False).encode()  # not so halves of surrogate pairs
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: text}


def with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose tool calls have ids of nine letters and digits, as Mistral's templates demand. Other ids
    are replaced, those of the results too."""

    def short(given: Any) -> Any:
        if not isinstance(given, str) or _SHORT_ID.fullmatch(given):
            return given
        return hashlib.blake2b(given.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()[:9]

    changed = []
    for message in messages:
        fields = dict(message.fields)
        if "tool_call_id" in fields:
            fields["tool_call_id"] = short(fields["tool_call_id"])
        if "tool_calls" in fields:
            fields["tool_calls"] = [{**call, "id": short(call.get("id"))} for call in fields["tool_calls"]]
        changed.append(replace(message, fields=fields))
    return changed


def with_single_calls(messages: Sequence[Message]) -> list[Message]:
    """Return messages with one tool call each, followed by its result, as some templates demand."""
    changed: list[Message] = []
    index = 0
    while index < len(messages):
        message, index = messages[index], index + 1
        calls = message.fields.get("tool_calls", ())
        if len(calls) < 2:
            changed.append(message)
            continue
        results = []
        while index < len(messages) and messages[index].role == "tool":
            results.append(messages[index])
            index += 1
        ids = [call.get("id") for call in calls]
        for number, call in enumerate(calls):
            fields = {**message.fields, "tool_calls": [call]}
            changed.append(replace(message, fields=fields) if number == 0 else Message(fields, ()))
            changed += [result for result in results if result.fields.get("tool_call_id") == ids[number]]
        changed += [result for result in results if result.fields.get("tool_call_id") not in ids]
    return changed
