"""LongBench (Bai et al., ACL 2024): one long `context`, which is taken apart into passages again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm_blend.pipeline.formats.base import Record, SampleFormat, make_sample

_HEADING = re.compile(r"(?m)^[ \t]*Passage \d+:[ \t]*$")
_BLANK_LINE = re.compile(r"\n[ \t]*\n")
SHORTEST = 400  # characters of a passage of paragraphs: a heading stays with the text below it


@dataclass(frozen=True)
class LongBench(SampleFormat):
    """`context` holds passages after lines such as "Passage 3:", or it is one text, which is split at its paragraphs.
    `input` is the question. The lines are left out: with its number a passage would be another one in every place."""

    name: ClassVar[str] = "LongBench"
    fields: ClassVar[str] = "input, answers, and context as one text"

    def recognizes(self, fields: dict[str, Any]) -> bool:
        return "input" in fields and "context" in fields

    def sample(self, record: Record) -> dict[str, Any]:
        question = record.get("input")
        if not isinstance(question, str) or not question.strip():
            raise record.bad("input", "must be a question: give a data set that asks some, such as hotpotqa or qasper")
        answers = [
            record.checked_text(answer, f"answers[{index}]")
            for index, answer in enumerate(record.items("answers", "strings"))
        ]
        passages = split_context(record.text("context"))
        return make_sample(record.sample_id("_id", "id"), question, [("", text) for text in passages], answers)


def split_context(context: str) -> list[str]:
    """Return the passages of a context: those under its headings, else its paragraphs, short ones with the next."""
    before, *under = _HEADING.split(context)
    if under:
        return [text.strip() for text in (before, *under) if text.strip()]
    paragraphs = _BLANK_LINE.split(context)
    if len(paragraphs) == 1:
        paragraphs = context.split("\n")
    passages: list[str] = []
    for paragraph in (text.strip() for text in paragraphs if text.strip()):
        if passages and len(passages[-1]) < SHORTEST:
            passages[-1] += f"\n{paragraph}"
        else:
            passages.append(paragraph)
    return passages
