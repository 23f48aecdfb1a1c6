"""What decoding with chunks off the device adds to a forward pass: attention in two parts, and queries to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm_blend import ops
from vllm_blend.attention.context import LayerHook
from vllm_blend.attention.hybrid import part_of
from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata, LayerCache
from vllm_blend.config import OffloadConfig
from vllm_blend.offload.block_pool import HostBlockPool
from vllm_blend.offload.predictors import LooksAt, make_predictor
from vllm_blend.ops.host_copy import HostCopy

NUM_TAPPED_LAYERS = 4


@dataclass(frozen=True)
class _Part:
    """Some requests of a step, as a step of their own."""

    rows: torch.Tensor | slice
    metadata: AttentionMetadata


@dataclass(frozen=True)
class _Split:
    """A step's requests that are whole on the device, and those that are not, with where the rest of these lies."""

    whole: _Part | None
    parted: _Part | None
    positions: torch.Tensor  # of the parted rows, counted in host keys: all of them are seen
    tables: torch.Tensor  # [requests, blocks] int64, host blocks
    seq_lens: list[int]  # host keys of each


class ExactBackend(AttentionBackend):
    """For one step in mode "exact": blocks that are not on the device are attended where they are, on the host, and the
    two parts merged by their log-sum-exp. On a GPU the queries travel to the host and its part of the answer back, in
    every layer, while the device computes its own part; such a step cannot be captured as a CUDA graph.

    `missing`: request of the step -> its host blocks, in order of position. All of these come before the step's rows.
    """

    name = "exact_offload"

    def __init__(
        self,
        inner: AttentionBackend,
        caches: Sequence[LayerCache],
        host: HostBlockPool,
        missing: Mapping[int, list[int]],
    ) -> None:
        self.inner, self.host, self.missing = inner, host, missing
        self._layer_of = {id(cache): index for index, cache in enumerate(caches)}
        self._metadata: AttentionMetadata | None = None
        self._split: _Split | None = None

    def attend(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        if self._metadata is not metadata or self._split is None:
            self._split, self._metadata = self._parts(metadata), metadata
        split = self._split
        if split.parted is None:
            return self.inner.attend(q, cache, metadata, scale, sliding_window)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if split.whole is not None:
            rows = split.whole.rows
            out[rows] = self.inner.attend(q[rows], cache, split.whole.metadata, scale, sliding_window)
        rows = split.parted.rows
        own = q[rows]
        travelling = HostCopy(own)
        here, here_lse = self.inner.attend_with_lse(own, cache, split.parted.metadata, scale)
        layer = self._layer_of[id(cache)]
        starts, keys = split.parted.metadata.query_start_loc, self.host.layer(layer)
        there, there_lse = ops.attention_states(
            travelling.wait(), *keys, split.positions, split.tables, starts, split.seq_lens, scale
        )
        there = there.to(here.dtype).to(q.device, non_blocking=True)
        out[rows] = ops.merge_states(here, here_lse, there, there_lse.to(q.device, non_blocking=True))[0]
        return out

    def attention_mass(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
        query_rows: list[slice],
        sliding_window: int | None = None,
    ) -> list[torch.Tensor]:
        if any(query_rows[request].stop > query_rows[request].start for request in self.missing):
            raise ValueError("attention mass is measured before a request's chunks leave the device")
        return self.inner.attention_mass(q, cache, metadata, scale, query_rows, sliding_window)

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
        return _Split(_part(whole, metadata), _part(parted, metadata), positions, tables, lengths)


def _part(requests: list[int], metadata: AttentionMetadata) -> _Part | None:
    if not requests:
        return None
    if len(requests) == metadata.num_requests:
        return _Part(slice(0, metadata.num_tokens), metadata)
    return _Part(*part_of(requests, metadata))


class QueryTap(LayerHook):
    """Keeps the rotated queries of some layers for a predictor to look at afterwards.

    `copies`: where a CUDA graph is captured, whose memory later layers use again.
    """

    def __init__(self, layers: Sequence[int], copies: bool = False) -> None:
        self.layers, self.copies = tuple(layers), copies
        self._queries: dict[int, tuple[torch.Tensor, list[int]]] = {}

    def on_query(
        self,
        layer_idx: int,
        q: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> None:
        if layer_idx in self.layers:
            self._queries[layer_idx] = (q.clone() if self.copies else q, metadata.query_start_loc)

    def by_request(self, starts: list[int]) -> QueryTap:
        """The same queries, the rows of request r being starts[r] .. starts[r + 1] - 1."""
        tap = QueryTap(self.layers, self.copies)
        tap._queries = {layer: (q, starts) for layer, (q, _) in self._queries.items()}
        return tap

    def last_rows(self, request: int, count: int) -> torch.Tensor:
        """[layers, count, heads, head_dim]: the last so many rows of a request of the step."""
        pieces = []
        for layer in self.layers:
            q, starts = self._queries[layer]
            pieces.append(q[starts[request + 1] - count : starts[request + 1]])
        return torch.stack(pieces)


def tapped_layers(config: OffloadConfig, num_layers: int) -> list[int]:
    """The layers whose queries the predictor looks at, none where it needs none: the last ones of equal parts.

    Raises ValueError for an unknown predictor.
    """
    if config.mode is None or make_predictor(config.predictor).looks_at is LooksAt.RANKS:
        return []
    count = min(NUM_TAPPED_LAYERS, num_layers)
    return [(index + 1) * num_layers // count - 1 for index in range(count)]
