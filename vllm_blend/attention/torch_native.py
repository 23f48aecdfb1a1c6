"""The contract in plain torch: right everywhere, and the twin the compiled backends are tested against.

Requests with one query (decode) are computed together, in buckets of similar length. A request with more queries is
computed in tiles of its sorted queries; a tile reads keys only up to its own largest position, so scattered and causal
prefill cost about what they must. Keys are gathered per request, through its block table: the cache as a whole is never
copied.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata, LayerCache

QUERY_TILE = 256  # rows: small enough to skip most of the causal upper half, large enough for good products


class TorchNativeBackend(AttentionBackend):
    """See the module's docstring. Works on any device and dtype that torch supports."""

    name = "torch_native"

    def attend(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        decodes: list[int] = []
        for request in range(metadata.num_requests):
            rows = metadata.rows(request)
            length = rows.stop - rows.start
            if length == 1:
                decodes.append(request)
            elif length > 1:
                k, v = _gather(cache, metadata, request)
                out[rows] = _prefill(q[rows], k, v, metadata, rows, scale, sliding_window)
        for bucket in _length_buckets(decodes, metadata):
            _decode(q, cache, metadata, bucket, scale, sliding_window, out)
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
        masses = []
        for request, rows in enumerate(query_rows):
            n = metadata.seq_lens[request]
            if rows.stop == rows.start:
                masses.append(torch.zeros(n, device=q.device))
                continue
            k, _ = _gather(cache, metadata, request)
            grouped = _group(q[rows], k.shape[1]).float()  # [kv_heads, group * m, head_dim]
            scores = torch.matmul(grouped, k.permute(1, 2, 0).float()) * scale
            visible = _visible(metadata.positions[rows], 0, n, sliding_window)
            scores = scores.view(q.shape[1], -1, n).masked_fill(~visible, float("-inf"))
            masses.append(scores.softmax(-1).sum(1).mean(0))
        return masses


def _gather(cache: LayerCache, metadata: AttentionMetadata, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a request in order of position, each [seq_len, kv_heads, head_dim]."""
    n, block_size = metadata.seq_lens[request], cache.block_size
    blocks = metadata.block_tables[request, : -(-n // block_size)]
    return cache.key[blocks].flatten(0, 1)[:n], cache.value[blocks].flatten(0, 1)[:n]


def _group(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[m, heads, head_dim] -> [kv_heads, group * m, head_dim]: the query heads of a KV head side by side."""
    m, heads, head_dim = q.shape
    return q.view(m, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)


def _visible(positions: torch.Tensor, first_key: int, last_key: int, window: int | None) -> torch.Tensor:
    """Mask [queries, last_key - first_key]: which of those key positions each query sees."""
    keys = torch.arange(first_key, last_key, device=positions.device)
    seen = keys[None] <= positions[:, None]
    return seen if window is None else seen & (keys[None] > positions[:, None] - window)


def _prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    metadata: AttentionMetadata,
    rows: slice,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attention of one request's queries [m, heads, head_dim] at their positions over its k, v [n, kv_heads,
    head_dim]."""
    m, kv_heads = q.shape[0], k.shape[1]
    group = q.shape[1] // kv_heads
    if m == k.shape[0] and (window is None or m <= window):  # every position is a query: plainly causal
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
        mask = _visible(metadata.positions[absolute], first, last, window).repeat(group, 1)
        attended = F.scaled_dot_product_attention(
            _group(q[tile], kv_heads).unsqueeze(0), keys[:, :, first:last], values[:, :, first:last], mask, scale=scale
        )
        out[tile] = attended[0].view(kv_heads, group, -1, q.shape[2]).permute(2, 0, 1, 3).reshape(-1, *q.shape[1:])
    return out


def _length_buckets(requests: list[int], metadata: AttentionMetadata) -> list[list[int]]:
    """Requests grouped so that within a group no length is over twice another: padding stays below half."""
    buckets: dict[int, list[int]] = {}
    for request in requests:
        buckets.setdefault(metadata.seq_lens[request].bit_length(), []).append(request)
    return list(buckets.values())


def _decode(
    q: torch.Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    requests: list[int],
    scale: float,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """One query per request, for a bucket of requests at once; writes the rows of `out`."""
    heads, head_dim = q.shape[1:]
    kv_heads = cache.key.shape[2]
    rows = torch.tensor([metadata.query_start_loc[r] for r in requests], device=q.device)
    longest = max(metadata.seq_lens[r] for r in requests)
    index = torch.tensor(requests, device=q.device)
    blocks = metadata.block_tables[index, : -(-longest // cache.block_size)]
    k = cache.key[blocks].flatten(1, 2)[:, :longest]  # [requests, longest, kv_heads, head_dim], a copy
    v = cache.value[blocks].flatten(1, 2)[:, :longest]
    lengths = [metadata.seq_lens[r] for r in requests]
    if min(lengths) < longest:
        # Slots behind a shorter request hold what somebody left there. A weight of 0 does not silence a NaN.
        unused = torch.arange(longest, device=q.device) >= torch.tensor(lengths, device=q.device)[:, None]
        k.masked_fill_(unused[:, :, None, None], 0.0)
        v.masked_fill_(unused[:, :, None, None], 0.0)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    mask = _visible(metadata.positions[rows], 0, longest, window)[:, None, None]
    grouped = q[rows].view(-1, kv_heads, heads // kv_heads, head_dim)
    attended = F.scaled_dot_product_attention(grouped, k, v, mask, scale=scale)
    out[rows] = attended.reshape(-1, heads, head_dim)
