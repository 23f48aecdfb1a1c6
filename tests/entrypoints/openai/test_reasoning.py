"""Reasoning, split from the content behind it."""

from __future__ import annotations

import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.entrypoints.openai.servers import TestServer, serving
from tests.waiting import DEADLINE
from vllm_blend.entrypoints.openai.reasoning import (
    ReasoningParser,
    count_reasoning,
    detect_reasoning_parser,
    opens_reasoning,
)
from vllm_blend.entrypoints.openai.tool_calls.deltas import join_deltas

THOUGHT = "Act. Observation: no."
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


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("answer", "reasoning", "content", "stop_reason"),
    [
        (f"<think>\n{THOUGHT}\n</think>\n\nFour. Observation: yes", THOUGHT, "Four. ", "Observation:"),
        (f"<think>\n{THOUGHT}\n</think>\n\nFour.", THOUGHT, "Four.", None),
        ("Four. Observation: yes", None, "Four. ", "Observation:"),
    ],
)
def test_stop_strings_end_no_reasoning(
    server: TestServer, answer: str, reasoning: str | None, content: str, stop_reason: str | None
) -> None:
    """vllm-project/vllm#14399: an agent's "Observation:" in a thought ended the answer before it began."""
    body = {
        "messages": [{"role": "user", "content": "2 + 2?"}],
        "structured_outputs": {"choice": [answer]},
        "stop": ["Observation:", "zebra"],
        "max_tokens": 100,
    }
    with serving(server.engine, reasoning_parser="qwen3") as url:
        path = f"{url}/v1/chat/completions"
        whole = httpx.post(path, json=body, timeout=DEADLINE).json()["choices"][0]
        text = httpx.post(path, json=body | {"stream": True}, timeout=DEADLINE).text
    assert whole["message"].get("reasoning") == reasoning
    assert (whole["message"]["content"], whole["stop_reason"]) == (content, stop_reason)
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line][:-1]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("content") or "" for delta in deltas) == content
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == (reasoning or "")
