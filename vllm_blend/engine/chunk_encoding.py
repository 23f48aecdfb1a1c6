"""Encoding chunks ahead of any question: those of a context, and those that are registered, each at once and in pages
of its own. And checking chunk KV that comes from elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_blend.checks import a_type
from vllm_blend.chunks.chunk import Chunk, OutOfChunkMemoryError
from vllm_blend.chunks.composition import ChunkComposition
from vllm_blend.chunks.registry import ChunkRegistry
from vllm_blend.core.page_manager import PageManager
from vllm_blend.engine.composer import ChunkComposer
from vllm_blend.engine.driver import Driver, Inbox
from vllm_blend.engine.pieces import PendingBlend
from vllm_blend.engine.requests import LiveRequests
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.kv_store.chunk_kv import ChunkKV, ExpectedChunk, find_kv_mismatch, is_finite
from vllm_blend.kv_store.keys import ChunkId, ModelFingerprint, chunk_key
from vllm_blend.kv_store.owners import ANYONE, Owner
from vllm_blend.outputs import RequestMetrics
from vllm_blend.request import Request


def begin_encoding(
    parsed: ParsedPrompt, requests: LiveRequests, on_complete: Callable[[], None], owner: Owner = ANYONE
) -> PendingBlend:
    """Have the chunks of `parsed` encoded by the next steps, wherever they may stand in a prompt, and call
    `on_complete` when nothing is missing. Raises ValueError for a chunk that is too long."""
    check_lengths(parsed, requests.composer.finder.max_model_len)
    pending = PendingBlend(parsed, owner=owner, on_complete=on_complete)
    pending.pieces = requests.composer.finder.pieces(parsed, everywhere=True)
    try:
        for request in requests.composer.start(pending):
            requests.scheduler.add(request)
    except BaseException:
        withdraw(pending, requests)
        raise
    return pending


def withdraw(pending: PendingBlend, requests: LiveRequests) -> None:
    """End the encodings that only this context waits for."""
    for request in requests.composer.withdraw(pending):
        requests.scheduler.finish(request)


def check_lengths(parsed: ParsedPrompt, longest: int) -> None:
    """Raise ValueError for a chunk that the model cannot encode after its prefix."""
    first = parsed.chunk_bounds[0][0] if parsed.chunk_bounds else 0
    for index, (start, stop) in enumerate(parsed.chunk_bounds):
        length = first + stop - start
        if length > longest:
            raise ValueError(
                f"chunks[{index}] has {length} tokens with its prefix, more than max_model_len={longest}: split it, "
                "or raise max_model_len where the model allows it"
            )


def encode_chunks(parsed: ParsedPrompt, requests: LiveRequests, driver: Driver) -> list[ChunkKV]:
    """Return the KV of the chunks of `parsed`. When a step raises, nothing of it is left to run."""
    if not parsed.chunk_bounds:
        return []
    inbox = Inbox()
    with driver.lock:
        # Another thread's step may encode the last chunk.
        pending = begin_encoding(parsed, requests, inbox.wake)
    try:
        driver.wait(inbox, lambda: not pending.missing)
    except BaseException:  # also a Ctrl-C: what was queued must not run with the next call
        with driver.lock:
            withdraw(pending, requests)
        raise
    own = pending.chunks[: len(parsed.chunk_bounds)]
    return [piece.kv.copy() for piece in own if piece.kv is not None]  # the store's own must not be changed


def check_chunk(model: ModelFingerprint, chunk: ChunkId, kv: ChunkKV) -> None:
    """Raise ValueError unless the chunk's key is this model's for its tokens, and `kv` looks like its KV."""
    if chunk.key != chunk_key(model, chunk.context, chunk.token_ids):
        raise ValueError(
            f"the key {chunk.key} given for a chunk of {len(chunk.token_ids)} tokens is not that of these tokens, "
            "encoded by this model: encode the chunk with this model"
        )
    mismatch = find_kv_mismatch(ExpectedChunk(model, chunk), kv)
    if mismatch is not None:
        raise ValueError(
            f"the KV given for chunk {chunk.key} is not its KV: {mismatch}: encode the chunk with this model"
        )
    kv.wait()
    if not (is_finite(kv.k) and is_finite(kv.v)):
        raise ValueError(
            f"the KV given for chunk {chunk.key} has numbers that are NaN or infinite, which would fail every prompt "
            "that uses it: encode the chunk again"
        )


@dataclass(frozen=True)
class ChunkRegistration:
    """Puts chunks into a registry. `prefill` computes the KV of a request's tokens from `collect_from` on."""

    registry: ChunkRegistry
    composer: ChunkComposer
    pages: PageManager
    prefill: Callable[[Request], ChunkKV]

    def register(self, chunk: Chunk, name: str | None, metadata: Mapping[str, Any] | None) -> Chunk:
        """Enter a chunk, and compute its KV now unless it is stored already. Other requests may be running.

        Raises ValueError for an empty or over-long chunk or a name in use, OutOfBlocks where no pages are free to
        compute it in, and OutOfChunkMemoryError if the store cannot keep it.
        """
        self.registry.check_name(name, chunk.id)
        if not isinstance(metadata, Mapping | None):
            raise TypeError(f"metadata is {a_type(metadata)}: give a dict")
        if len(chunk) == 0:
            raise ValueError("the chunk is empty: it needs at least one token")
        length, longest = len(chunk.context_token_ids) + len(chunk), self.composer.finder.max_model_len
        if length >= longest:
            raise ValueError(
                f"the chunk has {len(chunk)} tokens and {len(chunk.context_token_ids)} stand before it, but "
                f"max_model_len={longest} must hold them and at least one more: split it"
            )
        if chunk.has_kv and self.composer.stored.find(chunk.stored) is None:
            self._compute(chunk)
        return self.registry.register(chunk, name, metadata)

    def _compute(self, chunk: Chunk) -> None:
        store = self.composer.store
        num_bytes = len(chunk) * self.composer.bytes_per_token
        if num_bytes > store.free_bytes:
            raise OutOfChunkMemoryError(
                f"the chunk takes {num_bytes} bytes of KV, but of the chunk store's {store.budget_bytes} only "
                f"{store.free_bytes} are not pinned or in use: delete or unpin chunks, let running requests finish, or "
                "raise blend_chunk_cache_gib"
            )
        ids = [*chunk.context_token_ids, *chunk.token_ids]
        metrics = RequestMetrics(arrival_time=time.time())
        request = Request(chunk.id, ids, None, metrics, collect_from=len(chunk.context_token_ids))
        request.block_table = self.pages.allocate_for_chunk(chunk.id, len(ids))
        try:
            kv = self.prefill(request)
        finally:
            self.pages.release_computed(chunk.id)
        self.composer.num_encoded += 1
        store.put(chunk.id, kv)
        if not store.bytes_of(chunk.id):
            raise OutOfChunkMemoryError(
                f"the chunk store found no {num_bytes} bytes in one piece, although {store.free_bytes} of "
                f"{store.budget_bytes} are not pinned: running requests hold the rest; let them finish, or raise "
                "blend_chunk_cache_gib"
            )


def check_registered(composition: ChunkComposition, registry: ChunkRegistry) -> None:
    """Raise ValueError unless every chunk of a composition is the one that is registered under its id."""
    for chunk in composition.chunks:
        registered = registry.get(chunk.id)
        if (chunk.token_ids, chunk.context_token_ids) != (registered.token_ids, registered.context_token_ids):
            raise ValueError(
                f"chunk {chunk.id!r} of the composition is not what is registered under this id: use the Chunk that "
                "register_chunk returned"
            )
