"""Batch inference over a Ray dataset: the answers are those of one engine, and bad input is refused before it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray

from tests.checkout import ROOT
from vllm_blend import LLM, SamplingParams
from vllm_blend.ray import generate

ENGINE: dict[str, Any] = {
    "model": str(ROOT / "inputs" / "demo-model-reuse"),
    "num_gpu_blocks_override": 128,
    "enable_blending": True,
    "max_num_seqs": 4,
}
SAMPLING: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
PASSAGES = [f"Town number {number} lies at the river and has {number + 3} bridges. " for number in range(4)]
ROWS = [
    {
        "id": n,
        "prefix": "Read.\n",
        "chunks": [PASSAGES[n % 4], PASSAGES[(n + 1) % 4]],
        "suffix": "Question: which?\nAnswer:",
    }
    for n in range(10)
]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_rows_of_pieces_get_the_answers_of_one_engine() -> None:
    answers = {row["id"]: row for row in generate(ray.data.from_items(ROWS), ENGINE, SAMPLING, batch_size=4).take_all()}
    prompts: list[Any] = [{name: row[name] for name in ("prefix", "chunks", "suffix")} for row in ROWS]
    outputs = LLM(**ENGINE).generate(prompts, SamplingParams(**SAMPLING), use_tqdm=False)
    assert [answers[n]["generated_text"] for n in range(10)] == [output.outputs[0].text for output in outputs]
    assert all(answers[n]["generated_tokens"] == 4 and answers[n]["finish_reason"] == "length" for n in range(10))
    assert sum(row["cached_tokens"] for row in answers.values()) > 0


def test_rows_of_text_and_of_token_ids() -> None:
    texts = [{"prompt": text} for text in PASSAGES]
    answers = generate(ray.data.from_items(texts), ENGINE, SAMPLING).take_all()
    tokenizer = LLM(**ENGINE).get_tokenizer()
    ids = [{"prompt": tokenizer.encode(text)} for text in PASSAGES]
    of_ids = generate(ray.data.from_items(ids), ENGINE, SAMPLING).take_all()
    assert sorted(row["generated_text"] for row in answers) == sorted(row["generated_text"] for row in of_ids)


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        ({"text": "a"}, {}, "no column prompt or chunks, but text"),
        ({"chunks": ["a"], "prefix": ""}, {}, "not suffix"),
        ({"chunks": ["a"], "prefix": "", "suffix": "", "prompt": "b"}, {}, "both chunks and prompt"),
        ({"prompt": "a", "finish_reason": "b"}, {}, "has a column finish_reason already"),
        ({"prompt": "a"}, {"concurrency": 0}, "concurrency=0"),
        ({"prompt": "a"}, {"sampling": {"n": 2}}, "n=2: a row has one answer"),
        ({"prompt": "a"}, {"engine": ENGINE | {"block_size": 3}}, "block_size=3"),
    ],
)
def test_bad_input_is_refused(row: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(ray.data.from_items([row]), **{"engine": ENGINE, "sampling": SAMPLING} | changes)
