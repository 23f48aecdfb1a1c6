"""The contract in plain torch: right everywhere, and the twin the compiled backends are tested against.

Requests with one query (decode) are computed together, in buckets of similar length. A request with more queries is
computed in tiles of its sorted queries; a tile reads keys only up to its own largest position, so scattered and causal
prefill cost about what they must. Keys are gathered per request, through its block table: the cache as a whole is never
copied.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata, LayerStep
from vllm_blend.ops.e4m3 import gathered, widened
from vllm_blend.ops.paged_kv import PagedKV

QUERY_TILE = 256  # rows: small enough to skip most of the causal upper half, large enough for good products


class TorchNativeBackend(AttentionBackend):
    """See the module's docstring. Works on any device and dtype that torch supports."""

    name = "torch_native"

    def attend(self, step: LayerStep) -> torch.Tensor:
        metadata = step.metadata
        out = torch.empty_like(step.q)
        decodes: list[int] = []
        for request in range(metadata.num_requests):
            rows = metadata.rows(request)
            length = rows.stop - rows.start
            if length == 1:
                decodes.append(request)
            elif length > 1:
                out[rows] = _prefill(step, request)
        for bucket in _length_buckets(decodes, metadata):
            _decode(step, bucket, out)
        return out


def _gather(
    kv: PagedKV, metadata: AttentionMetadata, request: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of a request in `dtype` and in order of position, each [seq_len, kv_heads, head_dim]."""
    n, block_size = metadata.seq_lens[request], kv.block_size
    blocks = metadata.block_tables[request, : -(-n // block_size)]
    k, v = (gathered(pages, blocks).flatten(0, 1)[:n] for pages in (kv.key, kv.value))
    return widened(k, dtype), widened(v, dtype)


def _group(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return q [m, heads, head_dim] as [kv_heads, group * m, head_dim]: the query heads of a KV head side by side."""
    m, heads, head_dim = q.shape
    return q.view(m, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)


def _visible(positions: torch.Tensor, first_key: int, last_key: int, window: int | None) -> torch.Tensor:
    """Return a mask [queries, last_key - first_key]: which of those key positions each query sees."""
    keys = torch.arange(first_key, last_key, device=positions.device)
    seen = keys[None] <= positions[:, None]
    return seen if window is None else seen & (keys[None] > positions[:, None] - window)


def _masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Return the attention of q [n, kv_heads, rows, head_dim] where `mask` (bool) allows it. `sinks` [.., kv_heads,
    rows] are the scores of one key more, whose value is zero."""
    if sinks is not None:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        added = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
        column = sinks.to(q.dtype)[..., None].expand(len(q), -1, -1, -1)
        mask = torch.cat([added.expand(*q.shape[:3], -1), column], -1)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)


def _prefill(step: LayerStep, request: int) -> torch.Tensor:
    """Return the attention of one request's queries [m, heads, head_dim] at their positions."""
    metadata, scale, window = step.metadata, step.scale, step.window
    rows = metadata.rows(request)
    q, (k, v) = step.q[rows], _gather(step.kv, metadata, request, step.q.dtype)
    m, kv_heads = q.shape[0], k.shape[1]
    group = q.shape[1] // kv_heads
    is_causal = m == k.shape[0] and (window is None or m <= window)  # every position is a query
    if is_causal and step.sinks is None:
        by_head = [t.transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
        causal = F.scaled_dot_product_attention(
            by_head[0], by_head[1], by_head[2], is_causal=True, scale=scale, enable_gqa=group > 1
        )
        return causal[0].transpose(0, 1)
    keys, values = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
    out = torch.empty_like(q)
    for start in range(0, m, QUERY_TILE):
        tile = slice(start, min(start + QUERY_TILE, m))
        absolute = slice(rows.start + tile.start, rows.start + tile.stop)
        last = metadata.host_positions[absolute.stop - 1] + 1
        first = 0 if window is None else max(0, metadata.host_positions[absolute.start] - window + 1)
        mask = _visible(metadata.positions[absolute], first, last, window).repeat(group, 1)[None, None]
        grouped, sinks = _group(q[tile], kv_heads).unsqueeze(0), step.sinks
        if sinks is not None:  # of each row
            sinks = sinks.view(1, kv_heads, group, 1).expand(-1, -1, -1, grouped.shape[2] // group).flatten(2)
        attended = _masked(grouped, keys[:, :, first:last], values[:, :, first:last], mask, scale, sinks)
        out[tile] = attended[0].view(kv_heads, group, -1, q.shape[2]).permute(2, 0, 1, 3).reshape(-1, *q.shape[1:])
    return out


def _length_buckets(requests: list[int], metadata: AttentionMetadata) -> list[list[int]]:
    """Return requests in groups within which no length is over twice another: padding stays below half."""
    buckets: dict[int, list[int]] = {}
    for request in requests:
        buckets.setdefault(metadata.seq_lens[request].bit_length(), []).append(request)
    return list(buckets.values())


def _decode(step: LayerStep, requests: list[int], out: torch.Tensor) -> None:
    """Attend with one query per request, for a bucket of requests at once; write the rows of `out`."""
    q, kv, metadata, scale, window = step[:5]
    heads, head_dim = q.shape[1:]
    rows = torch.tensor([metadata.query_start_loc[r] for r in requests], device=q.device)
    longest = max(metadata.seq_lens[r] for r in requests)
    index = torch.tensor(requests, device=q.device)
    blocks = metadata.block_tables[index, : -(-longest // kv.block_size)]
    k, v = (  # [requests, longest, kv_heads, head_dim], copies
        widened(gathered(pages, blocks).flatten(1, 2)[:, :longest], q.dtype) for pages in (kv.key, kv.value)
    )
    lengths = [metadata.seq_lens[r] for r in requests]
    if min(lengths) < longest:
        # Slots behind a shorter request hold what an earlier request left there. A weight of 0 does not silence a NaN.
        unused = torch.arange(longest, device=q.device) >= torch.tensor(lengths, device=q.device)[:, None]
        k.masked_fill_(unused[:, :, None, None], 0.0)
        v.masked_fill_(unused[:, :, None, None], 0.0)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    mask = _visible(metadata.positions[rows], 0, longest, window)[:, None, None]
    grouped = q[rows].view(-1, kv.kv_heads, heads // kv.kv_heads, head_dim)
    sinks = None if step.sinks is None else step.sinks.view(1, kv.kv_heads, -1)
    attended = _masked(grouped, k, v, mask, scale, sinks)
    out[rows] = attended.reshape(-1, heads, head_dim)
