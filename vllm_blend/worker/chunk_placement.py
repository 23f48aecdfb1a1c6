"""Chunk KV on its way from the store to a request's pages.

What lies on the engine's device is placed at once, all layers of a chunk in one launch. What lies on the host while the
engine is on a GPU travels layer by layer during the forward passes that need it, and so does what is still being read
from a disk.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np
import torch

from vllm_blend import ops
from vllm_blend.attention.context import LayerHook
from vllm_blend.blend.plan import Segment
from vllm_blend.kv_store.chunk_kv import ChunkKV, ChunkLost
from vllm_blend.kv_store.transfer import InFlight, LayerwiseLoad, StagingRing
from vllm_blend.layers.rotary import RotaryEmbedding
from vllm_blend.models.causal_lm import CausalLM, attention_layers
from vllm_blend.ops.host_copy import to_device
from vllm_blend.request import Request
from vllm_blend.worker.kv_cache import KVCache


class ChunkPlacement:
    """Writes stored KV to the pages of the requests that reuse it, K rotated to the positions it has in each.

    With a `ring`, KV on the host passes through it; without, it is copied whole before the forward begins. `in_flight`
    holds the chunks whose copies are not over, whatever the store has evicted meanwhile.
    """

    def __init__(self, model: CausalLM, cache: KVCache, ring: StagingRing | None = None) -> None:
        self.cache, self.ring = cache, ring
        self.in_flight = InFlight()
        self.seconds = 0.0  # of the host, for chunks in memory: on a GPU it only queues the copies
        self.rotaries = [attention.rotary for attention in attention_layers(model)]
        self._last: weakref.ref[LayerwiseLoad] | None = None  # of `in_flight`: only copies may keep chunks alive

    def start(self, requests: Sequence[Request]) -> list[LayerHook]:
        """Begin to place the stored KV of `requests`, and return the hooks that the forward passes up to the blend's
        need.

        A layer's KV is in place when the layer writes its own: the tokens that are computed again come later. Raises
        ChunkLost where that cannot be, and so do those forward passes.
        """
        last = self._last() if self._last is not None else None
        if last is not None:  # a step that failed may have left the rest of its load
            last.abandon()
        self.in_flight.release()
        at_once: list[tuple[Request, Segment]] = []
        travelling: list[tuple[Request, Segment]] = []
        read: list[tuple[Request, Segment]] = []
        for request in requests:
            assert request.blend is not None
            for segment in request.blend.segments:
                if _is_being_read(segment.kv):
                    read.append((request, segment))
                    continue
                travels = self.ring is not None and self.ring.accepts(segment.kv)
                (travelling if travels else at_once).append((request, segment))
        hooks: list[LayerHook] = []
        begun = time.perf_counter()
        if self.ring is not None and travelling:
            chunks = [segment.kv for _, segment in travelling]
            load = LayerwiseLoad(self.ring, chunks, len(self.rotaries))  # before the rest: copies take longest
            self.in_flight.hold(load, load)
            self._last = weakref.ref(load)
            hooks.append(_ArrivalHook(load, self.cache, self.rotaries, self._rows(travelling)))
        if at_once:
            self._place(at_once)
        self.seconds += time.perf_counter() - begun
        if read:
            chunks = [segment.kv for _, segment in read]
            hook = _ReadHook(chunks, self.cache, self.rotaries, self._rows(read))
            if hook.copied is not None:
                self.in_flight.hold(hook.copied, chunks)
            hooks.append(hook)
        return hooks

    def _place(self, segments: Sequence[tuple[Request, Segment]]) -> None:
        device = self.cache.key.device
        positions, slots = self._rows(segments)
        kvs = [segment.kv for _, segment in segments]
        for kv in kvs:
            if kv.written is not None and not kv.written.query():
                torch.cuda.current_stream(device).wait_event(kv.written)
        # What comes from elsewhere is copied for one chunk at a time: the copies are as large as the chunks.
        batches = [kvs] if all(kv.k.device == device for kv in kvs) else [[kv] for kv in kvs]
        for layers, rotary in _runs_of_layers(self.rotaries):
            cos, sin = rotary.cos_sin(positions)
            keys, values = self.cache.key[layers], self.cache.value[layers]
            start = 0
            for chunks in batches:
                stored = [(kv.k, kv.v) for kv in chunks]
                if chunks is not kvs or layers != slice(0, len(self.rotaries)):
                    stored = [
                        (k[layers].to(device, non_blocking=True), v[layers].to(device, non_blocking=True))
                        for k, v in stored
                    ]
                where = slice(start, start + sum(kv.num_tokens for kv in chunks))
                ops.place_chunks(stored, cos[where], sin[where], keys, values, slots[where])
                start = where.stop

    def _rows(self, segments: Sequence[tuple[Request, Segment]]) -> torch.Tensor:
        """Return the positions of the segments' tokens one after another, and their slots: [2, tokens] int64 on the
        device."""
        size, rows = self.cache.block_size, []
        for request, group in groupby(segments, itemgetter(0)):
            table = np.asarray(request.block_table, np.int64)
            positions = np.concatenate([np.arange(segment.start, segment.stop) for _, segment in group])
            rows.append(np.stack([positions, table[positions // size] * size + positions % size]))
        return to_device(np.concatenate(rows, 1), self.cache.key.device)


class _LayerHook(LayerHook):
    """Places a layer just before the layer writes its own K and V, in the first forward that comes to it."""

    def __init__(self, cache: KVCache, rotaries: Sequence[RotaryEmbedding], rows: torch.Tensor) -> None:
        self._cache, self._rotaries = cache, rotaries
        self._positions, self._slots = rows
        self._tables: dict[RotaryEmbedding, tuple[torch.Tensor, torch.Tensor]] = {}
        self._next_layer = 0

    def before_layer(self, layer_idx: int) -> None:
        if layer_idx < self._next_layer:
            return
        self._next_layer = layer_idx + 1
        rotary = self._rotaries[layer_idx]
        if rotary not in self._tables:
            self._tables[rotary] = rotary.cos_sin(self._positions)
        cos, sin = self._tables[rotary]
        layer = slice(layer_idx, layer_idx + 1)
        keys, values = self._cache.key[layer], self._cache.value[layer]
        for rows, k, v in self._arrivals(layer_idx):
            ops.place_chunks([(k, v)], cos[rows], sin[rows], keys, values, self._slots[rows])

    def _arrivals(self, layer_idx: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield rows, and K before RoPE and V of these, each [1, rows, kv_heads, head_dim] on the device."""
        raise NotImplementedError


class _ArrivalHook(_LayerHook):
    """Places a load from pinned memory."""

    def __init__(
        self, load: LayerwiseLoad, cache: KVCache, rotaries: Sequence[RotaryEmbedding], rows: torch.Tensor
    ) -> None:
        super().__init__(cache, rotaries, rows)
        self._load = load

    def _arrivals(self, layer_idx: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        for arrival in self._load.layer(layer_idx):
            yield arrival.rows, arrival.k, arrival.v


class _ReadHook(_LayerHook):
    """Places chunks that are being read from a disk: the host waits for each layer. On its way to a GPU it is copied on
    the stream that computes, as that takes far less time than reading it."""

    def __init__(
        self, chunks: Sequence[ChunkKV], cache: KVCache, rotaries: Sequence[RotaryEmbedding], rows: torch.Tensor
    ) -> None:
        super().__init__(cache, rotaries, rows)
        self._chunks = chunks
        self.copied = torch.cuda.Event() if cache.key.is_cuda else None  # after the last copy so far

    def _arrivals(self, layer_idx: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        start, device = 0, self._cache.key.device
        for chunk in self._chunks:
            assert chunk.arriving is not None
            chunk.arriving.wait_layer(layer_idx)
            rows = slice(start, start + chunk.num_tokens)
            k, v = (t[layer_idx : layer_idx + 1].to(device, non_blocking=True) for t in (chunk.k, chunk.v))
            if self.copied is not None:
                self.copied.record()
            yield rows, k, v
            start = rows.stop


def _is_being_read(kv: ChunkKV) -> bool:
    """Return whether layers of a chunk are still to come. Raises ChunkLost if some never will."""
    if kv.arriving is None or kv.arriving.is_whole:
        return False
    if kv.arriving.is_lost:
        raise ChunkLost("a stored chunk was found to be damaged, or is late")
    return True


def _runs_of_layers(rotaries: Sequence[RotaryEmbedding]) -> Iterator[tuple[slice, RotaryEmbedding]]:
    """Yield the runs of layers that rotate alike: one run in nearly every model."""
    start = 0
    for stop in range(1, len(rotaries) + 1):
        if stop == len(rotaries) or rotaries[stop] is not rotaries[start]:
            yield slice(start, stop), rotaries[start]
            start = stop
