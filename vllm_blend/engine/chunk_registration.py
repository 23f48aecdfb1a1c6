"""Registering chunks, and running compositions of them, on an engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_blend.chunks.chunk import Chunk, Deletion
from vllm_blend.chunks.composition import ChunkComposition
from vllm_blend.chunks.errors import OutOfChunkMemoryError
from vllm_blend.engine.driver import Inbox
from vllm_blend.engine.output_stream import OutputStream
from vllm_blend.outputs import RequestMetrics, RequestOutput
from vllm_blend.request import Request
from vllm_blend.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm_blend.engine.llm_engine import LLMEngine


def register_chunk(engine: LLMEngine, chunk: Chunk, name: str | None, metadata: Mapping[str, Any] | None) -> Chunk:
    """Enter a chunk, and compute its KV now unless it is stored already. Other requests may be running.

    Raises ValueError for an empty or over-long chunk or a name in use, OutOfBlocks where no pages are free to compute
    it in, and OutOfChunkMemoryError where the store cannot keep it.
    """
    registry = engine.chunk_registry
    registry.check_name(name, chunk.id)
    if not isinstance(metadata, Mapping | None):
        raise TypeError(f"metadata is a {type(metadata).__name__}: give a dict")
    if len(chunk) == 0:
        raise ValueError("the chunk is empty: it needs at least one token")
    length = len(chunk.context_token_ids) + len(chunk)
    if length >= engine.max_model_len:
        raise ValueError(
            f"the chunk has {len(chunk)} tokens and {len(chunk.context_token_ids)} stand before it, but "
            f"max_model_len={engine.max_model_len} must hold them and at least one more: split it"
        )
    if chunk.has_kv and engine.composer.find_stored(chunk.stored) is None:
        _prefill(engine, chunk)
    return registry.register(chunk, name, metadata)


def delete_chunk(engine: LLMEngine, id_or_name: str | Chunk) -> Deletion:
    """See `ChunkRegistry.delete`; nothing of the chunk's memory is held by a step that is over."""
    engine.drop_finished()
    return engine.chunk_registry.delete(id_or_name)


def generate_from_chunks(
    engine: LLMEngine,
    request_id: str,
    composition: ChunkComposition,
    params: SamplingParams,
    final_only: bool,
    arrival_time: float | None,
) -> Iterator[RequestOutput]:
    """Queue a composition; the outputs as they come. Its chunks cannot be deleted until it has ended."""
    registry = engine.chunk_registry
    for chunk in composition.chunks:
        registered = registry.get(chunk.id)
        if (chunk.token_ids, chunk.context_token_ids) != (registered.token_ids, registered.context_token_ids):
            raise ValueError(
                f"chunk {chunk.id!r} of the composition is not what is registered under this id: use the Chunk that "
                "register_chunk returned"
            )
    ids = [chunk.id for chunk in composition.chunks]
    engine.add_parsed(
        request_id, composition.parse(), params, arrival_time, final_only, on_end=lambda: registry.release(ids)
    )
    registry.acquire(ids)
    inbox = Inbox()
    engine.driver.expect(request_id, inbox)
    return OutputStream(engine.driver, inbox)


def _prefill(engine: LLMEngine, chunk: Chunk) -> None:
    store, pages = engine.chunk_store, engine.pages
    num_bytes = len(chunk) * engine.composer.bytes_per_token
    if num_bytes > store.room:
        raise OutOfChunkMemoryError(
            f"the chunk takes {num_bytes} bytes of KV, but of the chunk store's {store.budget_bytes} only {store.room} "
            "are not pinned or in use: delete or unpin chunks, let running requests finish, or raise "
            "blend_chunk_cache_gib"
        )
    ids = [*chunk.context_token_ids, *chunk.token_ids]
    metrics = RequestMetrics(arrival_time=time.time())
    request = Request(chunk.id, ids, None, metrics, collect_from=len(chunk.context_token_ids))
    request.block_table = pages.allocate_for_chunk(chunk.id, len(ids))
    try:
        runner = engine.model_executor.driver_worker.model_runner
        kv = runner.prefill_chunk(request, engine.scheduler.max_num_batched_tokens)
    finally:
        pages.computed(chunk.id)
    engine.composer.num_encoded += 1
    store.put(chunk.id, kv)
    if not store.bytes_of(chunk.id):
        raise OutOfChunkMemoryError(
            f"the chunk store found no {num_bytes} bytes in one piece, although {store.room} of {store.budget_bytes} "
            "are not pinned: running requests hold the rest; let them finish, or raise blend_chunk_cache_gib"
        )
