"""Chunk KV on its way from the store to a request's pages."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from vllm_blend import ops
from vllm_blend.blend.plan import BlendPlan
from vllm_blend.layers.rotary import RotaryEmbedding
from vllm_blend.request import Request
from vllm_blend.worker.batch import to_device
from vllm_blend.worker.kv_cache import KVCache


def place_segments(request: Request, plan: BlendPlan, model: nn.Module, cache: KVCache) -> None:
    """Write the stored KV of a plan to the request's pages, K rotated to the positions it has in this request."""
    if not plan.segments:
        return
    device = cache.key.device
    positions = np.arange(max(segment.stop for segment in plan.segments))
    table = np.asarray(request.block_table, np.int64)
    slots = table[positions // cache.block_size] * cache.block_size + positions % cache.block_size
    both = to_device(torch.from_numpy(np.stack([positions, slots])), device)
    for layers, rotary in _runs_of_layers(model):
        cos, sin = rotary.cos_sin(both[0])
        keys, values = cache.key[layers], cache.value[layers]
        for segment in plan.segments:  # one launch each: merging them would copy the stored KV first
            where = slice(segment.start, segment.stop)
            k = segment.kv.k[layers].to(device, non_blocking=True)
            v = segment.kv.v[layers].to(device, non_blocking=True)
            ops.place_chunk(k, v, cos[where], sin[where], keys, values, both[1, where])


def _runs_of_layers(model: nn.Module) -> Iterator[tuple[slice, RotaryEmbedding]]:
    """Runs of layers that rotate alike: one run in nearly every model."""
    rotaries = [layer.self_attn.attn.rotary for layer in model.model.layers]  # type: ignore[union-attr]
    start = 0
    for stop in range(1, len(rotaries) + 1):
        if stop == len(rotaries) or rotaries[stop] is not rotaries[start]:
            yield slice(start, stop), rotaries[start]
            start = stop
