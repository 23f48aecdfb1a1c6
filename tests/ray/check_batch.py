"""Batch inference over a Ray dataset: the answers are those of one engine, and bad input is refused before it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray

from tests.checkout import ROOT
from vllm_blend import LLM, SamplingParams
from vllm_blend.executor.ray_cluster import join_cluster
from vllm_blend.ray import generate
from vllm_blend.ray.batch import Generator

ENGINE: dict[str, Any] = {
    "dtype": "float32",  # in its own processes, "auto" may be bfloat16
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
    """In the batches that Ray Data would hand to an actor."""
    generator = Generator(ENGINE, SAMPLING)
    tokenizer = generator._llm.get_tokenizer()
    answers = []
    for prompts in (PASSAGES, [tokenizer.encode(text) for text in PASSAGES]):
        rows = ray.data.from_items([{"prompt": prompt} for prompt in prompts])
        [batch] = rows.iter_batches(batch_size=len(PASSAGES), batch_format="numpy")
        answers.append(sorted(generator(batch)["generated_text"]))
    assert answers[0] == answers[1] and len(set(answers[0])) > 1


def test_an_engine_leaves_a_connection_that_was_there() -> None:
    leave = join_cluster()
    leave()
    assert ray.is_initialized()


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
