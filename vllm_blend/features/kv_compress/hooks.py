"""The layer hooks of KV-Compress: the last queries of a prompt score its KVs, and decode steps add to that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm_blend.attention.context import LayerHook
from vllm_blend.attention.metadata import AttentionBackend, LayerStep
from vllm_blend.core.step import ScheduledRequest
from vllm_blend.features.kv_compress import ops
from vllm_blend.features.kv_compress.metrics import BlockView, EvictionMetric, Window
from vllm_blend.features.kv_compress.state import COMPRESSION, CompressionState
from vllm_blend.features.kv_compress.sums import KeyRows, SumRule
from vllm_blend.layers.rotary import RotaryEmbedding


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
    kept, and are until the request moves to head pages, as the step that completes a prompt may be done again. Those of
    a step that is done again replace its own."""

    def __init__(
        self, watched: Mapping[int, Watched], metric: EvictionMetric, rotaries: Sequence[RotaryEmbedding]
    ) -> None:
        """Watch these requests, by their places in the step. `rotaries` has one for each layer."""
        self.watched, self.metric, self.rotaries = watched, metric, rotaries

    def on_query(self, step: LayerStep) -> None:
        q, kv, metadata, scale, layer_idx = step.q, step.kv, step.metadata, step.scale, step.layer_idx
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
            view = BlockView(layer_idx, layers, scale, kv, table, watch.num_tokens, seen)
            watch.state.scores[layer_idx] = self.metric.score(view)
            watch.state.window_positions = seen.positions
            watch.state.num_scored = watch.num_tokens if layer_idx == layers - 1 else 0


class PromptMetric:
    """Scores the KVs of prompts as they are completed, for a metric that looks at queries."""

    def __init__(self, metric: EvictionMetric, window: int, rotaries: Sequence[RotaryEmbedding]) -> None:
        """Count the last `window` queries of a prompt. `rotaries` has one for each layer."""
        self.metric, self.window, self.rotaries = metric, window, rotaries

    def hook(self, items: Sequence[ScheduledRequest]) -> WindowHook | None:
        """Return the hook of a step of ordinary blocks; None if it computes no query of a window."""
        watched = {index: watch for index, item in enumerate(items) if (watch := self._watch(item)) is not None}
        return WindowHook(watched, self.metric, self.rotaries) if watched else None

    def _watch(self, item: ScheduledRequest) -> Watched | None:
        request = item.request
        state, total = COMPRESSION.get(request), request.num_tokens
        if state is None or not state.settings.evicts:
            return None
        # What a blend recomputes of the context may be anywhere in it: the suffix it computes whole.
        start = request.blend.suffix_start if item.is_blend and request.blend is not None else item.start
        first = max(start, total - self.window)
        if item.stop <= first:
            return None
        return Watched(state, item.stop - first, first, item.stop == total, total)


class DecodeMetricHook(LayerHook):
    """Adds the attention that the queries of a decode step pay to the KVs in head pages to their sums."""

    def __init__(
        self, metric: EvictionMetric, sums: torch.Tensor, positions: torch.Tensor, backend: AttentionBackend
    ) -> None:
        """Add to `sums` [pages, block_size] float32 of the KVs in head pages, which are at `positions` [pages,
        block_size] int32. `backend` is what the pass attends with."""
        self.metric, self.sums, self.positions, self.backend = metric, sums, positions, backend

    def on_query(self, step: LayerStep) -> None:
        metadata = step.metadata
        assert metadata.rope_positions is not None
        lse = None
        if step.window is None and ops.sums_take_lse(step.q, step.kv):
            lse = self.backend.attend_early(step)
        lengths = metadata.positions + 1
        key_rows = KeyRows(metadata.block_tables, lengths, self.positions, metadata.rope_positions)
        rule = SumRule(step.scale, self.metric.power, self.metric.buffer)
        ops.accumulate_sums(self.sums, step.q, step.kv, key_rows, rule, lse)
