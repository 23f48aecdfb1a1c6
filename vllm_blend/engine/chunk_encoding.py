"""Encoding chunks ahead of any question, and checking chunk KV that comes from elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_blend.engine.composition import Composition
from vllm_blend.engine.driver import Inbox
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.keys import ChunkId, ModelFingerprint, chunk_key
from vllm_blend.kv_store.validation import ExpectedChunk, find_kv_mismatch, is_finite

if TYPE_CHECKING:
    from vllm_blend.engine.llm_engine import LLMEngine


def run_encodings(engine: LLMEngine, parsed: ParsedPrompt) -> list[ChunkKV]:
    """Return the KV of the chunks of `parsed`. When a step raises, nothing of it is left to run."""
    first = parsed.chunk_bounds[0][0] if parsed.chunk_bounds else 0
    for index, (start, stop) in enumerate(parsed.chunk_bounds):
        length = first + stop - start
        if length > engine.max_model_len:
            raise ValueError(
                f"chunks[{index}] has {length} tokens with its prefix, more than max_model_len={engine.max_model_len}: "
                "split it, or raise max_model_len where the model allows it"
            )
    if not parsed.chunk_bounds:
        return []
    inbox = Inbox()
    composition = Composition(parsed, on_complete=inbox.ring)  # another thread's step may encode the last chunk
    try:
        with engine.lock:
            composition.pieces = engine.composer.pieces(parsed)
            for request in engine.composer.encode(composition):
                engine.scheduler.add(request)
        engine.driver.wait(inbox, lambda: not composition.missing)
    except BaseException:  # also a Ctrl-C: what was queued must not run with the next call
        with engine.lock:
            for request in engine.composer.withdraw(composition):
                engine.scheduler.finish(request)
        raise
    own = composition.pieces[len(composition.pieces) - len(parsed.chunk_bounds) :]
    return [piece.kv.copy() for piece in own if piece.kv is not None]  # the store's own must not be changed


def check_chunk(model: ModelFingerprint, chunk: ChunkId, kv: ChunkKV) -> None:
    """Raise ValueError unless `kv` is what this model's KV of `chunk` looks like, and holds a part of it if and only if
    the key says so."""
    tokens = len(chunk.token_ids)
    compressed = chunk.key != chunk_key(model, chunk.context, chunk.token_ids)
    holds_a_part = kv.positions is not None
    if compressed != holds_a_part or (holds_a_part and kv.num_tokens != tokens):
        raise ValueError(
            f"the KV given for chunk {chunk.key} is {kv.num_kvs} KVs of {kv.num_tokens} tokens, but the chunk has "
            f"{tokens}, of which its key says that {'a part is' if compressed else 'all are'} kept "
            "(blend_chunk_kept_share): encode the chunk with this model and these settings"
        )
    mismatch = find_kv_mismatch(ExpectedChunk(model, chunk, kv.num_kvs if compressed else None), kv)
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
