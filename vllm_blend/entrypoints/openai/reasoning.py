"""Reasoning in the text of an answer: `<think>...</think>`, split from the content behind it, in pieces too."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from vllm_blend.entrypoints.openai.tool_calls.deltas import MessageDelta
from vllm_blend.entrypoints.openai.tool_calls.text_reader import Steps, TextReader

_BEGIN, _END = "<think>", "</think>"


class ReasoningParser(TextReader):
    """Splits what stands between `<think>` and `</think>` at the beginning of a text from what follows.

    `is_open` says that the prompt ends with `<think>`, as it does for templates that write it themselves. Reasoning
    that the text does not end has no content behind it. White space beside the marks belongs to them and is dropped.
    """

    def __init__(self, is_open: bool = False) -> None:
        super().__init__()
        self._is_open = is_open
        self._reasoning: list[str] = []
        self._content: list[str] = []

    def _run(self) -> Steps[None]:
        yield from self._next()
        if not (yield from self._accept(_BEGIN)) and not self._is_open:
            self._content += self._held
            yield from self._until(None, self._content.append)
            return
        yield from self._next()
        self._held.clear()
        is_closed = yield from self._until(_END, self._think)
        if not is_closed:
            self._reasoning += self._held
            return
        self._hold(len(_END))
        yield from self._next()
        self._held.clear()
        yield from self._until(None, self._content.append)

    def _think(self, text: str) -> None:
        """Tell reasoning, but hold back white space at its end: the closing mark may follow."""
        reasoning = text.rstrip()
        if reasoning:
            self._reasoning += [*self._held, reasoning]
            self._held.clear()
        self._held.append(text[len(reasoning) :])

    def _take_delta(self) -> MessageDelta:
        delta = MessageDelta("".join(self._content), reasoning="".join(self._reasoning))
        self._content.clear()
        self._reasoning.clear()
        return delta


# The parsers that `--reasoning-parser` may name, under vLLM's names: these models write the same marks.
REASONING_PARSERS: dict[str, type[ReasoningParser]] = {"deepseek_r1": ReasoningParser, "qwen3": ReasoningParser}


def detect_reasoning_parser(chat_template: str | None) -> str | None:
    """Return the name of the parser for the reasoning that a chat template writes, and None if it writes none."""
    return "qwen3" if chat_template is not None and _END in chat_template else None


def opens_reasoning(prompt: str | None) -> bool:
    """Return whether a prompt ends with `<think>`, so that the answer begins within the reasoning."""
    return prompt is not None and prompt[-100:].rstrip().endswith(_BEGIN)


def reasoning_marks(prompt: str | None) -> tuple[str, str]:
    """Return what opens and closes the reasoning of an answer to a prompt, as `SamplingParams` has it."""
    return ("" if opens_reasoning(prompt) else _BEGIN, _END)


def count_reasoning(tokens: Sequence[str]) -> int:
    """Return how many tokens of an answer that reasons belong to its reasoning: those up to the closing mark, with it,
    or all. `tokens` are as the vocabulary writes them, in which the mark is as it is in texts."""
    at = "".join(tokens).find(_END)
    ends = list(accumulate(map(len, tokens)))
    return len(tokens) if at < 0 else bisect_left(ends, at + len(_END)) + 1
