"""Load the chunks of a KV cache directory into an engine, as far as the engine can use them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.kv_store.format import ChunkMiss, MissKind, load_chunk
from vllm_blend.pipeline.stage_inputs import PassageChunk

logger = logging.getLogger(__name__)

Source = Literal["loaded", "in_memory"] | MissKind
MOST_NAMED = 3  # stored chunks that are not used, of each kind: the others are counted


@dataclass
class ChunkCache:
    """Loads chunks into the engine's store as samples need them. `counts` says what became of each distinct chunk."""

    engine: LLMEngine
    directory: Path
    prefix: str | Sequence[int]  # what every chunk was encoded after
    prefix_id: str  # folder of the prefix's KV
    pages: bool = False  # whether chunks were encoded after what precedes them on their pages, too
    counts: Counter[Source] = field(default_factory=Counter)
    _seen: dict[str, Source] = field(default_factory=dict)  # key -> what became of it
    _misses: Counter[MissKind] = field(default_factory=Counter)

    @property
    def num_hits(self) -> int:
        """Return how many of the distinct chunks so far needed no computing: they were stored, or in memory."""
        return self.counts["loaded"] + self.counts["in_memory"]

    def load(self, chunks: Sequence[PassageChunk]) -> list[Source]:
        """Put the prefix and `chunks` into the engine's store. Returns for each chunk where it came from, or why it is
        not there.

        The engine computes a chunk that is not there when a prompt needs it. The first of each kind are warnings.
        """
        prefix, ids = self.engine.identify_chunks(
            self.prefix,
            [chunk.text for chunk in chunks],
            encode_after=[chunk.text_before for chunk in chunks] if self.pages else None,
        )
        names = [chunk.chunk_id for chunk in chunks]
        if prefix is not None:
            ids, names = [prefix, *ids], [self.prefix_id, *names]
        sources: list[Source] = []
        for chunk_id, name in zip(ids, names, strict=True):
            source: Source = "in_memory"
            if chunk_id.key not in self.engine.chunk_store:
                try:
                    kv = load_chunk(self.directory / name, chunk_id, self.engine.fingerprint)
                except ChunkMiss as miss:
                    self._warn(miss)
                    source = miss.kind
                else:
                    self.engine.load_chunk(chunk_id, kv)
                    source = "loaded"
            if chunk_id.key not in self._seen:
                self._seen[chunk_id.key] = source
                self.counts[source] += 1
            sources.append(source)
        return sources[len(sources) - len(chunks) :]

    def _warn(self, miss: ChunkMiss) -> None:
        self._misses[miss.kind] += 1
        if self._misses[miss.kind] <= MOST_NAMED:
            logger.warning("stored chunk not used, it will be computed again: %s", miss)
        elif self._misses[miss.kind] == MOST_NAMED + 1:
            logger.warning("more stored chunks are %s and will be computed again: they are only counted", miss.kind)
