"""Data sets in the format of the CacheBlend repository: a JSON list of samples with `ctxs`, `question` and `answers`.

`load_dataset(path)` returns the samples as they are in the file, checked; `normalize_sample` returns a typed view of
one. The files published with CacheBlend (MuSiQue, 2WikiMultihopQA, SAMSum) and this project's (`make_datasets`) both
load. The latter add `id`, the question's `kind`, `gold` (indices of the passages that hold the answer) and each
passage's `page_id`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_blend.pipeline.files import is_json_lines, read_json, read_json_lines

_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_Complaint = Callable[[str, str], ValueError]  # (field, problem) -> the error to raise


@dataclass(frozen=True)
class SamplePassage:
    """A passage of a sample. `page_id` is None if the file does not say which page it comes from."""

    title: str
    text: str
    page_id: str | None

    @property
    def searchable(self) -> str:
        """Return what a retriever indexes: title and text on one line."""
        return " ".join(f"{self.title} {self.text}".split())


@dataclass(frozen=True)
class Sample:
    """A typed view of one sample. `answers` is flat; `kind` and `gold` are None if the file does not have them."""

    sample_id: str
    question: str
    passages: tuple[SamplePassage, ...]
    answers: tuple[str, ...]
    kind: str | None
    gold: tuple[int, ...] | None

    def chunk_id(self, passage: int) -> str:
        """Return the name of a passage's folder in a KV cache directory."""
        return f"{self.sample_id}_chunk{passage}"


def load_dataset(path: str | Path) -> list[dict[str, Any]]:
    """Return the samples of a data set, or of a stage's output that wraps them as {"results": [...]}, in file order.

    A file that ends in .jsonl has one sample a line. A sample's `passages` are returned as `ctxs`, the rest as it is in
    the file. Raises FileNotFoundError, or ValueError that names the sample (and its line), the field and the fix.
    """
    lines: list[int] | None = None
    if is_json_lines(path):
        numbered = read_json_lines(path, "data set")
        lines, data = [number for number, _ in numbered], [raw for _, raw in numbered]
    else:
        data = read_json(path, "data set")
    if isinstance(data, dict):
        data = data.get("results")
    if not isinstance(data, list) or not data:
        raise ValueError(
            f'data set {path}: expected a non-empty JSON list of samples, or an object with such a list under "results"'
        )
    seen: dict[str, int] = {}
    for index, raw in enumerate(data):
        where = f"data set {path}" if lines is None else f"data set {path}: line {lines[index]}"
        try:
            sample = normalize_sample(raw, index)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        first = seen.setdefault(sample.sample_id, index)
        if first != index:
            raise ValueError(
                f"{where}: sample {index}: id {sample.sample_id!r} is also the id of sample {first}; "
                "make ids unique or leave them out"
            )
    return [_with_ctxs(raw) for raw in data]


def _with_ctxs(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a checked sample with its passages as `ctxs`, which is what the stages read."""
    if "ctxs" in raw:
        return raw
    passages = [{"title": "", "text": p} if isinstance(p, str) else p for p in raw["passages"]]
    return {"ctxs": passages, **{key: value for key, value in raw.items() if key != "passages"}}


def normalize_sample(raw: Any, index: int = 0, page_id_key: str = "page_id") -> Sample:
    """Return the typed view of sample `index` of a file. Its passages are in `ctxs` or, without that field, in
    `passages`, where a string is a passage without a title.

    Raises ValueError that names the sample, the field and the fix.
    """

    def bad(field: str, problem: str) -> ValueError:
        return ValueError(f"sample {index}: {field} {problem}")

    if not isinstance(raw, dict):
        raise bad("the sample", f"must be an object with ctxs, question and answers, not {_kind_of(raw)}")
    source = "passages" if "passages" in raw and "ctxs" not in raw else "ctxs"
    for field in (source, "question", "answers"):
        if field not in raw:
            raise bad(field, f"is missing; the sample has {', '.join(map(repr, raw)) or 'no fields'}")
    question = raw["question"]
    if not isinstance(question, str) or not question.strip():
        raise bad("question", f"must be a non-empty string, not {_kind_of(question)}")
    if not isinstance(raw[source], list) or not raw[source]:
        raise bad(source, f"must be a non-empty list of {{title, text}}, not {_kind_of(raw[source])}")
    passages = []
    for i, ctx in enumerate(raw[source]):
        field = f"{source}[{i}]"
        if source == "passages" and isinstance(ctx, str):
            ctx = {"text": ctx}
        if not isinstance(ctx, dict):
            texts = "a string, or " if source == "passages" else ""
            raise bad(field, f"must be {texts}an object with title and text, not {_kind_of(ctx)}")
        title, text, page = ctx.get("title", ""), ctx.get("text"), ctx.get(page_id_key)
        if not isinstance(text, str) or not text.strip():
            raise bad(f"{field}.text", f"must be a non-empty string, not {_kind_of(text)}; fill it or drop the passage")
        if not isinstance(title, str):
            raise bad(f"{field}.title", f'must be a string, not {_kind_of(title)}; use "" for none')
        if page is not None and not isinstance(page, (str, int)):
            raise bad(f"{field}.{page_id_key}", f"must be a string or an integer, not {_kind_of(page)}")
        passages.append(SamplePassage(title, text, None if page is None else str(page)))
    answers = tuple(flatten_answers(raw["answers"], bad))
    if not answers:
        raise bad("answers", "must hold at least one answer")
    kind, gold = raw.get("kind"), raw.get("gold")
    if kind is not None and not isinstance(kind, str):
        raise bad("kind", f"must be a string, not {_kind_of(kind)}; leave it out if unknown")
    if gold is not None and not (isinstance(gold, list) and all(_is_index(g, len(passages)) for g in gold)):
        raise bad(
            "gold", f"must be a list of indices into {source} (0 to {len(passages) - 1}); leave it out if unknown"
        )
    return Sample(
        sample_id=_sample_id(raw.get("id"), index, bad),
        question=question,
        passages=tuple(passages),
        answers=answers,
        kind=kind,
        gold=None if gold is None else tuple(gold),
    )


def flatten_answers(answers: Any, bad: _Complaint | None = None) -> Iterable[str]:
    """Yield the strings of a flat or nested list of answers, or of one answer, in order. Raises ValueError for anything
    else."""
    if isinstance(answers, str):
        yield answers
    elif isinstance(answers, list):
        for answer in answers:
            yield from flatten_answers(answer, bad)
    else:
        problem = f"must be a string or a (nested) list of strings, not {_kind_of(answers)}"
        raise bad("answers", problem) if bad else ValueError(f"answers {problem}")


def _sample_id(value: Any, index: int, bad: _Complaint) -> str:
    if value is None:
        return f"sample{index}"
    if isinstance(value, (str, int)) and _SAFE_ID.fullmatch(str(value)):
        return str(value)
    raise bad("id", f"must name a folder (letters, digits, '.', '_' and '-'), not {value!r}; or leave it out")


def _is_index(value: Any, size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < size


def _kind_of(value: Any) -> str:
    if value is None:
        return "null or missing"
    return "empty" if value in ("", [], {}) or (isinstance(value, str) and not value.strip()) else type(value).__name__
