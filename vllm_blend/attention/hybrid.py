"""A backend made of one backend per job: dense prefill, scattered prefill, decoding, and measuring attention mass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata, LayerCache
from vllm_blend.attention.runs import row_index, to_device


@dataclass(frozen=True)
class _Part:
    backend: AttentionBackend
    rows: slice | torch.Tensor
    metadata: AttentionMetadata


class HybridBackend(AttentionBackend):
    """Gives each request of a step to the backend of its job; a step with one kind of work goes on as it is.

    A request with one row decodes; one whose rows are known to be its last positions is dense; any other is scattered.
    A pass that measures attention mass is attended by the backend that measures it, which may have done it already.
    """

    def __init__(
        self, dense: AttentionBackend, scattered: AttentionBackend, decode: AttentionBackend, mass: AttentionBackend
    ) -> None:
        self.dense, self.scattered, self.decode, self.mass = dense, scattered, decode, mass
        self.name = f"hybrid({dense.name}, {scattered.name}, {decode.name}, {mass.name})"
        self.smallest_block = max(backend.smallest_block for backend in (dense, scattered, decode, mass))
        self.capturable_decode = decode.capturable_decode
        self.capturable_mass = mass.capturable_mass
        self.capturable_cascade = decode.capturable_cascade
        self._metadata: AttentionMetadata | None = None
        self._parts: list[_Part] = []
        self._measured: torch.Tensor | None = None  # the queries that `mass` saw last

    def attend(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        measured, self._measured = self._measured, None
        if measured is q:
            return self.mass.attend(q, cache, metadata, scale, sliding_window)
        if self._metadata is not metadata:
            self._parts, self._metadata = self._split(metadata), metadata
        if len(self._parts) == 1:
            return self._parts[0].backend.attend(q, cache, metadata, scale, sliding_window)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part in self._parts:
            out[part.rows] = part.backend.attend(q[part.rows], cache, part.metadata, scale, sliding_window)
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
        self._measured = q
        return self.mass.attention_mass(q, cache, metadata, scale, query_rows, sliding_window)

    def another(self) -> AttentionBackend:
        return self.decode.another()

    def attend_with_lse(
        self, q: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.decode.attend_with_lse(q, cache, metadata, scale)

    def add_attention_mass(
        self,
        masses: list[torch.Tensor],
        q: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
        query_rows: list[slice],
        sliding_window: int | None = None,
        ignored: torch.Tensor | None = None,
    ) -> None:
        self._measured = q
        self.mass.add_attention_mass(masses, q, cache, metadata, scale, query_rows, sliding_window, ignored)

    def _split(self, metadata: AttentionMetadata) -> list[_Part]:
        """The requests of each backend as a step of their own: backends plan once a step, so each gets one."""
        by_backend: dict[int, tuple[AttentionBackend, list[int]]] = {}
        for request in range(metadata.num_requests):
            rows = metadata.rows(request)
            if rows.stop > rows.start:
                backend = self._backend_of(metadata, request, rows.stop - rows.start)
                by_backend.setdefault(id(backend), (backend, []))[1].append(request)
        if len(by_backend) == 1:
            [(backend, _)] = by_backend.values()
            return [_Part(backend, slice(0, metadata.num_tokens), metadata)]
        return [_part(backend, requests, metadata) for backend, requests in by_backend.values()]

    def _backend_of(self, metadata: AttentionMetadata, request: int, num_rows: int) -> AttentionBackend:
        if num_rows == 1:
            return self.decode
        dense = metadata.at_end is not None and metadata.at_end[request]
        return self.dense if dense else self.scattered


def _part(backend: AttentionBackend, requests: list[int], metadata: AttentionMetadata) -> _Part:
    return _Part(backend, *part_of(requests, metadata))


def part_of(requests: list[int], metadata: AttentionMetadata) -> tuple[slice | torch.Tensor, AttentionMetadata]:
    """The rows of some requests of a step, and the step of these requests alone, to attend with."""
    device = metadata.positions.device
    spans = [metadata.rows(request) for request in requests]
    rows = row_index(np.concatenate([np.arange(span.start, span.stop) for span in spans]), device)
    return (
        rows,
        replace(
            metadata,
            positions=metadata.positions[rows],
            slot_mapping=metadata.slot_mapping[rows],
            block_tables=metadata.block_tables[to_device(np.array(requests), device)],
            query_start_loc=[0, *accumulate(span.stop - span.start for span in spans)],
            seq_lens=[metadata.seq_lens[request] for request in requests],
            at_end=None if metadata.at_end is None else tuple(metadata.at_end[request] for request in requests),
            device_query_start_loc=None,
            rope_positions=None,  # queries are rotated by then
        ),
    )
