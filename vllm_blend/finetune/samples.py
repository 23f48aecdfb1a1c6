"""Training rows from data sets in the formats of `pipeline/datasets.py`: one question a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vllm_blend.finetune.rows import Encode, Row, make_row
from vllm_blend.pipeline.datasets import load_dataset, normalize_sample
from vllm_blend.pipeline.prompts import PROMPT_STYLES, build_qa_prompt, prompt_for


def sample_rows(
    paths: Sequence[Path], style: str | None, encode: Encode, bos: int | None, length: int
) -> tuple[list[Row], list[str]]:
    """A row for each sample (its first answer is the one to give), and the ids of those longer than `length` tokens.

    Raises FileNotFoundError, or ValueError naming the file, the field and the fix; also if nothing is left.
    """
    rows, left_out = [], []
    if style is not None and style not in PROMPT_STYLES:
        raise ValueError(f"--style {style!r} is unknown: use one of {', '.join(PROMPT_STYLES)}")
    for path in paths:
        name = style or _style_of(path)
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


def _style_of(path: Path) -> str:
    try:
        return prompt_for(path).name
    except ValueError as error:
        raise ValueError(
            f"cannot tell how to ask data set {str(path)!r}: its name must contain one of {', '.join(PROMPT_STYLES)}; "
            "rename the file, or give --style"
        ) from error
