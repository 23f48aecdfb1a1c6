"""The forms in which data sets are published: one file per form, and a registry of all.

A data set's form is found by the fields of its first record, whatever the file is called. `pipeline/datasets.py` is the
door to all of them.
"""

from __future__ import annotations

from typing import Any

from vllm_blend.pipeline.formats.base import Format, Record, kind_of
from vllm_blend.pipeline.formats.hotpotqa import HotpotQA
from vllm_blend.pipeline.formats.longbench import LongBench
from vllm_blend.pipeline.formats.musique import MuSiQue
from vllm_blend.pipeline.formats.passages import Passages
from vllm_blend.pipeline.formats.squad import SQuAD

FORMATS: tuple[Format, ...] = (Passages(), MuSiQue(), LongBench(), HotpotQA(), SQuAD())  # the first that fits counts


def find_format(record: Record) -> Format:
    """Return the format of a data set by its first record. Raises ValueError that lists the known ones."""
    found = next((form for form in FORMATS if form.recognizes(record.fields)), None)
    if found is None:
        known = "; ".join(f"{form.name} has {form.fields}" for form in FORMATS)
        fields = ", ".join(map(repr, record.fields)) or "no fields"
        raise ValueError(
            f"{record.where} has {fields}, which are not those of a known format: write question, passages, answers, "
            f"or give a file as it was published: {known}"
        )
    return found


def make_record(value: Any, where: str) -> Record:
    """Return a record of a data set. Raises ValueError for what is not an object."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: the sample must be an object with named fields, not {kind_of(value)}")
    return Record(where, value)


__all__ = ["FORMATS", "Format", "Record", "find_format", "kind_of", "make_record"]
