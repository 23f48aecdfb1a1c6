"""`ChunkedEngine`: what an engine does with chunks apart from prompts, and with prompts made of registered chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from vllm_blend.checks import require
from vllm_blend.chunks.chunk import Chunk, Deletion
from vllm_blend.chunks.composition import ChunkComposition
from vllm_blend.chunks.registry import ChunkRegistry
from vllm_blend.config import EngineConfig
from vllm_blend.engine.blend_planner import BlendPlanner
from vllm_blend.engine.chunk_encoding import (
    ChunkRegistration,
    begin_encoding,
    check_chunk,
    check_registered,
    encode_chunks,
)
from vllm_blend.engine.composer import ChunkComposer
from vllm_blend.engine.driver import Driver, Inbox, OutputStream
from vllm_blend.engine.errors import dead_if_lost
from vllm_blend.engine.lock import FairLock, current, exclusive
from vllm_blend.engine.request_builder import NewRequest
from vllm_blend.engine.requests import LiveRequests
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.keys import ChunkId, ModelFingerprint
from vllm_blend.kv_store.owners import ANYONE, Owner
from vllm_blend.kv_store.tiered import TieredChunkStore
from vllm_blend.outputs import RequestOutput
from vllm_blend.prompt_parser import parse_context
from vllm_blend.sampling_params import SamplingParams


class ChunkedEngine(ABC):
    """The chunks of an engine. Its parts are made by `LLMEngine`, whose rules about threads hold here too."""

    driver: Driver
    config: EngineConfig
    device: torch.device
    hf_config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase | None
    fingerprint: ModelFingerprint
    chunk_store: TieredChunkStore
    chunk_registry: ChunkRegistry
    planner: BlendPlanner
    composer: ChunkComposer
    requests: LiveRequests
    registration: ChunkRegistration

    @property
    def lock(self) -> FairLock:
        """Return the lock that a thread holds while it looks at the engine's state or changes it. The tokenizer belongs
        to that state: not every tokenizer can be used by two threads at a time."""
        return self.driver.lock

    @abstractmethod
    def add(self, new: NewRequest) -> None:
        """Queue a request whose prompt is token ids."""

    @abstractmethod
    def drop_finished(self) -> None:
        """Let go of requests that have finished."""

    @exclusive
    def generate_from_chunks(
        self,
        composition: ChunkComposition,
        params: SamplingParams,
        request_id: str,
        final_only: bool = False,
        arrival_time: float | None = None,
    ) -> Iterator[RequestOutput]:
        """Queue a prompt made of registered chunks. Return an iterator of its outputs, which runs the engine's steps as
        far as it needs. Its chunks cannot be deleted until it has finished.

        Raises ValueError as `add_request` does, and for chunks that are not registered.
        """
        registry, ids = self.chunk_registry, [chunk.id for chunk in composition.chunks]
        check_registered(composition, registry)
        release = partial(registry.release, ids)
        self.add(NewRequest(request_id, composition.parse(), params, arrival_time, final_only, on_end=release))
        registry.acquire(ids)
        registry.add_variants(composition.variants)
        inbox = Inbox()
        self.driver.expect(request_id, inbox)
        return OutputStream(self.driver, inbox)

    @exclusive
    def register_chunk(self, chunk: Chunk, name: str | None = None, metadata: Mapping[str, Any] | None = None) -> Chunk:
        """Put a chunk into `chunk_registry`, and compute its KV now; see `ChunkRegistration.register`."""
        with dead_if_lost():
            return self.registration.register(chunk, name, metadata)

    @exclusive
    def delete_chunk(self, id_or_name: str | Chunk) -> Deletion:
        """Delete a registered chunk, or have it deleted when the last request that uses it ends."""
        self.drop_finished()
        return self.chunk_registry.delete(id_or_name)

    def identify_chunks(
        self,
        prefix: str | Sequence[int],
        chunks: Sequence[str | Sequence[int]],
        continues: Sequence[int | None] | None = None,
        encode_after: Sequence[str | Sequence[int]] | None = None,
        cache_salt: str | None = None,
    ) -> tuple[ChunkId | None, list[ChunkId]]:
        """Return how the store names a prompt's prefix (None if it has none) and its chunks. Nothing is computed.
        `continues`, `encode_after` and `cache_salt` as in a `ChunkedPrompt`."""
        with self.lock:
            parsed = self._parse_context(prefix, chunks, continues, encode_after, cache_salt)
            return self.composer.finder.identify(parsed)

    def encode_chunks(
        self,
        prefix: str | Sequence[int],
        chunks: Sequence[str | Sequence[int]],
        continues: Sequence[int | None] | None = None,
        encode_after: Sequence[str | Sequence[int]] | None = None,
        cache_salt: str | None = None,
    ) -> list[ChunkKV]:
        """Return the KV of `chunks`, each encoded after what the engine's encoding context puts before it, just as a
        prompt of these pieces, with this `cache_salt`, would have it done. What they would be encoded after if they
        stood elsewhere in a prompt is computed, too.

        What the chunk store does not have is computed and put there; unfinished requests go on meanwhile. Raises
        ValueError or TypeError for bad pieces.
        """
        self.check_one_rank("encode_chunks")
        with current(self.device):
            with self.lock:
                self.lock.check_between_steps()
                parsed = self._parse_context(prefix, chunks, continues, encode_after, cache_salt)
            return encode_chunks(parsed, self.requests, self.driver)

    @exclusive
    def begin_encoding(
        self,
        parsed: ParsedPrompt,
        on_complete: Callable[[], None],
        among_others: bool = False,
        owner: Owner = ANYONE,
    ) -> None:
        """Have the chunks of a context (`prompt_parser.parse_context`) computed and stored by the next steps, as
        `encode_chunks` does. `on_complete` is called when all are there; in mid-step, or at once.

        Raises ValueError for a chunk that is too long.
        """
        begin_encoding(parsed, self.requests, on_complete, owner)

    @exclusive
    def load_chunk(self, chunk: ChunkId, kv: ChunkKV) -> None:
        """Put KV that was computed earlier into the chunk store. Raises ValueError if it cannot be this chunk's."""
        self.check_one_rank("load_chunk")
        check_chunk(self.fingerprint, chunk, kv)
        self.chunk_store.put(chunk.key, kv.copy().with_content(chunk))  # the caller may go on to change the tensors

    def check_one_rank(self, what: str) -> None:
        """Raise ValueError if ranks share the model, for `what` sees the heads of rank 0 only."""
        size = self.config.tensor_parallel_size
        require(
            size == 1, f"{what} needs tensor_parallel_size=1, but it is {size}: this process has a part of the model"
        )

    def _parse_context(self, prefix: Any, chunks: Any, continues: Any, after: Any, salt: str | None) -> ParsedPrompt:
        vocab_size, trusts = self.hf_config.vocab_size, self.config.model.trusted_chunks
        return parse_context(prefix, chunks, self.tokenizer, vocab_size, continues, after, salt, trusts)
