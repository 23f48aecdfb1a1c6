"""A chunk goes when no request uses it any more, with exactly its bytes and pages."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from tests.chunks.llms import chunked_llm, random_ids
from tests.engine.engines import BLOCK_SIZE, assert_empty, greedy, memory_store, tiny_model
from vllm_blend import ChunkedLLM
from vllm_blend.chunks.chunk import UnknownChunkError

PARAMS = greedy(8, ignore_eos=True)


def store_bytes(chunked: ChunkedLLM) -> int:
    return chunked.llm_engine.chunk_store.num_bytes


def test_deleting_frees_exactly_its_bytes() -> None:
    with chunked_llm() as chunked:
        token = chunked.llm_engine.composer.bytes_per_token
        kept = chunked.register_chunk(random_ids(7, 1))
        before = store_bytes(chunked)
        chunk = chunked.register_chunk(random_ids(11, 2))
        stored = chunked.llm_engine.chunk_store.get(chunk.id)
        assert stored is not None
        tensor = weakref.ref(stored.k)
        del stored
        assert store_bytes(chunked) - before == 11 * token
        chunked.generate_from_chunks(None, [kept.id, chunk.id], query=[5], sampling_params=PARAMS, retain=True)
        [pages] = chunked.get_chunk(chunk.id).page_tables
        assert len(pages) == (7 + 11 - 1) // BLOCK_SIZE - 7 // BLOCK_SIZE + 1
        deletion = chunked.delete_chunk(chunk.id)
        assert (deletion.deferred, deletion.num_references, deletion.num_bytes) == (False, 0, 11 * token)
        assert deletion.num_pages == -(-18 // BLOCK_SIZE)  # the whole composition's
        assert store_bytes(chunked) == before
        assert chunked.get_chunk(kept.id).page_tables == () and not chunked.llm_engine.blocks.retained
        gc.collect()
        assert tensor() is None  # nothing holds its memory
        with pytest.raises(UnknownChunkError, match=chunk.id):
            chunked.generate_from_chunks(None, [chunk.id], query=[5], sampling_params=PARAMS)


@pytest.mark.parametrize("ends", ["finished", "aborted", "refused"])
def test_deletion_waits_for_requests(ends: str) -> None:
    with chunked_llm() as chunked:
        chunked.register_chunk(random_ids(11, 1), name="x")
        arguments: dict[str, Any] = {"query": [5], "sampling_params": PARAMS, "stream": True, "retain": False}
        expected = [output.outputs for output in chunked.generate_from_chunks(None, ["x"], **arguments)]
        first = chunked.generate_from_chunks(None, ["x"], **arguments)
        second = chunked.generate_from_chunks(None, ["x", "x"], **arguments)
        next(first)
        used = store_bytes(chunked)
        deletion = chunked.delete_chunk("x")
        assert (deletion.deferred, deletion.num_references, deletion.num_bytes) == (True, 3, used)
        assert chunked.get_chunk("x").deleting
        for again in (lambda: chunked.delete_chunk("x"), lambda: chunked.compose(None, ["x"], query=[5])):
            with pytest.raises(UnknownChunkError, match=r"has been deleted \(3 running requests"):
                again()
        assert store_bytes(chunked) == used
        if ends == "refused":  # registered again meanwhile: nothing is deleted
            chunked.register_chunk(random_ids(11, 1))
            assert not chunked.get_chunk("x").deleting
        elif ends == "aborted":
            second.close()
        else:
            list(second)
        assert [output.outputs for output in first] == expected[1:]
        if ends == "refused":
            second.close()
            assert chunked.get_chunk("x").num_references == 0 and store_bytes(chunked) == used
        else:
            assert not chunked.list_chunks() and store_bytes(chunked) == 0


def test_a_name_is_free_as_soon_as_its_chunk_is_deleted() -> None:
    """It is free even while a request still uses the chunk: a passage can be replaced under its name."""
    with chunked_llm() as chunked:
        old = chunked.register_chunk(random_ids(11, 1), name="page")
        stream = chunked.generate_from_chunks(None, ["page"], query=[5], sampling_params=PARAMS, stream=True)
        next(stream)
        assert chunked.delete_chunk("page").deferred
        new = chunked.register_chunk(random_ids(7, 2), name="page")
        assert chunked.get_chunk("page").chunk is new and chunked.get_chunk(old.id).name is None
        assert len(list(stream)) == 7
        assert [info.name for info in chunked.list_chunks()] == ["page"]
        with pytest.raises(ValueError, match="names another chunk"):
            chunked.register_chunk(random_ids(5, 3), name="page")


def test_a_composition_made_before_the_deletion_is_refused() -> None:
    with chunked_llm() as chunked:
        chunk = chunked.register_chunk(random_ids(11, 1))
        made = chunked.compose(None, [chunk.id], query=[5])
        chunked.delete_chunk(chunk.id)
        with pytest.raises(UnknownChunkError, match=chunk.id):
            chunked.batch_generate_from_chunks([made], PARAMS)
        assert_empty(chunked.llm)


def test_many_chunks_come_and_go() -> None:
    """4,000 times: what is held afterwards is what was held before. Every hundredth is used."""
    with chunked_llm(tiny_model("llama", num_hidden_layers=1)) as chunked:
        engine = chunked.llm_engine
        free = engine.blocks.num_free_blocks
        registry, store = engine.chunk_registry, memory_store(chunked.llm)
        counts: list[int] = []
        for index in range(4_000):
            chunk = chunked.register_chunk([index % 89 + 3, index // 89 + 3], name="it")
            if index % 100 == 0:
                chunked.generate_from_chunks(None, ["it"], query=[5], sampling_params=greedy(1))
            deletion = chunked.delete_chunk(chunk.id)
            assert not deletion.deferred and deletion.num_bytes == 2 * engine.composer.bytes_per_token
            if index in (1_000, 3_999):
                gc.collect()
                counts.append(len(gc.get_objects()))
        assert (store.num_bytes, len(store), len(registry), len(store._pins)) == (0, 0, 0, 0)
        assert engine.blocks.num_free_blocks == free
        assert not engine.blocks.retained and not engine.blocks._retained_by and not engine.pages.chunk_page_tables
        assert counts[1] - counts[0] < 500  # objects of Python: a leak would make thousands
