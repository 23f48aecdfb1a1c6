"""Attention over chunks on the device and on the host, and a hook that keeps queries for the predictor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm_blend import ops
from vllm_blend.attention.context import LayerHook
from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata, LayerStep
from vllm_blend.attention.runs import StepPart, part_of
from vllm_blend.features.offload.block_pool import HostBlockPool
from vllm_blend.features.offload.config import OffloadConfig
from vllm_blend.features.offload.predictors import make_predictor
from vllm_blend.ops.host_copy import HostCopy
from vllm_blend.worker.passes import GraphHook

NUM_TAPPED_LAYERS = 4


@dataclass(frozen=True)
class _Split:
    """A step's requests that are whole on the device, those that are not, and the host blocks of these."""

    whole: StepPart | None
    parted: StepPart | None
    positions: torch.Tensor  # of the parted rows, counted in host keys: all of them are seen
    tables: torch.Tensor  # [requests, blocks] int64, host blocks
    seq_lens: list[int]  # host keys of each


class ExactBackend(AttentionBackend):
    """The backend of one step in mode "exact": attention over blocks on the host is computed on the host, and the two
    parts are merged by their log-sum-exp. On a GPU the queries travel to the host and its part of the answer back, in
    every layer, while the device computes its own part; such a step cannot be captured as a CUDA graph.

    `missing` maps a request of the step to its host blocks, in order of position. All of these come before the step's
    rows.
    """

    name = "exact_offload"

    def __init__(
        self,
        inner: AttentionBackend,
        host: HostBlockPool,
        missing: Mapping[int, list[int]],
    ) -> None:
        self.inner, self.host, self.missing = inner, host, missing
        self._metadata: AttentionMetadata | None = None
        self._split: _Split | None = None

    def attend(self, step: LayerStep) -> torch.Tensor:
        q, metadata, scale = step.q, step.metadata, step.scale
        if self._metadata is not metadata or self._split is None:
            self._split, self._metadata = self._parts(metadata), metadata
        split = self._split
        if split.parted is None:
            return self.inner.attend(step)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if split.whole is not None:
            out[split.whole.rows] = self.inner.attend(step.part(*split.whole))
        own = step.part(*split.parted)
        travelling = HostCopy(own.q)
        here, here_lse = self.inner.attend_with_lse(own)
        starts, keys = own.metadata.query_start_loc, self.host.layer(step.layer_idx)
        there, there_lse = ops.attention_states(
            travelling.wait(), keys, split.positions, split.tables, starts, split.seq_lens, scale
        )
        there = there.to(here.dtype).to(q.device, non_blocking=True)
        out[split.parted.rows] = ops.merge_states(here, here_lse, there, there_lse.to(q.device, non_blocking=True))[0]
        return out

    def attention_mass(self, step: LayerStep, query_rows: list[slice]) -> list[torch.Tensor]:
        if any(query_rows[request].stop > query_rows[request].start for request in self.missing):
            raise ValueError("attention mass cannot be measured for a request with chunks off the device")
        return self.inner.attention_mass(step, query_rows)

    def _parts(self, metadata: AttentionMetadata) -> _Split:
        active = [r for r in range(metadata.num_requests) if metadata.rows(r).stop > metadata.rows(r).start]
        parted = [request for request in active if request in self.missing]
        whole = [request for request in active if request not in self.missing]
        lengths = [len(self.missing[request]) * self.host.data.shape[3] for request in parted]
        counts = [metadata.rows(request).stop - metadata.rows(request).start for request in parted]
        tables = torch.zeros(len(parted), max((len(self.missing[r]) for r in parted), default=0), dtype=torch.int64)
        for row, request in zip(tables, parted, strict=True):
            row[: len(self.missing[request])] = torch.tensor(self.missing[request])
        positions = torch.tensor(lengths, dtype=torch.int64).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
        parts = [part_of(requests, metadata) if requests else None for requests in (whole, parted)]
        return _Split(parts[0], parts[1], positions, tables, lengths)


class QueryTap(LayerHook):
    """Keeps the rotated queries of some layers for a predictor."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._queries: dict[int, tuple[torch.Tensor, list[int]]] = {}

    def on_query(self, step: LayerStep) -> None:
        if step.layer_idx in self.layers:
            self._queries[step.layer_idx] = (step.q, step.metadata.query_start_loc)

    def last_rows(self, request: int, count: int) -> torch.Tensor:
        """Return the last `count` rows of a request of the step: [layers, count, heads, head_dim]."""
        pieces = []
        for layer in self.layers:
            q, starts = self._queries[layer]
            pieces.append(q[starts[request + 1] - count : starts[request + 1]])
        return torch.stack(pieces)


@dataclass
class LastTap:
    """The queries of the last step, None if they were not kept."""

    tap: QueryTap | None = None


class GraphTap(QueryTap, GraphHook):
    """A `QueryTap` that a graph captures. It copies what it sees, as later layers use that memory again."""

    def __init__(self, layers: Sequence[int], last: LastTap) -> None:
        super().__init__(layers)
        self._last = last  # of whatever graph was replayed

    def on_query(self, step: LayerStep) -> None:
        super().on_query(step._replace(q=step.q.clone()) if step.layer_idx in self.layers else step)

    def replayed(self, query_start_loc: list[int]) -> None:
        tap = QueryTap(self.layers)
        tap._queries = {layer: (q, query_start_loc) for layer, (q, _) in self._queries.items()}
        self._last.tap = tap


def tapped_layers(config: OffloadConfig, num_layers: int) -> list[int]:
    """Return the layers whose queries the predictor uses, none if it uses no queries: the last ones of equal parts.

    Raises ValueError for an unknown predictor.
    """
    if config.mode is None or not make_predictor(config.predictor).uses_queries:
        return []
    count = min(NUM_TAPPED_LAYERS, num_layers)
    return [(index + 1) * num_layers // count - 1 for index in range(count)]
