"""Data sets of this project's own form, {"question", "passages", "answers"}, and of CacheBlend's, with `ctxs`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from vllm_blend.pipeline.formats.base import Record, SampleFormat


@dataclass(frozen=True)
class Passages(SampleFormat):
    """A question with its passages. `normalize_sample` reads and checks it as it is."""

    name: ClassVar[str] = "passages"
    fields: ClassVar[str] = "question, answers, and passages (or ctxs)"

    def recognizes(self, fields: dict[str, Any]) -> bool:
        return "passages" in fields or "ctxs" in fields

    def sample(self, record: Record) -> dict[str, Any]:
        return record.fields
