"""HotpotQA (Yang et al., EMNLP 2018) and 2WikiMultihopQA (Ho et al., COLING 2020): paragraphs as lists of sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from vllm_blend.pipeline.formats.base import Record, SampleFormat, make_sample

PAIR = "[title, [sentence, ...]]"


@dataclass(frozen=True)
class HotpotQA(SampleFormat):
    """`context` is [[title, [sentence, ...]], ...] in the official files, and {"title": [...], "sentences": [[...]]} in
    those of the Hugging Face Hub. `supporting_facts` name the gold paragraphs in the same two ways."""

    name: ClassVar[str] = "HotpotQA or 2WikiMultihopQA"
    fields: ClassVar[str] = "question, answer, and context as a list of [title, sentences]"

    def recognizes(self, fields: dict[str, Any]) -> bool:
        return "question" in fields and isinstance(fields.get("context"), (list, dict))

    def sample(self, record: Record) -> dict[str, Any]:
        passages = _paragraphs(record)
        gold_titles = _gold_titles(record)
        gold = [index for index, (title, _) in enumerate(passages) if title in gold_titles]
        question, answer = record.text("question"), record.text("answer")
        return make_sample(record.sample_id("_id", "id"), question, passages, [answer], record.fields.get("type"), gold)


def _paragraphs(record: Record) -> list[tuple[str, str]]:
    """Return the paragraphs with words, as titles and texts. Some files have paragraphs without a sentence."""
    context = record.get("context")
    if isinstance(context, dict):
        titles, sentences = (
            record.checked_items(context.get(name), f"context.{name}", "one entry a paragraph")
            for name in ("title", "sentences")
        )
        if len(titles) != len(sentences):
            raise record.bad("context", f"has {len(titles)} titles for {len(sentences)} lists of sentences")
        context = [list(pair) for pair in zip(titles, sentences, strict=True)]
    paragraphs = []
    for index, pair in enumerate(record.checked_items(context, "context", PAIR)):
        field = f"context[{index}]"
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[1], list):
            raise record.bad(field, f"must be {PAIR}, not {str(pair)[:60]!r}")
        title = record.checked_text(pair[0], f"{field}[0], the title,")
        if any(not isinstance(sentence, str) for sentence in pair[1]):
            raise record.bad(f"{field}[1]", "must hold sentences, which are strings; drop what is not")
        text = " ".join(sentence.strip() for sentence in pair[1] if sentence.strip())
        if text:
            paragraphs.append((title, text))
    if not paragraphs:
        raise record.bad("context", "has no paragraph with a sentence; drop the sample")
    return paragraphs


def _gold_titles(record: Record) -> set[str]:
    facts = record.fields.get("supporting_facts") or []
    if isinstance(facts, dict):
        titles = facts.get("title")
    else:
        pairs = facts if isinstance(facts, list) else [None]
        titles = [pair[0] if isinstance(pair, list) and pair else None for pair in pairs]
    if not isinstance(titles, list) or any(not isinstance(title, str) for title in titles):
        raise record.bad("supporting_facts", "must be a list of [title, sentence number]; leave it out if unknown")
    return set(titles)
