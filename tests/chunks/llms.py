"""Small `ChunkedLLM`s: built once, emptied between tests, checked for leaks after each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests import settings
from tests.engine.compare import record_chosen
from tests.engine.engines import BLOCK_SIZE, TINY_VOCABULARY, assert_empty, patience, threads, tiny_model
from tests.kept import kept
from vllm_blend import ChunkedLLM
from vllm_blend.chunks.composition import ChunkComposition

TINY = tiny_model("llama")


def new_chunked_llm(model: str = TINY, **arguments: Any) -> ChunkedLLM:
    """Build an engine with small pages on the device that the run names (see `tests/settings.py`)."""
    with patience():
        return ChunkedLLM(model, **(settings.current().engine_arguments() | {"block_size": BLOCK_SIZE} | arguments))


def _recorded(model: str, **arguments: Any) -> ChunkedLLM:
    chunked = new_chunked_llm(model, **arguments)
    record_chosen(chunked.llm)
    return chunked


@contextmanager
def chunked_llm(model: str = TINY, **arguments: Any) -> Iterator[ChunkedLLM]:
    """Lend an engine that is as good as new, before and after: no request, no chunk, no page in use."""
    chunked = kept(("chunked", repr((model, sorted(arguments.items())))), lambda: _recorded(model, **arguments))
    chunked.llm.reset_prefix_cache()
    chunked.llm_engine.chunk_store.clear()
    chunked.llm_engine.scheduler.num_preemptions = 0
    assert_empty(chunked.llm)
    try:
        with threads(1):
            yield chunked
        assert_empty(chunked.llm)
    finally:
        for info in chunked.list_chunks():
            for _ in range(info.num_pins):
                chunked.unpin_chunk(info.chunk.id)
            chunked.delete_chunk(info.chunk.id)
    assert chunked.llm_engine.chunk_store.free_bytes == chunked.llm_engine.chunk_store.budget_bytes


def random_ids(count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, TINY_VOCABULARY) for _ in range(count)]  # no special tokens


def random_compositions(chunked: ChunkedLLM, count: int, **options: Any) -> list[ChunkComposition]:
    """Draw compositions of a few chunks in any order, with or without a system prompt, of up to 80 tokens."""
    generator = random.Random(7)
    system = [chunked.register_chunk(random_ids(n, 100 + n), "system_prompt").id for n in (1, 8, 13)]
    context = [chunked.register_chunk(random_ids(n, n)).id for n in (1, 2, 5, 7, 8, 11, 16)]
    queries = [chunked.register_chunk(random_ids(n, 200 + n), "query").id for n in (1, 3, 8)]
    made = []
    for index in range(count):
        system_chunk = generator.choice([None, *system])
        if index % 5 == 4:
            question: dict[str, Any] = {"query": random_ids(generator.randrange(1, 9), index)}
        else:
            question = {"query_chunk_id": generator.choice(queries)}
        chosen = [generator.choice(context) for _ in range(generator.randrange(6))]
        made.append(chunked.compose(system_chunk, chosen, **question, **options))
        assert len(made[-1].token_ids) <= 80 + 10
    return made
