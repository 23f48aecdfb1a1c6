"""The one door to data sets: `load_dataset(path)` reads every form that `formats` knows.

It returns samples in one form, which is CacheBlend's and that of this project's `make_datasets`: `ctxs`, `question`,
`answers` and, where the file has them, `id`, the question's `kind` and `gold` (indices of the passages that hold the
answer). Files of that form are returned as they are, with fields of their own. `normalize_sample` returns a typed view
of a sample.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_blend.pipeline.files import is_json_lines, read_json, read_json_lines
from vllm_blend.pipeline.formats import Format, Record, find_format, kind_of, make_record

logger = logging.getLogger(__name__)

_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
Entries = list[tuple[str, Any]]  # the entries of a file, each with the place that errors name
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


@dataclass(frozen=True)
class DataSet:
    """The samples of a file, as `load_dataset` returns them. `num_unanswerable` questions are left out, as they have no
    answer to compare with."""

    format: str
    samples: list[dict[str, Any]]
    num_unanswerable: int


def load_dataset(path: str | Path, entries: Entries | None = None) -> list[dict[str, Any]]:
    """Return the samples of a data set, or of a stage's output that wraps them as {"results": [...]}, in file order.
    `entries` are those of the file, if they have been read.

    The file is JSON or has JSON in every line. A warning says how many questions are left out because they have no
    answer. Raises FileNotFoundError, or ValueError that names the place, the field and the fix.
    """
    found = read_dataset(path, entries)
    if found.num_unanswerable:
        logger.warning(
            "%s: %d of %d questions are left out, as the file says that they have no answer",
            path,
            found.num_unanswerable,
            found.num_unanswerable + len(found.samples),
        )
    return found.samples


def read_dataset(path: str | Path, entries: Entries | None = None) -> DataSet:
    """Return what `load_dataset` reads, with the name of the file's format and what was left out."""
    places = read_entries(path) if entries is None else entries
    try:
        records = [make_record(raw, where) for where, raw in places]
        form = find_format(records[0])
        read = _read(form, records)
        found = [(where, sample) for where, sample in read if sample is not None]
        if not found:
            raise ValueError("no question has an answer: give another file")
        _check_samples(found)
    except ValueError as error:
        raise ValueError(f"data set {path}: {error}") from error
    return DataSet(form.name, [_with_ctxs(sample) for _, sample in found], len(read) - len(found))


def _read(form: Format, records: Sequence[Record]) -> list[tuple[str, dict[str, Any] | None]]:
    """Return the samples of records of one format, which errors name."""
    try:
        return list(form.read(records))
    except ValueError as error:
        raise ValueError(f"{error} (the file is read as {form.name}, as its first sample has {form.fields})") from error


def read_entries(path: str | Path) -> Entries:
    """Return the entries of a file, each with the place that errors name. Raises FileNotFoundError, or ValueError if
    there are none."""
    if is_json_lines(path):
        numbered = read_json_lines(path, "data set")
        places = [(f"line {number}: sample {index}", raw) for index, (number, raw) in enumerate(numbered)]
    else:
        data = read_json(path, "data set")
        name = next((name for name in ("results", "data") if isinstance(data, dict) and name in data), None)
        entries = data if name is None else data[name]
        label = "data[{}]" if name == "data" else "sample {}"
        places = [(label.format(i), raw) for i, raw in enumerate(entries)] if isinstance(entries, list) else []
    if not places:
        raise ValueError(
            f"data set {path}: expected a non-empty JSON list of samples, JSON in every line, or an object with such a "
            'list under "data" (SQuAD) or "results" (a stage of the pipeline)'
        )
    return places


def _with_ctxs(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a checked sample with its passages as `ctxs`, which is what the stages read."""
    if "ctxs" in raw:
        return raw
    passages = [{"title": "", "text": p} if isinstance(p, str) else p for p in raw["passages"]]
    return {"ctxs": passages, **{key: value for key, value in raw.items() if key != "passages"}}


def _check_samples(found: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Raise ValueError for a sample that no stage could use, and for an id that two samples have."""
    seen: dict[str, str] = {}
    for index, (where, raw) in enumerate(found):
        sample = normalize_sample(raw, index, where=where)
        first = seen.setdefault(sample.sample_id, where)
        if first != where:
            raise ValueError(
                f"{where}: id {sample.sample_id!r} is also the id of {first}; make ids unique or leave them out"
            )


def normalize_sample(raw: Any, index: int = 0, page_id_key: str = "page_id", where: str | None = None) -> Sample:
    """Return the typed view of sample `index` of a file. Its passages are in `ctxs` or, without that field, in
    `passages`, where a string is a passage without a title.

    Raises ValueError that names the sample (`where`, if that is given), the field and the fix.
    """

    def bad(field: str, problem: str) -> ValueError:
        return ValueError(f"{f'sample {index}' if where is None else where}: {field} {problem}")

    if not isinstance(raw, dict):
        raise bad("the sample", f"must be an object with ctxs, question and answers, not {kind_of(raw)}")
    source = "passages" if "passages" in raw and "ctxs" not in raw else "ctxs"
    for field in (source, "question", "answers"):
        if field not in raw:
            raise bad(field, f"is missing; the sample has {', '.join(map(repr, raw)) or 'no fields'}")
    question = raw["question"]
    if not isinstance(question, str) or not question.strip():
        raise bad("question", f"must be a non-empty string, not {kind_of(question)}")
    _check_characters(question, "question", bad)
    if not isinstance(raw[source], list) or not raw[source]:
        raise bad(source, f"must be a non-empty list of {{title, text}}, not {kind_of(raw[source])}")
    passages = []
    for i, ctx in enumerate(raw[source]):
        field = f"{source}[{i}]"
        if source == "passages" and isinstance(ctx, str):
            ctx = {"text": ctx}
        if not isinstance(ctx, dict):
            texts = "a string, or " if source == "passages" else ""
            raise bad(field, f"must be {texts}an object with title and text, not {kind_of(ctx)}")
        title, text, page = ctx.get("title", ""), ctx.get("text"), ctx.get(page_id_key)
        if not isinstance(text, str) or not text.strip():
            raise bad(f"{field}.text", f"must be a non-empty string, not {kind_of(text)}; fill it or drop the passage")
        if not isinstance(title, str):
            raise bad(f"{field}.title", f'must be a string, not {kind_of(title)}; use "" for none')
        _check_characters(title + text, field, bad)
        if page is not None and not isinstance(page, (str, int)):
            raise bad(f"{field}.{page_id_key}", f"must be a string or an integer, not {kind_of(page)}")
        passages.append(SamplePassage(title, text, None if page is None else str(page)))
    answers = tuple(flatten_answers(raw["answers"], bad))
    if not answers:
        raise bad("answers", "must hold at least one answer")
    kind, gold = raw.get("kind"), raw.get("gold")
    if kind is not None and not isinstance(kind, str):
        raise bad("kind", f"must be a string, not {kind_of(kind)}; leave it out if unknown")
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
        problem = f"must be a string or a (nested) list of strings, not {kind_of(answers)}"
        raise bad("answers", problem) if bad else ValueError(f"answers {problem}")


def _check_characters(text: str, field: str, bad: _Complaint) -> None:
    """Raise ValueError for text that no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad(field, f"holds half of a surrogate pair, which is not a character ({error}); remove it") from error


def _sample_id(value: Any, index: int, bad: _Complaint) -> str:
    if value is None:
        return f"sample{index}"
    if isinstance(value, (str, int)) and _SAFE_ID.fullmatch(str(value)):
        return str(value)
    raise bad("id", f"must name a folder (letters, digits, '.', '_' and '-'), not {value!r}; or leave it out")


def _is_index(value: Any, size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < size
