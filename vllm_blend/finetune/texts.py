"""Training rows from plain texts, {"text": ...} in every line: their paragraphs are chunks, and the end is the answer.

A text has no question. What it can teach is to go on from passages that are reused as well as from passages that are
computed in full: so the first three quarters of it are chunks, and the rest weighs as answers do, token by token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from vllm_blend.finetune.rows import LEAST_ANSWER_TOKEN_WEIGHT, Row, prompt_row
from vllm_blend.pipeline.datasets import Entries
from vllm_blend.pipeline.formats import kind_of
from vllm_blend.prompt_pieces import encode_alone, encode_start

LONGEST = 2048  # tokens of a row: longer texts are several rows
CHUNK_TOKENS = (64, 256)  # paragraphs are joined up to the first number, and cut at the second
ENDING = 0.25  # share of a row that is no chunk
_PARAGRAPH = re.compile(r".*?\n\s*\n|.+", re.DOTALL)


def texts_of(path: str | Path, entries: Entries) -> list[str] | None:
    """Return the texts of a file whose first entry is {"text": ...}; None for another file, such as one of questions.

    Raises ValueError that names the entry and what is wrong with it.
    """
    if not _is_text(entries[0][1]):
        return None
    texts = []
    for where, entry in entries:
        text = entry.get("text") if isinstance(entry, dict) else None
        if not isinstance(text, str) or not text.strip():
            what = kind_of(text if isinstance(entry, dict) else entry)
            raise ValueError(f'data set {path}: {where}: expected {{"text": "..."}} with words in it, not {what}')
        texts.append(text)
    return texts


def _is_text(entry: object) -> bool:
    return isinstance(entry, dict) and "text" in entry and "question" not in entry


def text_rows(text: str, tokenizer: PreTrainedTokenizerBase, length: int) -> Iterator[Row]:
    """Yield the rows of a text, of at most `length` and `LONGEST` tokens each, and of at least two."""
    beginning = encode_start(tokenizer, "")  # BOS, if texts begin with it
    room = min(length, LONGEST) - len(beginning)
    row: list[list[int]] = []
    for piece in _pieces(text, tokenizer, min(CHUNK_TOKENS[1], max(1, room))):
        if sum(map(len, row)) + len(piece) > room:
            yield from _row(beginning, row)
            row = []
        row.append(piece)
    yield from _row(beginning, row)


def _pieces(text: str, tokenizer: PreTrainedTokenizerBase, longest: int) -> Iterator[list[int]]:
    """Yield the token ids of paragraphs: several short ones together, and long ones in parts."""
    waiting: list[int] = []
    for paragraph in _PARAGRAPH.findall(text):
        ids = encode_alone(tokenizer, paragraph, literal=True)
        if len(waiting) >= CHUNK_TOKENS[0] or len(waiting) + len(ids) > longest:
            yield from _parts(waiting, longest)
            waiting = []
        waiting = waiting + ids
    yield from _parts(waiting, longest)


def _parts(ids: list[int], longest: int) -> Iterator[list[int]]:
    """Yield parts of about the same size."""
    count = -(-len(ids) // longest)
    edges = [len(ids) * i // max(1, count) for i in range(count + 1)]
    for start, stop in pairwise(edges):
        yield ids[start:stop]


def _row(beginning: list[int], pieces: list[list[int]]) -> Iterator[Row]:
    """Yield the row of consecutive pieces, if it has a token to learn: the last of them are its end."""
    total = sum(map(len, pieces))
    ids, bounds = list(beginning), []
    ending: list[int] = []
    for piece in pieces:
        if ending or len(ids) - len(beginning) + len(piece) > (1 - ENDING) * total:
            ending += piece
        else:
            bounds.append((len(ids), len(ids) + len(piece)))
            ids += piece
    if len(ids) + len(ending) > 1 and ending:
        yield prompt_row(ids, bounds, ending, LEAST_ANSWER_TOKEN_WEIGHT)
