"""The base of all formats of data sets, and the records that they read: JSON objects that know where they stand."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Record:
    """A JSON value of a data set. `where` says which one it is: a line, an entry of a list, or both."""

    where: str
    fields: dict[str, Any]

    def bad(self, field: str, problem: str) -> ValueError:
        """Return the error for a field, to be raised. `problem` says what is wrong and what to do."""
        return ValueError(f"{self.where}: {field} {problem}")

    def get(self, field: str) -> Any:
        """Return what a field holds. Raises ValueError if the record does not have it."""
        if field not in self.fields:
            known = ", ".join(map(repr, self.fields)) or "no fields"
            raise self.bad(field, f"is missing; the sample has {known}")
        return self.fields[field]

    def text(self, field: str) -> str:
        """Return a text of the record. Raises ValueError unless it has words."""
        return self.checked_text(self.get(field), field)

    def checked_text(self, value: Any, field: str) -> str:
        """Return a value that stands in the record's `field` if it is text with words. Raises ValueError if not."""
        if not isinstance(value, str) or not value.strip():
            raise self.bad(field, f"must be a non-empty string, not {kind_of(value)}; fill it or drop the entry")
        return value

    def items(self, field: str, of: str) -> list[Any]:
        """Return a list of the record. Raises ValueError unless it has entries; `of` names them."""
        return self.checked_items(self.get(field), field, of)

    def checked_items(self, value: Any, field: str, of: str) -> list[Any]:
        """Return a value that stands in the record's `field` if it is a list with entries. Raises ValueError if not."""
        if not isinstance(value, list) or not value:
            raise self.bad(field, f"must be a non-empty list of {of}, not {kind_of(value)}")
        return value

    def checked_object(self, value: Any, field: str, of: str) -> dict[str, Any]:
        """Return a value that stands in the record's `field` if it is an object with the fields `of`."""
        if not isinstance(value, dict):
            raise self.bad(field, f"must be an object with {of}, not {kind_of(value)}")
        return value

    def sample_id(self, *names: str) -> str | None:
        """Return the record's id, from the first of these fields that it has, with `_` for what no file name may hold.
        None if it has none: samples are numbered then."""
        value = next((self.fields[name] for name in names if self.fields.get(name) is not None), None)
        return None if value is None else safe_id(value)


class Format(ABC):
    """A form in which data sets are published."""

    name: ClassVar[str]
    fields: ClassVar[str]  # what a record of it has, for error messages

    @abstractmethod
    def recognizes(self, fields: dict[str, Any]) -> bool:
        """Return whether a record with these fields is of this format. It may still turn out to be a broken one."""

    @abstractmethod
    def read(self, records: Sequence[Record]) -> Iterable[tuple[str, dict[str, Any] | None]]:
        """Yield a sample for each question, with the place that errors name: `ctxs`, `question`, `answers` and, where
        they are known, `id`, `kind` and `gold`. A question that has no answer is None.

        Raises ValueError that names the place, the field and the fix.
        """


class SampleFormat(Format):
    """A format with one question in each record."""

    def read(self, records: Sequence[Record]) -> Iterator[tuple[str, dict[str, Any] | None]]:
        for record in records:
            yield record.where, self.sample(record)

    @abstractmethod
    def sample(self, record: Record) -> dict[str, Any] | None:
        """Return the sample of a record; None if its question has no answer."""


def make_sample(
    sample_id: str | None,
    question: str,
    passages: Sequence[tuple[str, str]],
    answers: Sequence[str],
    kind: Any = None,
    gold: Sequence[int] = (),
) -> dict[str, Any]:
    """Return a sample as every stage reads it. `passages` are titles ("" for none) and texts."""
    sample: dict[str, Any] = {
        "ctxs": [{"title": title, "text": text} for title, text in passages],
        "question": question.strip(),
        "answers": list(dict.fromkeys(answers)),
    }
    if sample_id is not None:
        sample["id"] = sample_id
    if isinstance(kind, str) and kind:
        sample["kind"] = kind
    if gold:
        sample["gold"] = list(gold)
    return sample


def safe_id(value: Any) -> str | None:
    """Return an id that may name a folder; None if nothing of it is left."""
    return _UNSAFE.sub("_", str(value)).strip("._-") or None


def kind_of(value: Any) -> str:
    """Return what a value is, for error messages."""
    if value is None:
        return "null or missing"
    return "empty" if value in ("", [], {}) or (isinstance(value, str) and not value.strip()) else type(value).__name__
