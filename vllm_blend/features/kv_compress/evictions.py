"""The choice of KVs whose eviction frees pages (KV-Compress, Rehg 2024, section 3).

A head page is free when a whole page's worth of its head's KVs has gone, so KVs are evicted in groups. The evictable
KVs of a head, those with a position in [num_sinks, protected_from), are sorted by metric, then position; metrics that
differ by rounding only count as equal. The first group is as many of the lowest as its last page holds, each
further one the next `block_size`; a group is only one if all of it is evictable. A group is worth its largest metric,
and across heads the groups worth least go first (ties: the lower layer, then head, then group), so that those of a head
always go in its own order.

Equal tokens have keys of the same norm, for example, but matrix products round by the shape of a batch, so their scores
differ in the last bits, and not alike in any two batches. Scores so close together are a tie, and the position breaks
it, so that a request's batch does not decide. A tie is a run of sorted scores whose neighbours are close. That is an
equivalence, and rounding moves no score across an edge unless two different scores happen to differ by just the
tolerance; a grid of rounded scores would cut through every tie that lies on one of its lines.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_blend.features.kv_compress.config import Allocation

SORTED_TOGETHER = 1 << 22  # KVs of several requests that are sorted at a time, with padding; of one request, all
SORTED_BYTES = 120  # the most memory that sorting takes for each, beside its metric and position
_LAST = torch.iinfo(torch.int64).max  # sorts behind everything
# Relative: above the rounding of sums in float32, some 2**-21, and below the mean distance of 32,000 different scores.
# Keys in half precision are coarser than that: rounding of a batch may still decide between equal tokens there.
TOLERANCE = 2.0**-18


@dataclass(frozen=True)
class Evictions:
    """The KVs that go, by layer and KV head; of one request, or of several with a leading dimension."""

    evicted: torch.Tensor  # [L, H, n] bool
    num_blocks: torch.Tensor  # [L, H] int64, the pages that become free

    def new_lengths(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return how many KVs each head keeps of its `lengths` [L, H] int64."""
        return lengths - self.evicted.sum(-1)


def schedule_evictions(
    metric: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    num_blocks: int | torch.Tensor,
    num_sinks: int | torch.Tensor,
    protected_from: int | torch.Tensor,
    block_size: int,
    allocation: Allocation,
    magnitude: float = 0.0,
) -> Evictions:
    """Return evictions that free at most `num_blocks` head pages of one request.

    `metric` [L, H, n] float32 (higher is worth more) and `positions` [L, H, n] int64 of the KVs, of which the first
    `lengths` [L, H] int64 of a head are there; KVs at positions below `num_sinks` and from `protected_from` on stay.
    `allocation`: "global", where all heads of all layers compete; "layer", where the heads of a layer do and every
    layer frees the same number (Ada-KV, Feng et al. 2024); "head", where every head frees the same number.

    All of these may have a leading dimension of requests, and each number may be a tensor [requests] int64 then. The
    result is what each request would get alone.

    `magnitude` is the least size that rounding of the metric is relative to (`EvictionMetric.magnitude`). A metric that
    is NaN counts as the lowest, -0.0 as 0.0. Nothing waits for a GPU, and ties never depend on the device.
    Raises ValueError for a negative number, an unknown allocation or tensors that do not fit together.
    """
    if isinstance(num_blocks, int) and num_blocks < 0:
        raise ValueError(f"num_blocks={num_blocks} must be at least 0")
    if metric.dtype != torch.float32 or positions.shape != metric.shape or lengths.shape != metric.shape[:-1]:
        raise ValueError(
            f"metric {tuple(metric.shape)} {metric.dtype}, positions {tuple(positions.shape)} and lengths "
            f"{tuple(lengths.shape)} must be [L, H, n] float32, [L, H, n] and [L, H]"
        )
    rank = torch.arange(metric.shape[-1], device=metric.device)
    evictable = (
        (rank < lengths[..., None])
        & (positions >= _per_request(num_sinks))
        & (positions < _per_request(protected_from))
    )
    order_key = torch.where(evictable, (_sort_keys(metric) << 32) | positions, _LAST)
    order_key, order = order_key.sort(dim=-1, stable=True)
    order_key, again = _with_ties(order_key, metric.gather(-1, order), magnitude).sort(dim=-1, stable=True)
    order = order.gather(-1, again)
    hanging = lengths - ((lengths - 1).clamp(min=0) // block_size) * block_size  # KVs in the last page
    worth, num_groups = _groups(order_key, evictable.sum(-1), hanging, block_size)
    freed = _cheapest(worth, num_groups, num_blocks, allocation, magnitude)
    count = torch.where(freed > 0, hanging + (freed - 1) * block_size, 0)
    lowest = rank < count[..., None]
    return Evictions(torch.zeros_like(lowest).scatter_(-1, order, lowest), freed)


def _per_request(number: int | torch.Tensor) -> int | torch.Tensor:
    """Return a number for each request in a shape that broadcasts to [requests, L, H, n]."""
    return number if isinstance(number, int) else number[:, None, None, None]


def _sort_keys(metric: torch.Tensor) -> torch.Tensor:
    """Return integers, int64 within int32's range, that sort as the metrics do; NaN the lowest, -0.0 as 0.0."""
    bits = (metric + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    bits = torch.where(bits < 0, bits ^ torch.iinfo(torch.int32).max, bits).long()
    return torch.where(metric.isnan(), torch.iinfo(torch.int32).min, bits)


def _metric(ordered: torch.Tensor) -> torch.Tensor:
    """Return the metrics that `_sort_keys` made `ordered` of; a NaN for `_LAST`."""
    bits = ordered.clamp(max=torch.iinfo(torch.int32).max).int()
    return torch.where(bits < 0, bits ^ torch.iinfo(torch.int32).max, bits).view(torch.float32)


def _with_ties(order_key: torch.Tensor, metric: torch.Tensor, magnitude: float) -> torch.Tensor:
    """Return the sorted `order_key` with the metric of a whole tie, its lowest, in each of its KVs; `metric` is sorted
    alike."""
    lowest = order_key.gather(-1, tie_starts(metric, magnitude)) >> 32 << 32
    return torch.where(order_key == _LAST, _LAST, lowest | (order_key & torch.iinfo(torch.uint32).max))


def _groups(
    order_key: torch.Tensor, count: torch.Tensor, hanging: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the worth of every group, [..., L, H, G] int64 (`_LAST`: no such group), and each head's groups."""
    n = order_key.shape[-1]
    num_groups = torch.where((count >= hanging) & (hanging > 0), 1 + (count - hanging) // block_size, 0)
    group = torch.arange(-(-n // block_size), device=order_key.device)
    last = hanging[..., None] + group * block_size - 1  # its most valuable KV
    worth = order_key.gather(-1, last.clamp(0, max(n - 1, 0))) >> 32
    return torch.where(group < num_groups[..., None], worth, _LAST), num_groups


def _cheapest(
    worth: torch.Tensor,
    num_groups: torch.Tensor,
    num_blocks: int | torch.Tensor,
    allocation: Allocation,
    magnitude: float,
) -> torch.Tensor:
    """Return how many groups each head gives up, [..., L, H] int64."""
    num_layers, num_heads, _ = worth.shape[-3:]
    if allocation == "head":
        each = num_groups.flatten(-2).amin(-1).clamp(max=num_blocks // (num_layers * num_heads))
        return each[..., None, None].expand_as(num_groups)
    if allocation == "global":
        pools, quota = worth.flatten(-3), num_groups.flatten(-2).sum(-1).clamp(max=num_blocks)[..., None]
    elif allocation == "layer":
        each = num_groups.sum(-1).amin(-1).clamp(max=num_blocks // num_layers)
        pools, quota = worth.flatten(-2), each[..., None, None]
    else:
        raise ValueError(f"allocation={allocation!r} is unknown: use 'global', 'layer' or 'head'")
    ascending, order = pools.sort(dim=-1, stable=True)
    in_ties = tie_starts(_metric(ascending), magnitude) * pools.shape[-1] + order
    order = order.gather(-1, torch.where(ascending == _LAST, _LAST, in_ties).sort(dim=-1, stable=True).indices)
    given_up = torch.arange(pools.shape[-1], device=worth.device) < quota
    chosen = torch.zeros_like(pools, dtype=torch.bool).scatter_(-1, order, given_up.expand_as(pools))
    return chosen.view_as(worth).sum(-1)


def tie_starts(scores: torch.Tensor, magnitude: float) -> torch.Tensor:
    """Return the index of the first score of each score's tie, int64 like `scores` [..., n], which are sorted.

    `magnitude` is the least size that rounding is relative to: 0 where scores are as exact as their own size, 1 where
    they are differences of numbers around 1. NaN and infinite scores tie with their equals.
    """
    before, after = scores[..., :-1], scores[..., 1:]
    scale = torch.maximum(before.abs(), after.abs()).clamp_(min=magnitude)
    close = (after - before).abs() <= scale * TOLERANCE
    same = (before == after) | (before.isnan() & after.isnan()) | (close & before.isfinite() & after.isfinite())
    starts = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape).clone()
    starts[..., 1:].masked_fill_(same, 0)
    return starts.cummax(-1).values if starts.shape[-1] else starts
