"""Tokens go to the block of an answer in which their text is, as it comes, however it is cut into pieces."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from vllm_blend.entrypoints.openai.block_logprobs import BlockLogprobs
from vllm_blend.entrypoints.openai.blocks import BlockReader
from vllm_blend.entrypoints.openai.output_parser import check_output_parsers
from vllm_blend.entrypoints.openai.protocol.chat import TokenLogprob
from vllm_blend.entrypoints.openai.tool_calls.tool_choice import ToolChoice, parse_tool_choice, parse_tools

TOOLS: Any = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "find", "arguments": {"a": "n"}}\n</tool_call>'
ANSWERS = (  # as their parts, in which no token is of two
    ["I see, 5 < 6."],
    ["<think>", "n, think", "</think>", "\n\n", "n and <b> é, \U0001f600."],
    ["no", CALL],
    ["<think>", "k", "</think>", "<<", CALL, CALL],
    ["Once < twice ", CALL, "n"],
)


def choice() -> ToolChoice:
    return parse_tool_choice("auto", parse_tools(TOOLS), None)


@given(st.sampled_from(ANSWERS), st.data())
def test_tokens_join_to_the_text_of_their_blocks(parts: list[str], data: st.DataObject) -> None:
    texts: list[str] = []
    for part in parts:
        cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(part) - 1)), max_size=8)))
        texts += [part[a:b] for a, b in zip([0, *cuts], [*cuts, len(part)], strict=True) if part[a:b]]
    tokens = [TokenLogprob(token=text, logprob=-1.0, bytes=[*text.encode()], top_logprobs=[]) for text in texts]
    answer = "".join(parts)
    reader = BlockReader(check_output_parsers(choice(), "hermes", "qwen3").make(None))
    logprobs = BlockLogprobs()
    by_step: dict[int, list[dict[str, Any]]] = {}
    read = there = 0
    while tokens:
        count = data.draw(st.integers(1, 3))
        new, tokens = tokens[:count], tokens[count:]
        logprobs.add(new)
        there += sum(len(token.token) for token in new)
        # The text may lag behind the tokens, while it may end with a stop string.
        until = max(read, there - data.draw(st.integers(0, 2))) if tokens else there
        for step, block, more in logprobs.steps(reader, answer[read:until], not tokens):
            assert step == "more" or not logprobs.new
            if step == "more":
                by_step.setdefault(block.index, []).extend(logprobs.new)
                assert more
        read = until
    for block in reader.blocks:
        own = logprobs.of(block)
        assert own == by_step.get(block.index, [])
        joined = "".join(each["token"] for each in own)
        assert joined.strip() == (block.text.strip() if block.kind == "text" else "")


def test_tokens_of_one_character_come_with_it() -> None:
    """The first ones have no text, and belong where the character is. What a text leaves out belongs nowhere."""
    smile = "\U0001f600".encode()
    parts = [("a", b"a"), *(("", bytes([byte])) for byte in smile[:3]), (smile.decode(), smile[3:]), ("", b"")]
    tokens = [TokenLogprob(token=text, logprob=-1.0, bytes=[*own], top_logprobs=[]) for text, own in parts]
    reader, logprobs = BlockReader(check_output_parsers(choice(), "hermes", None).make(None)), BlockLogprobs()
    found = []
    for token in tokens:
        logprobs.add([token])
        for step, _, text in logprobs.steps(reader, token.token, token is tokens[-1]):
            if step == "more":
                found.append((text, [bytes(each["bytes"]) for each in logprobs.new]))
    assert found == [("a", [b"a"]), (smile.decode(), [bytes([byte]) for byte in smile])]
