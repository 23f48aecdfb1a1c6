"""Make training rows from data sets in the formats of `pipeline/datasets.py`: one question a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vllm_blend.finetune.rows import Encode, Row, make_row
from vllm_blend.pipeline.datasets import load_dataset, normalize_sample
from vllm_blend.pipeline.prompts import build_qa_prompt, find_style


def sample_rows(
    paths: Sequence[Path], style: str | None, encode: Encode, bos: int | None, length: int
) -> tuple[list[Row], list[str]]:
    """Return a row for each sample, with its first answer, and the ids of the samples longer than `length` tokens.

    Raises FileNotFoundError, or ValueError that names the file, the field and the fix, also if no row is left.
    """
    rows, left_out = [], []
    for path in paths:
        name = find_style(style, path).name
        for index, raw in enumerate(load_dataset(path)):
            sample = normalize_sample(raw, index)
            prompt = build_qa_prompt(sample, name)
            turn = (str(prompt["suffix"]), f" {sample.answers[0]}\n")
            row = make_row(str(prompt["prefix"]), [str(c) for c in prompt["chunks"]], [turn], encode, bos, length)
            if row is None:
                left_out.append(sample.sample_id)
            else:
                rows.append(row)
    if not rows:
        raise ValueError(
            f"none of the {len(left_out)} samples fits {length} tokens: raise --max-length, shorten the passages, or "
            "use a model with more positions"
        )
    return rows, left_out
