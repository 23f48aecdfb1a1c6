"""From the queries of a step to the scores of chunks: gathers what a predictor looks at, and asks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_blend.attention.metadata import LayerCache
from vllm_blend.offload.block_pool import HostBlockPool
from vllm_blend.offload.digests import KeyDigests
from vllm_blend.offload.predictors import Evidence, LooksAt, PromotionPredictor
from vllm_blend.offload.residency import Residency
from vllm_blend.ops.host_copy import to_device


@dataclass(frozen=True)
class Asked:
    """What the last step asked of one request's keys: rotated queries [layers, rows, heads, head_dim], one row per
    token it computed, the last of them at `position`."""

    queries: torch.Tensor
    position: int

    def until(self, position: int) -> Asked:
        """Without the rows after a position: drafts that turned out to be wrong. At least the first row stays."""
        wrong = min(max(0, self.position - position), self.queries.shape[1] - 1)
        return Asked(self.queries[:, : self.queries.shape[1] - wrong], self.position - wrong) if wrong else self


@dataclass
class _Memory:
    """What is remembered of a request."""

    ranks: torch.Tensor  # [chunks] int64
    resident: torch.Tensor  # [chunks] bool, of the `version` of the tables
    version: int
    scored_version: int = -1
    digests: KeyDigests | None = None
    previous: torch.Tensor | None = None  # [chunks] float32, where the queries are
    arriving: tuple[torch.Tensor, torch.cuda.Event] | None = None  # scores on their way from a GPU


class ChunkScorer:
    """Scores the chunks of requests, by the queries of some layers (`layers`, numbers into `caches`).

    `host` is given where chunks off the device are attended too (mode "exact"): their keys are then looked at as well.
    On a GPU, scores are computed beside the next step, on a stream of their own, and nothing waits for them; but a
    predictor that looks at the pages themselves does so before the next step may write there.
    """

    def __init__(
        self,
        predictor: PromotionPredictor,
        layers: Sequence[int],
        caches: Sequence[LayerCache],
        scale: float,
        rotary_dim: int,
        host: HostBlockPool | None,
    ) -> None:
        self.predictor, self.layers, self.caches = predictor, tuple(layers), caches
        self.scale, self.rotary_dim, self.host = scale, rotary_dim, host
        device = caches[0].key.device
        beside = device.type == "cuda" and predictor.looks_at is not LooksAt.MASS
        self._stream = torch.cuda.Stream(device) if beside else None
        self._memory: dict[Residency, _Memory] = {}
        self._latest: dict[Residency, list[float]] = {}

    @property
    def wants_queries(self) -> bool:
        return self.predictor.looks_at is not LooksAt.RANKS

    def forget(self, residency: Residency) -> None:
        self._memory.pop(residency, None)
        self._latest.pop(residency, None)

    def scores(self, residency: Residency, asked: Asked | None, draft_source: int | None = None) -> list[float] | None:
        """A score per chunk, None while nothing is known. On a GPU they are those of the step before: nothing waits.
        `draft_source`: the chunk that the drafts of the coming step are copied from.

        Must first be called while all chunks are on the device, and then whenever a step has computed new queries.
        Where queries do not count, scores are computed when chunks have moved. New scores are a new list.
        Raises ValueError where the predictor returns anything but a number for each chunk.
        """
        memory = self._recall(residency)
        self._collect(residency, memory)
        if memory.scored_version == residency.version if not self.wants_queries else asked is None:
            return self._latest.get(residency)
        memory.scored_version = residency.version
        if asked is not None and self.predictor.looks_at is LooksAt.DIGESTS and memory.digests is None:
            memory.digests = self._digests(residency, asked.position)
            self._lend(memory.digests.centre, memory.digests.radius, memory.digests.owner)
        if self._stream is None:
            self._score(residency, memory, asked, draft_source)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            if asked is not None:
                self._lend(asked.queries)
            with torch.cuda.stream(self._stream):
                self._score(residency, memory, asked, draft_source)
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
        """Have the memory of tensors that the current stream made wait, once they are freed, for the stream of scores:
        it may still read them when their request has ended."""
        if self._stream is not None:
            for tensor in tensors:
                tensor.record_stream(self._stream)

    def _score(self, residency: Residency, memory: _Memory, asked: Asked | None, draft_source: int | None) -> None:
        scores = self.predictor.score(self._evidence(residency, memory, asked, draft_source))
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

    def _evidence(
        self, residency: Residency, memory: _Memory, asked: Asked | None, draft_source: int | None
    ) -> Evidence:
        expected = received = None
        if asked is not None and memory.digests is not None:
            expected = memory.digests.expected_mass(asked.queries, self.scale, len(residency.chunks))
        if asked is not None and self.predictor.looks_at is LooksAt.MASS:
            received = self._received_mass(residency, asked, memory.resident)
        return Evidence(memory.ranks, memory.resident, memory.previous, expected, received, draft_source)

    def _digests(self, residency: Residency, position: int) -> KeyDigests:
        """Of all full blocks up to a position. Those that cannot move count, too: a head that looks at the first token
        or the question says little about chunks."""
        device = self.caches[0].key.device
        blocks = residency.table[: (position + 1) // self.caches[0].block_size]
        owner_of = {index: chunk.index for chunk in residency.chunks for index in chunk.blocks}
        owner = [owner_of.get(index, len(residency.chunks)) for index in range(len(blocks))]
        index = to_device(torch.tensor(blocks, dtype=torch.int64), device)
        keys = torch.stack([self.caches[layer].key[index] for layer in self.layers])
        return KeyDigests.of(keys, to_device(torch.tensor(owner, dtype=torch.int64), device), self.rotary_dim)

    def _received_mass(self, residency: Residency, asked: Asked, resident: torch.Tensor) -> torch.Tensor:
        """[rows, chunks]: attention on the blocks that can move, mean over layers and heads; nan for chunks unseen."""
        device, size = asked.queries.device, self.caches[0].block_size
        rows = asked.queries.shape[1]
        missing = residency.num_missing_blocks
        num_keys = asked.position + 1 - missing * size
        table = residency.device_table()[: -(-num_keys // size)]
        owner_of = {index: chunk.index for chunk in residency.chunks for index in chunk.blocks}
        nobody = len(residency.chunks)
        present = [index for index, block in enumerate(residency.table) if block][: len(table)]
        owners = [owner_of.get(index, nobody) for index in present]
        host = residency.host_table() if self.host is not None else []
        owners += [chunk.index for chunk in residency.missing for _ in chunk.blocks] if host else []
        index = to_device(torch.tensor(table, dtype=torch.int64), device)
        last = num_keys - rows + torch.arange(rows, device=device)
        hidden = torch.arange(len(table) * size, device=device)[None] > last[:, None]  # what is not filled yet, too
        keys = torch.stack([self.caches[layer].key[index] for layer in self.layers])
        scores = self._scores(asked.queries, keys).masked_fill(hidden[:, None], float("-inf"))
        if host:
            assert self.host is not None
            away = torch.stack([self.host.layer(layer)[0][torch.tensor(host)] for layer in self.layers])
            scores = torch.cat([scores, self._scores(asked.queries, to_device(away, device))], -1)
        total = scores.softmax(-1).mean((0, 2)).unflatten(-1, (-1, size)).sum(-1)
        owner = to_device(torch.tensor(owners, dtype=torch.int64), device)
        mass = torch.zeros(rows, nobody + 1, device=device).index_add_(1, owner, total)[:, :nobody]
        return mass if self.host is not None else mass.masked_fill(~resident, float("nan"))

    def _scores(self, queries: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """[layers, rows, heads, keys] float32 of queries [layers, rows, heads, head_dim] and keys [layers, blocks,
        block_size, kv_heads, head_dim]."""
        keys = blocks.flatten(1, 2).float()
        grouped = queries.float().unflatten(2, (keys.shape[2], -1))
        return (torch.einsum("lrkgd,lnkd->lrkgn", grouped, keys) * self.scale).flatten(2, 3)
