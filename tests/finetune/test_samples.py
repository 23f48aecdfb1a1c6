"""Files become rows: questions as the engine is asked them, texts as passages with an end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.engine.engines import DEMO
from tests.pipeline.test_ask import LLAMA, tokenizer_of
from vllm_blend.finetune.rows import ANSWER_WEIGHT, CONTEXT_WEIGHT, LEAST_ANSWER_TOKEN_WEIGHT, Row
from vllm_blend.finetune.samples import Asked, file_rows
from vllm_blend.finetune.texts import CHUNK_TOKENS, text_rows
from vllm_blend.pipeline.ask import choose_asking
from vllm_blend.pipeline.datasets import load_dataset, normalize_sample

pytestmark = pytest.mark.cpu_only

HOTPOT = {
    "_id": "a",
    "question": "Who barks?",
    "answer": "dog",
    "type": "bridge",
    "supporting_facts": [["Dog", 0]],
    "context": [["Dog", ["It barks.", " Loudly."]], ["Cat", ["It <s> naps."]]],
}
SQUAD = {
    "data": [
        {
            "title": "Dog",
            "paragraphs": [
                {
                    "context": "A dog barks.",
                    "qas": [{"id": "q", "question": "Who barks?", "answers": [{"text": "dog", "answer_start": 2}]}],
                }
            ],
        }
    ]
}


def write(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def chunks_of(row: Row, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    count = max(row.chunks)
    return [
        str(tokenizer.decode([token for token, own in zip(row.ids, row.chunks, strict=True) if own == number]))
        for number in range(1, count + 1)
    ]


def test_published_questions_are_asked_by_the_chat_template(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(LLAMA)
    path = write(tmp_path / "train.jsonl", HOTPOT)
    [row], left_out = file_rows([path], Asked(tokenizer, len(tokenizer), 500))
    assert left_out == [] and chunks_of(row, tokenizer) == ["Dog\nIt barks. Loudly.\n\n", "Cat\nIt <s> naps.\n\n"]
    asking = choose_asking(tokenizer, path)
    prompt: Any = asking.prompt(normalize_sample(load_dataset(path)[0]))
    text = str(tokenizer.decode(prompt["prefix"])) + "".join(prompt["chunks"]) + prompt["suffix"] + "dog<|im_end|>"
    assert tokenizer.decode(row.ids) == text
    assert row.ids[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert row.ids.count(tokenizer.bos_token_id) == 1  # in a passage it is text, as in the engine
    answer = len(tokenizer.encode("dog", add_special_tokens=False)) + 1
    assert row.weights == [CONTEXT_WEIGHT] * (len(row) - answer) + [ANSWER_WEIGHT // answer] * answer
    assert row.chunks[0] == 0 and row.chunks[-answer:] == [-1] * answer


def test_files_of_several_kinds_are_read_together(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    squad = write(tmp_path / "squad.json", SQUAD)
    texts = write(tmp_path / "own.jsonl", {"text": "One.\n\nTwo."}, {"text": "Three."})
    asked = Asked(tokenizer, len(tokenizer), 200, "musique", "Read.", "Q: {question} A:")
    rows, _ = file_rows([squad, texts], asked)
    assert len(rows) == 3
    assert tokenizer.decode(rows[0].ids) == "<s>Read.\nA dog barks.\n\nQ: Who barks? A: dog\n"
    assert tokenizer.decode(rows[2].ids) == "<s>Three."


def test_a_text_goes_on_from_its_passages() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    paragraphs = ["".join(f"{n} is number {i}. " for n in range(9)) + "\n\n" for i in range(12)]
    text = "".join(paragraphs)
    [row] = text_rows(text, tokenizer, 4096)
    assert tokenizer.decode(row.ids) == f"<s>{text}"
    chunks = chunks_of(row, tokenizer)
    assert len(chunks) > 2 and "".join(chunks) == "".join(paragraphs[: len("".join(chunks)) // len(paragraphs[0])])
    ending = row.chunks.count(-1)
    assert 0.25 <= ending / len(row) < 0.5 and row.chunks[-ending:] == [-1] * ending
    assert row.weights == [CONTEXT_WEIGHT] * (len(row) - ending) + [LEAST_ANSWER_TOKEN_WEIGHT] * ending
    sizes = [row.chunks.count(number) for number in range(1, len(chunks) + 1)]
    assert all(CHUNK_TOKENS[0] <= size <= CHUNK_TOKENS[1] for size in sizes)


@pytest.mark.parametrize("length", [40, 150, 1000])
def test_a_long_text_is_several_rows(length: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    text = "A word and another. " * 200 + "<s> A paragraph.\n\n" + "Short.\n\n" * 50
    rows = list(text_rows(text, tokenizer, length))
    assert all(1 < len(row) <= length for row in rows) and len(rows) > 1
    begin = tokenizer.bos_token_id
    assert all(row.ids[0] == begin and row.ids.count(begin) == 1 for row in rows)
    assert "".join(str(tokenizer.decode(row.ids[1:])) for row in rows) == text
    assert all(row.chunks[-1] == -1 and row.weights[-1] == LEAST_ANSWER_TOKEN_WEIGHT for row in rows)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"text": " "}, 'line 2: sample 1: expected {"text": "..."} with words in it, not empty'),
        ({"question": "Who?"}, "line 2: sample 1: expected .* not null or missing"),
        (["text"], "line 2: sample 1: expected .* not list"),
    ],
)
def test_a_wrong_text_is_named(tmp_path: Path, entry: Any, message: str) -> None:
    tokenizer = tokenizer_of(None)
    path = write(tmp_path / "own.jsonl", {"text": "One."}, entry)
    with pytest.raises(ValueError, match=message):
        file_rows([path], Asked(tokenizer, len(tokenizer), 100))
