"""Reading tool calls out of a text that arrives in pieces, whatever their format is.

A parser is a generator that yields where it needs more text. It reads every character once. What may turn out to be
part of a call is held back: it is dropped when the call is announced, and becomes content if there is no call after
all. A call is announced when its name is known and its first argument has begun, or its arguments are empty.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import ClassVar

from vllm_blend.entrypoints.openai.tool_calls.deltas import CallDelta, MessageDelta, join_calls
from vllm_blend.entrypoints.openai.tool_calls.json_scanner import JsonScanner
from vllm_blend.entrypoints.openai.tool_calls.text_reader import Steps, TextReader

_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", *_ARGUMENTS, "id", "type")


class Malformed(Exception):
    """The text is no call, or not any more."""


class Truncated(Malformed):
    """The text ends within a call."""


class ToolParser(TextReader):
    """Splits the text of an answer into content and tool calls.

    `known` are the names of the functions that the model may call; some formats need them to tell a call from content.
    White space between content and a call that follows it, between calls, and behind the last call belongs to the
    format and is dropped.

    A call that is malformed becomes content, unchanged. If that shows after the call has been announced, it stays a
    call whose arguments are the text that the model wrote up to the format's end of a call: as with OpenAI's models,
    arguments need not be valid JSON. Those of a text that ends too early end with it.
    """

    name: ClassVar[str]
    # Whether the format's marks may be special tokens, so that skip_special_tokens must be off to see them.
    needs_special_tokens: ClassVar[bool] = True

    def __init__(self, known: Collection[str] | None = None) -> None:
        super().__init__()
        self.known = known
        self.num_calls = 0
        self._in_call = self._writes_arguments = self._follows_call = False
        self._content: list[str] = []
        self._calls: list[CallDelta] = []

    def finish(self) -> MessageDelta:
        delta = super().finish()
        space = "" if self._follows_call else "".join(self._held)
        return replace(delta, content=delta.content + space)

    def _make_id(self) -> str:
        return f"call_{uuid.uuid4().hex[:24]}"

    def _say(self, text: str) -> None:
        """Tell content, but hold back white space at its end: a call may follow."""
        content = text.rstrip()
        if content:
            self._content += [*self._held, content]
            self._held.clear()
            self._follows_call = False
        self._held.append(text[len(content) :])

    def _release(self) -> None:
        """Tell as content what was held back."""
        text = "".join(self._held)
        self._held.clear()
        self._say(text)

    def _announce(self, name: str) -> None:
        self._calls.append(CallDelta(self.num_calls, "", self._make_id(), name))
        self.num_calls += 1
        self._in_call = self._follows_call = True
        self._held.clear()

    def _end_call(self) -> None:
        self._in_call = False
        self._held.clear()

    def _write_arguments(self, text: str) -> None:
        if text:
            self._calls.append(CallDelta(self.num_calls - 1, text))

    def _take_delta(self) -> MessageDelta:
        delta = MessageDelta("".join(self._content), tuple(join_calls(self._calls)))
        self._content.clear()
        self._calls.clear()
        return delta

    def _expect(self, character: str) -> Steps[None]:
        found = yield from self._next()
        if found != character:
            raise Malformed if found else Truncated
        self._hold(1)

    def _value(self) -> Steps[str]:
        """Hold back a JSON value, and return its text. Raises Malformed."""
        start = len(self._held)
        yield from self._scan(JsonScanner(), self._held.append)
        return "".join(self._held[start:])

    def _scan(self, scanner: JsonScanner, tell: Callable[[str], None]) -> Steps[None]:
        while True:
            stop = scanner.scan(self._text, self._position)
            tell(self._text[self._position : stop])
            self._position = stop
            if scanner.done:
                return
            if scanner.broken or self._ended:
                raise Malformed if scanner.broken else Truncated
            yield

    def _arguments(self, name: str | None) -> Steps[str | None]:
        """Write the arguments of a call, or return them if its name is not known yet. Raises Malformed."""
        scanner = JsonScanner()
        pieces: list[str] = []

        def tell(piece: str) -> None:
            if self._writes_arguments:
                self._write_arguments(piece)
                return
            pieces.append(piece)
            self._held.append(piece)
            if name is not None and scanner.has_member:
                self._announce(name)
                self._write_arguments("".join(pieces))
                self._writes_arguments = True

        yield from self._scan(scanner, tell)
        self._writes_arguments = False
        return None if name is not None else "".join(pieces)

    def _call(self, known: Collection[str] | None = None, needs_arguments: bool = False) -> Steps[None]:
        """Read a call that is a JSON object with a name and arguments. Raises Malformed."""
        name = arguments = None
        is_announced = False
        separator = "{"
        yield from self._expect("{")
        while (character := (yield from self._next())) != "}":
            if separator == ",":
                yield from self._expect(",")
                character = yield from self._next()
            separator = ","
            key = json.loads((yield from self._value())) if character == '"' else None
            if key is None or not (is_announced or key in _KEYS):
                raise Malformed if character else Truncated
            yield from self._expect(":")
            character = yield from self._next()
            if is_announced or key not in ("name", *_ARGUMENTS):
                yield from self._value()
            elif key == "name":
                name = _parse_name((yield from self._value()), known)
            elif character == "{":
                arguments = yield from self._arguments(name)
                is_announced = name is not None
            else:
                arguments = _parse_arguments((yield from self._value()))
            if not is_announced and name is not None and arguments is not None:
                self._announce(name)
                self._write_arguments(arguments)
                is_announced = True
        self._hold(1)
        if not is_announced:
            if name is None or needs_arguments:
                raise Malformed
            self._announce(name)
            self._write_arguments("{}")
        self._end_call()

    def _calls_in_list(self) -> Steps[None]:
        """Read a JSON list of calls. Raises Malformed."""
        yield from self._expect("[")
        yield from self._call()
        while (yield from self._next()) == ",":
            self._hold(1)
            yield from self._call()
        yield from self._expect("]")

    def _try(self, steps: Steps[None], end: str | None = None) -> Steps[bool]:
        """Read calls; return whether there were any. What is malformed becomes content, or arguments up to `end`."""
        before = self.num_calls
        try:
            yield from steps
        except Malformed as error:
            if self._writes_arguments:
                yield from self._until(end, self._write_arguments)
                self._writes_arguments = False
            elif isinstance(error, Truncated) and self._in_call:  # it lacks no more than its last brackets
                self._position = len(self._text)
                self._held.clear()
            self._in_call = False
            self._release()
            return self.num_calls > before
        self._held.clear()
        return True


def _parse_name(text: str, known: Collection[str] | None) -> str:
    name = _decode(text)
    if not name or not name.isprintable() or (known is not None and name not in known):
        raise Malformed
    return name


def _parse_arguments(text: str) -> str:
    """Return arguments that are no JSON object: JSON in a string, as some models write it, or null for none."""
    if text == "null":
        return "{}"
    arguments = _decode(text) or ""
    scanner = JsonScanner()
    if not arguments.startswith("{") or scanner.scan(arguments, 0) < len(arguments) or not scanner.done:
        raise Malformed
    return arguments


def _decode(text: str) -> str | None:
    """Return what a JSON string says; None for another value, and for half of a surrogate pair, which is no text."""
    if not text.startswith('"'):
        return None
    decoded = str(json.loads(text))
    return None if any("\ud800" <= character <= "\udfff" for character in decoded) else decoded
