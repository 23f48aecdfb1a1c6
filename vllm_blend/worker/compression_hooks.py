"""The layer hooks of KV-Compress: the last queries of a prompt score its KVs, and decode steps add to that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm_blend import ops
from vllm_blend.attention.context import LayerHook
from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata, LayerCache
from vllm_blend.core.scheduler import ScheduledRequest
from vllm_blend.kv_compress.metrics import BlockView, EvictionMetric, Rotary, Window
from vllm_blend.kv_compress.state import CompressionState


@dataclass(frozen=True)
class Watched:
    """A request of a step that computes some of the prompt's last queries: the step's last `num_rows` of it."""

    state: CompressionState
    num_rows: int
    first: int  # position of the first of them
    ends: bool  # the prompt is complete with this step
    num_tokens: int  # in the cache after it


class WindowHook(LayerHook):
    """Scores every KV of the prompts that a step completes. Queries of a window that an earlier step computed have been
    kept; those of a step that is done again replace its own."""

    def __init__(self, watched: Mapping[int, Watched], metric: EvictionMetric, rotaries: Sequence[Rotary]) -> None:
        """`watched`: by request of the step. `rotaries`: one a layer."""
        self.watched, self.metric, self.rotaries = watched, metric, rotaries

    def on_query(
        self,
        layer_idx: int,
        q: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> None:
        for request, watch in self.watched.items():
            rows = slice(metadata.rows(request).stop - watch.num_rows, metadata.rows(request).stop)
            pieces = watch.state.queries.setdefault(layer_idx, {})
            at, queries = metadata.positions[rows], q[rows]
            if not watch.ends:
                pieces[watch.first] = (at, queries.clone())
                continue
            earlier = [pieces[first] for first in sorted(pieces) if first < watch.first]
            seen = Window(
                torch.cat([*(piece[1] for piece in earlier), queries]),
                torch.cat([*(piece[0] for piece in earlier), at]),
                self.rotaries[layer_idx],
            )
            table = metadata.block_tables[request]
            layers = len(self.rotaries)
            view = BlockView(layer_idx, layers, scale, cache.key, cache.value, table, watch.num_tokens, seen)
            watch.state.scores[layer_idx] = self.metric.score(view)
            watch.state.window_positions = seen.positions
            watch.state.num_scored = watch.num_tokens if layer_idx == layers - 1 else 0
            pieces.clear()


class PromptMetric:
    """Scores the KVs of prompts as they are completed, where the metric looks at queries."""

    def __init__(self, metric: EvictionMetric, window: int, rotaries: Sequence[Rotary]) -> None:
        """`window`: of a prompt's last queries, how many count. `rotaries`: one a layer."""
        self.metric, self.window, self.rotaries = metric, window, rotaries

    def hook(self, items: Sequence[ScheduledRequest]) -> WindowHook | None:
        """What a step of ordinary blocks runs with; None where it computes no query of a window."""
        watched = {index: watch for index, item in enumerate(items) if (watch := self._watch(item)) is not None}
        return WindowHook(watched, self.metric, self.rotaries) if watched else None

    def _watch(self, item: ScheduledRequest) -> Watched | None:
        request = item.request
        state, total = request.compression, request.num_tokens
        if state is None or not state.settings.evicts:
            return None
        # What a blend recomputes of the context may be anywhere in it: the suffix it computes whole.
        start = request.blend.suffix_start if item.is_blend and request.blend is not None else item.start
        first = max(start, total - self.window)
        if item.stop <= first:
            return None
        return Watched(state, item.stop - first, first, item.stop == total, total)


class DecodeMetricHook(LayerHook):
    """Adds what the queries of a decode step attend to, in head pages, to what is known of each KV."""

    def __init__(
        self, metric: EvictionMetric, sums: torch.Tensor, positions: torch.Tensor, backend: AttentionBackend
    ) -> None:
        """sums [pages, block_size] float32 and positions [pages, block_size] int32, of the KVs in head pages. `backend`
        is what the pass attends with."""
        self.metric, self.sums, self.positions, self.backend = metric, sums, positions, backend

    def on_query(
        self,
        layer_idx: int,
        q: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> None:
        assert metadata.rope_positions is not None
        lse = None
        if window is None and ops.sums_take_lse(q, cache.key):
            lse = self.backend.attend_early(q, cache, metadata, scale)
        ops.accumulate_sums(
            self.sums,
            q,
            cache.key,
            metadata.block_tables,
            metadata.positions + 1,
            self.positions,
            metadata.rope_positions,
            scale,
            self.metric.power,
            self.metric.buffer,
            lse,
        )
