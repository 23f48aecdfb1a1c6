"""Turn the queries of a step into scores of chunks: gather what the predictor looks at, and ask it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_blend.features.offload.digests import KeyDigests
from vllm_blend.features.offload.predictors import PromotionEvidence, PromotionPredictor
from vllm_blend.features.offload.residency import Residency
from vllm_blend.ops.e4m3 import gathered, readable
from vllm_blend.ops.host_copy import to_device
from vllm_blend.ops.paged_kv import PagedKV


@dataclass(frozen=True)
class StepQueries:
    """The rotated queries [layers, rows, heads, head_dim] that the last step computed for one request: a row for each
    token, the last of them at `position`."""

    queries: torch.Tensor
    position: int

    def up_to(self, position: int) -> StepQueries:
        """Return the same without the rows after a position, which are those of wrong drafts. At least the first row
        stays."""
        wrong = min(max(0, self.position - position), self.queries.shape[1] - 1)
        return StepQueries(self.queries[:, : self.queries.shape[1] - wrong], self.position - wrong) if wrong else self


@dataclass
class _Memory:
    """The state that the scorer keeps for a request."""

    ranks: torch.Tensor  # [chunks] int64
    resident: torch.Tensor  # [chunks] bool, of the `version` of the tables
    version: int
    scored_version: int = -1
    digests: KeyDigests | None = None
    previous: torch.Tensor | None = None  # [chunks] float32, where the queries are
    arriving: tuple[torch.Tensor, torch.cuda.Event] | None = None  # scores on their way from a GPU


class ChunkScorer:
    """Scores the chunks of requests, by the queries of some layers (`layers`, numbers into `caches`).

    On a GPU, scores are computed beside the next step, on a stream of their own, and nothing waits for them.
    """

    def __init__(
        self,
        predictor: PromotionPredictor,
        layers: Sequence[int],
        caches: Sequence[PagedKV],
        scale: float,
        rotary_dim: int,
    ) -> None:
        self.predictor, self.layers, self.caches = predictor, tuple(layers), caches
        self.scale, self.rotary_dim = scale, rotary_dim
        device = caches[0].key.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._memory: dict[Residency, _Memory] = {}
        self._latest: dict[Residency, list[float]] = {}

    def forget(self, residency: Residency) -> None:
        """Forget a request that has returned its pages."""
        self._memory.pop(residency, None)
        self._latest.pop(residency, None)

    def scores(self, residency: Residency, queries: StepQueries | None) -> list[float] | None:
        """Return a score per chunk, None while nothing is known. On a GPU they are those of the step before.

        Call it first while all chunks are on the device, and then whenever a step has computed new queries. A predictor
        that does not use queries scores again when chunks have moved. New scores are a new list.
        Raises ValueError if the predictor returns anything but a number for each chunk.
        """
        memory = self._recall(residency)
        self._collect(residency, memory)
        uses_queries = self.predictor.uses_queries
        if queries is None if uses_queries else memory.scored_version == residency.version:
            return self._latest.get(residency)
        memory.scored_version = residency.version
        if queries is not None and uses_queries and memory.digests is None:
            memory.digests = self._digests(residency, queries.position)
            self._lend(memory.digests.centre, memory.digests.radius, memory.digests.owner)
        if self._stream is None:
            self._score(residency, memory, queries)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            if queries is not None:
                self._lend(queries.queries)
            with torch.cuda.stream(self._stream):
                self._score(residency, memory, queries)
        return self._latest.get(residency)

    def _recall(self, residency: Residency) -> _Memory:
        device = self.caches[0].key.device
        memory = self._memory.get(residency)
        if memory is None or memory.version != residency.version:
            resident = to_device(torch.tensor([chunk.resident for chunk in residency.chunks]), device)
            if memory is None:
                memory = _Memory(to_device(torch.tensor(residency.ranks), device), resident, residency.version)
                self._memory[residency] = memory
                self._lend(memory.ranks)
            memory.resident, memory.version = resident, residency.version
            self._lend(resident)
        return memory

    def _lend(self, *tensors: torch.Tensor) -> None:
        """Keep the memory of tensors, once they are freed, until the stream of scores has read them: it may still do so
        when their request has ended."""
        if self._stream is not None:
            for tensor in tensors:
                tensor.record_stream(self._stream)

    def _score(self, residency: Residency, memory: _Memory, queries: StepQueries | None) -> None:
        expected = None
        if queries is not None and memory.digests is not None:
            expected = memory.digests.expected_mass(queries.queries, self.scale, len(residency.chunks))
        evidence = PromotionEvidence(memory.ranks, memory.resident, memory.previous, expected)
        scores = self.predictor.score(evidence)
        if scores.shape != (len(residency.chunks),):
            raise ValueError(
                f"{type(self.predictor).__name__}.score() must return one score for each of the "
                f"{len(residency.chunks)} chunks, not {list(scores.shape)}"
            )
        memory.previous = scores
        if scores.is_cuda:
            on_host = torch.empty(scores.shape, dtype=scores.dtype, pin_memory=True)
            on_host.copy_(scores, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            memory.arriving = (on_host, event)
        else:
            self._latest[residency] = scores.tolist()

    def _collect(self, residency: Residency, memory: _Memory) -> None:
        if memory.arriving is not None and memory.arriving[1].query():
            self._latest[residency] = memory.arriving[0].tolist()
            memory.arriving = None

    def _digests(self, residency: Residency, position: int) -> KeyDigests:
        """Return the digests of all full blocks up to a position. Blocks that cannot move count, too: a head that looks
        at the first token or the question says little about chunks."""
        device = self.caches[0].key.device
        blocks = residency.table[: (position + 1) // self.caches[0].block_size]
        owner_of = {index: chunk.index for chunk in residency.chunks for index in chunk.blocks}
        owner = [owner_of.get(index, len(residency.chunks)) for index in range(len(blocks))]
        index = to_device(torch.tensor(blocks, dtype=torch.int64), device)
        keys = torch.stack([readable(gathered(self.caches[layer].key, index)) for layer in self.layers])
        return KeyDigests.from_keys(keys, to_device(torch.tensor(owner, dtype=torch.int64), device), self.rotary_dim)
