"""Reading long streams takes work in proportion to their length."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, SupportsIndex

import pytest

from vllm_blend.entrypoints.openai.reasoning import ReasoningParser
from vllm_blend.entrypoints.openai.tool_calls import TOOL_PARSERS
from vllm_blend.entrypoints.openai.tool_calls.text_reader import TextReader

UNITS = {
    "hermes": [
        "word ",
        " ",
        "<tool_call>",
        "<tool_call",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n',
        '<tool_call>{"name": "f", "arguments": {"a": "\\u00e9',
        '<tool_call>{"arguments": {"a": [',
    ],
    "llama3_json": ['{"name": "f", "parameters": {}};', ";", '{"id": 1', "<|python_tag|>"],
    "mistral": [
        "[TOOL_CALLS]",
        "[TOOL_CALLS]f[ARGS]{}",
        "[TOOL_CALLS]f",
        '[TOOL_CALLS][{"name": "f", "arguments": {}},',
    ],
    "reasoning": ["<think> ", "a ", "</think"],
}
CASES = [(name, unit) for name, units in UNITS.items() for unit in units]


class CountedText(str):
    """A text that counts the characters that are copied out of it or searched."""

    handled = 0

    def __radd__(self, before: str) -> CountedText:
        return CountedText(before + str(self))

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        piece = super().__getitem__(key)
        CountedText.handled += len(piece)
        return piece

    def find(self, sub: str, start: Any = 0, end: Any = None) -> int:
        found = super().find(sub, start)
        CountedText.handled += (found if found >= 0 else len(self)) - start
        return found


def make_reader(name: str) -> TextReader:
    return ReasoningParser(is_open=True) if name == "reasoning" else TOOL_PARSERS[name](["f"])


def count_calls(name: str, pieces: Iterable[str]) -> int:
    """Return how many functions are called, Python's and others, to read a text."""
    reader = make_reader(name)
    count = 0

    def on_event(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        for piece in pieces:
            reader.feed(piece)
            assert len(reader._text) < 1000  # nothing that was read is copied again
        reader.finish()
    finally:
        sys.setprofile(before)
    return count


def repeat(unit: str, length: int) -> str:
    """Return a text of `unit` once and then the part of it that may go on for ever."""
    return (unit * (length // len(unit) + 1))[:length]


@pytest.mark.parametrize(("name", "unit"), CASES)
def test_a_stream_of_single_characters(name: str, unit: str) -> None:
    short, long = (count_calls(name, repeat(unit, length)) for length in (2_000, 4_000))
    assert long < 2.3 * short + 500


@pytest.mark.parametrize(("name", "unit"), CASES)
def test_one_long_text(name: str, unit: str) -> None:
    CountedText.handled = 0
    text = repeat(unit, 1 << 18)
    reader = make_reader(name)
    reader.feed(CountedText(text))
    reader.finish()
    assert CountedText.handled < 12 * len(text)


def test_long_arguments() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"text": "' + "x" * (1 << 18) + '"}}</tool_call>'
    pieces = [text[start : start + 64] for start in range(0, len(text), 64)]
    assert count_calls("hermes", pieces) < 100 * len(pieces)
