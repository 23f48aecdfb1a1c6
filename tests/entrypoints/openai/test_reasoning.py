"""Reasoning, split from the content behind it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_blend.entrypoints.openai.reasoning import (
    ReasoningParser,
    count_reasoning,
    detect_reasoning_parser,
    opens_reasoning,
)
from vllm_blend.entrypoints.openai.tool_calls.deltas import join_deltas

PARTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", " ", "\n\n", "a", "b c", "<"]), max_size=9
)


@pytest.mark.parametrize(
    ("is_open", "text", "reasoning", "content"),
    [
        (False, "<think>\nWhy? \n</think>\n\nSo.\n", "Why?", "So.\n"),
        (False, "\n<think>\n\n</think>\n\nSo.", None, "So."),
        (False, "<think>\nWhy, oh", "Why, oh", None),
        (False, "So.", None, "So."),
        (False, " \nSo <think> not </think>", None, " \nSo <think> not </think>"),
        (False, "", None, ""),
        (True, "Why?\n</think>\n\nSo. </think>", "Why?", "So. </think>"),
        (True, "<think>\nWhy?</think>So.", "Why?", "So."),
        (True, "Why, oh ", "Why, oh ", None),
        (True, "a < b </thin", "a < b </thin", None),
    ],
)
def test_texts(is_open: bool, text: str, reasoning: str | None, content: str | None) -> None:
    message = ReasoningParser(is_open).parse(text)
    assert (message.reasoning, message.content) == (reasoning, content)


@given(is_open=st.booleans(), parts=PARTS)
def test_pieces_say_what_the_whole_says(is_open: bool, parts: list[str]) -> None:
    text = "".join(parts)
    whole = ReasoningParser(is_open).parse(text)
    for pieces in (parts, list(text)):
        reader = ReasoningParser(is_open)
        assert join_deltas([*map(reader.feed, pieces), reader.finish()]) == whole


def test_both_names_of_the_field_are_written() -> None:
    delta = ReasoningParser(is_open=True).feed("Why?")
    assert delta.to_dict() == {"reasoning": "Why?", "reasoning_content": "Why?"}
    message = ReasoningParser(is_open=True).parse("Why?</think>So.").to_dict()
    assert message == {"content": "So.", "reasoning": "Why?", "reasoning_content": "Why?"}


def test_prompts_and_templates_that_reason() -> None:
    assert opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert not opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opens_reasoning("What does <think> mean?<|im_end|>\n<|im_start|>assistant\n")
    assert not opens_reasoning(None)
    assert detect_reasoning_parser("{% if '</think>' in content %}") == "qwen3"
    assert detect_reasoning_parser("{{ messages }}") is detect_reasoning_parser(None) is None


@pytest.mark.parametrize(
    ("tokens", "count"),
    [
        (["<think>", "Ċ", "Why", "?", "</think>", "So", "</think>"], 5),
        (["Why", "?", "<", "/th", "ink", ">ĊĊ", "So"], 6),  # a token that begins before the mark ends is of it
        (["<think>", "Why", "</th"], 3),
        (["Why?</think>So"], 1),
        ([], 0),
    ],
)
def test_tokens_of_reasoning_end_with_the_mark(tokens: list[str], count: int) -> None:
    assert count_reasoning(tokens) == count
