"""SQuAD (Rajpurkar et al., EMNLP 2016) and what has its form, such as XQuAD: one paragraph a question.

A prompt of one passage has nothing to blend, so others are put beside it: up to four of the same article, then some of
others, ten in all, shuffled by a seed that the question's id gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from vllm_blend.pipeline.formats.base import Format, Record, make_sample, safe_id

PASSAGES = 10
SAME_ARTICLE = 4  # at most, besides the paragraph that is asked about


@dataclass(frozen=True)
class _Question:
    where: str
    id: str | None
    text: str
    answers: tuple[str, ...]  # none if it has no answer


@dataclass(frozen=True)
class _Paragraph:
    article: int
    text: str
    questions: tuple[_Question, ...]


@dataclass(frozen=True)
class SQuAD(Format):
    """`data` is a list of articles with `paragraphs`, each a `context` with its `qas`. Files of the Hugging Face Hub
    have a record for each question instead: title, context, question, and answers as {"text": [...]}."""

    name: ClassVar[str] = "SQuAD"
    fields: ClassVar[str] = "paragraphs with context and qas (or question, context and answers.text)"

    def recognizes(self, fields: dict[str, Any]) -> bool:
        nested = "paragraphs" in fields and "question" not in fields
        return nested or ("question" in fields and isinstance(fields.get("context"), str))

    def read(self, records: Sequence[Record]) -> Iterator[tuple[str, dict[str, Any] | None]]:
        is_nested = "paragraphs" in records[0].fields
        paragraphs = list(_nested(records) if is_nested else _flat(records))
        for index, paragraph in enumerate(paragraphs):
            for question in paragraph.questions:
                yield question.where, _sample(paragraphs, index, question) if question.answers else None


def _sample(paragraphs: Sequence[_Paragraph], index: int, question: _Question) -> dict[str, Any]:
    """Return the sample of a question about paragraph `index`."""
    rng = Random(question.id or question.text)
    article = paragraphs[index].article
    numbers = range(len(paragraphs))
    same = [number for number in numbers if number != index and paragraphs[number].article == article][:SAME_ARTICLE]
    others = [number for number in numbers if paragraphs[number].article != article]
    wanted = PASSAGES - 1 - len(same)
    chosen = [index, *same, *rng.sample(others, min(wanted, len(others)))]
    rng.shuffle(chosen)
    texts = [("", paragraphs[number].text) for number in chosen]
    return make_sample(question.id, question.text, texts, question.answers, gold=[chosen.index(index)])


def _nested(records: Sequence[Record]) -> Iterator[_Paragraph]:
    for article, record in enumerate(records):
        for number, value in enumerate(record.items("paragraphs", "{context, qas}")):
            field = f"paragraphs[{number}]"
            paragraph = record.checked_object(value, field, "context and qas")
            text = record.checked_text(paragraph.get("context"), f"{field}.context")
            questions = paragraph.get("qas")
            if not isinstance(questions, list):
                raise record.bad(f"{field}.qas", "must be a list of questions; [] for none")
            asked = tuple(_question(record, qa, f"{field}.qas[{i}]") for i, qa in enumerate(questions))
            yield _Paragraph(article, text.strip(), asked)


def _question(record: Record, value: Any, field: str) -> _Question:
    qa = record.checked_object(value, field, "question and answers")
    text = record.checked_text(qa.get("question"), f"{field}.question")
    answers = qa.get("answers")
    if not isinstance(answers, list) or any(not isinstance(answer, dict) for answer in answers):
        raise record.bad(f"{field}.answers", "must be a list of {text, answer_start}; [] if there is none")
    texts = tuple(
        record.checked_text(answer.get("text"), f"{field}.answers[{i}].text") for i, answer in enumerate(answers)
    )
    sample_id = None if qa.get("id") is None else safe_id(qa["id"])
    return _Question(f"{record.where}: {field}", sample_id, text, () if qa.get("is_impossible") else texts)


def _flat(records: Sequence[Record]) -> Iterator[_Paragraph]:
    """Put the records of one paragraph together, and number the articles by their titles."""
    articles: dict[str, int] = {}
    asked: dict[tuple[int, str], list[_Question]] = {}
    for record in records:
        title = record.fields.get("title") or ""
        if not isinstance(title, str):
            raise record.bad("title", f'must be a string, not {type(title).__name__}; use "" for none')
        answers = record.fields.get("answers")
        texts = answers.get("text") if isinstance(answers, dict) else None
        if not isinstance(texts, list) or any(not isinstance(text, str) for text in texts):
            raise record.bad("answers", 'must be {"text": [...]}, with an empty list if there is none')
        question = _Question(record.where, record.sample_id("id"), record.text("question"), tuple(texts))
        article = articles.setdefault(title, len(articles))
        asked.setdefault((article, record.text("context").strip()), []).append(question)
    for (article, text), questions in asked.items():
        yield _Paragraph(article, text, tuple(questions))
