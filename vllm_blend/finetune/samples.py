"""Training rows from files: questions in the formats of `pipeline/datasets.py`, one a prompt, or plain texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from vllm_blend.finetune.rows import Row, prompt_row
from vllm_blend.finetune.texts import text_rows, texts_of
from vllm_blend.pipeline.ask import choose_asking
from vllm_blend.pipeline.datasets import Entries, load_dataset, normalize_sample, read_entries
from vllm_blend.prompt_parser import parse_prompt
from vllm_blend.prompt_pieces import encode_alone


@dataclass(frozen=True)
class Asked:
    """How questions become rows: the model's tokenizer and the size of its vocabulary, the wording as users say it
    (see `choose_asking`), and the most tokens that a row may have."""

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    length: int
    style: str | None = None
    instruction: str = ""
    template: str = ""


def file_rows(paths: Sequence[Path], asked: Asked) -> tuple[list[Row], list[str]]:
    """Return the rows of files, and the ids of the samples that are longer than a row may be. A question is a row with
    its first answer; a text is one or several.

    Raises FileNotFoundError, or ValueError that names the file, the field and the fix, also if no row is left.
    """
    rows: list[Row] = []
    left_out: list[str] = []
    for path in paths:
        entries = read_entries(path)
        texts = texts_of(path, entries)
        if texts is not None:
            rows += [row for text in texts for row in text_rows(text, asked.tokenizer, asked.length)]
        else:
            found, too_long = _question_rows(path, entries, asked)
            rows, left_out = rows + found, left_out + too_long
    if not rows:
        raise ValueError(
            f"none of the {len(left_out)} samples fits {asked.length} tokens: raise --max-length, shorten the "
            "passages, or use a model with more positions"
        )
    return rows, left_out


def _question_rows(path: Path, entries: Entries, asked: Asked) -> tuple[list[Row], list[str]]:
    asking = choose_asking(asked.tokenizer, path, asked.style, asked.instruction, asked.template)
    rows, left_out = [], []
    for index, raw in enumerate(load_dataset(path, entries)):
        sample = normalize_sample(raw, index)
        prompt = parse_prompt(asking.prompt(sample), asked.tokenizer, asked.vocab_size)  # as the engine does
        answer = encode_alone(asked.tokenizer, asking.answer(sample.answers[0]))
        row = prompt_row(prompt.token_ids, prompt.chunk_bounds, answer)
        if len(row) <= asked.length:
            rows.append(row)
        else:
            left_out.append(sample.sample_id)
    return rows, left_out
