"""The mean shift: what is not computed again is corrected by what is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_blend import ops
from vllm_blend.attention.context import LayerHook
from vllm_blend.attention.metadata import AttentionMetadata
from vllm_blend.layers.rotary import RotaryEmbedding
from vllm_blend.ops.mean_shift import MeanShiftPlan
from vllm_blend.ops.paged_kv import PagedKV
from vllm_blend.worker.batch import Span


def mean_shift_hook(spans: Sequence[Span], rotaries: Sequence[RotaryEmbedding]) -> MeanShiftHook | None:
    """Return the hook that corrects tokens which are reused as they are, for the selectors that ask for it; None for
    most steps."""
    reused = []
    for index, span in enumerate(spans):
        plan = span.request.blend
        if plan is None or span.positions is None:
            continue
        if not plan.mean_shift:
            continue
        for segment in plan.segments:
            tokens = min(segment.stop, plan.suffix_start) - segment.start  # those within the context
            if not segment.exact and tokens > 0:
                k, v = segment.kv.k[:, :tokens], segment.kv.v[:, :tokens]
                reused.append(ops.ShiftedSegment(index, segment.start, k, v, plan.mean_shift))
    return MeanShiftHook(reused, rotaries) if reused else None


class MeanShiftHook(LayerHook):
    """Adds the mean change of K and V of a chunk's recomputed tokens to its others, layer by layer (AgentKVShift).

    K is shifted before RoPE. The pages are the request's own; what is stored stays as it is. A chunk of which nothing
    is recomputed, or all, is left alone.
    """

    def __init__(self, reused: Sequence[ops.ShiftedSegment], rotaries: Sequence[RotaryEmbedding]) -> None:
        """reused: the segments of the step's requests whose KV is not known to be exact."""
        self._reused, self._rotaries = reused, rotaries
        self._sources: ops.ShiftSources | None = None
        self._plan: tuple[AttentionMetadata, MeanShiftPlan] | None = None  # and the rows that it holds for

    def on_unrotated_kv(
        self, layer_idx: int, kv: PagedKV, metadata: AttentionMetadata, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        if self._sources is None:
            self._sources = ops.ShiftSources(self._reused, kv)
        if self._plan is None or self._plan[0] is not metadata:  # at check layers, rows leave the step
            rows = (metadata.positions, metadata.query_start_loc, metadata.block_tables)
            self._plan = metadata, ops.plan_mean_shift(self._sources, *rows, kv)
        rotary = self._rotaries[layer_idx]
        ops.mean_shift(self._plan[1], layer_idx, k, v, rotary.cos, rotary.sin, kv)
