"""MuSiQue (Trivedi et al., TACL 2022): twenty paragraphs a question, of which two to four hold the answer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm_blend.pipeline.formats.base import Record, SampleFormat, make_sample

_HOPS = re.compile(r"([2-9]hop\d?)__")  # ids begin with the number of hops


@dataclass(frozen=True)
class MuSiQue(SampleFormat):
    """`paragraphs` have title, paragraph_text and is_supporting. A question that is not `answerable` has no answer."""

    name: ClassVar[str] = "MuSiQue"
    fields: ClassVar[str] = "question, answer, and paragraphs with paragraph_text"

    def recognizes(self, fields: dict[str, Any]) -> bool:
        return "paragraphs" in fields and "question" in fields

    def sample(self, record: Record) -> dict[str, Any] | None:
        question = record.text("question")
        passages: list[tuple[str, str]] = []
        gold: list[int] = []
        for index, value in enumerate(record.items("paragraphs", "{title, paragraph_text}")):
            field = f"paragraphs[{index}]"
            paragraph = record.checked_object(value, field, "title and paragraph_text")
            title = paragraph.get("title") or ""
            if not isinstance(title, str):
                raise record.bad(f"{field}.title", f'must be a string, not {type(title).__name__}; use "" for none')
            text = record.checked_text(paragraph.get("paragraph_text"), f"{field}.paragraph_text")
            if paragraph.get("is_supporting"):
                gold.append(index)
            passages.append((title, text.strip()))
        if record.fields.get("answerable", True) is False:
            return None
        aliases = record.fields.get("answer_aliases") or []
        if not isinstance(aliases, list) or any(not isinstance(alias, str) for alias in aliases):
            raise record.bad("answer_aliases", "must be a list of strings; leave it out if there are none")
        answers = [record.text("answer"), *(alias for alias in aliases if alias.strip())]
        sample_id = record.sample_id("id", "_id")
        hops = _HOPS.match(sample_id or "")
        return make_sample(sample_id, question, passages, answers, hops and hops[1], gold)
