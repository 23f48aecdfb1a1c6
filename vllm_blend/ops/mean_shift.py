"""The mean shift: the reused tokens of a segment move by the mean change of those that are computed again.

`ShiftSources` are made once for a step, a plan once for the rows of a step, and `mean_shift` then does a layer. Nothing
waits for the device to say which tokens were chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from vllm_blend.ops import cuda
from vllm_blend.ops import pointers as to
from vllm_blend.ops.cuda_library import DTYPES, cache_view, check, expect, rows_of, stream_of
from vllm_blend.ops.e4m3 import as_bytes, narrowed, widened
from vllm_blend.ops.host_copy import to_device
from vllm_blend.ops.paged_kv import PagedKV
from vllm_blend.ops.rotary import rotary_embedding

TILE = 16  # VB_SHIFT_TILE
SEGMENT = np.dtype(
    [(name, np.int64) for name in ("k", "v", "layer_stride", "token_stride")]
    + [(name, np.int32) for name in ("first_token", "tokens", "position", "request")]
    + [(name, np.int32) for name in ("row_start", "row_stop", "first_tile")]
    + [("strength", np.float32)]
)  # VbShiftSegment


@dataclass(frozen=True)
class ShiftedSegment:
    """Adjacent positions of a request of the step whose KV is stored, and how strongly it is shifted."""

    request: int
    start: int  # its first position
    k: torch.Tensor  # before RoPE, [layers, tokens, kv_heads, head_dim], on any device
    v: torch.Tensor
    strength: float

    @property
    def num_tokens(self) -> int:
        return self.k.shape[1]


class ShiftSources:
    """The segments of a step, whose tokens are counted one segment behind the other: T tokens of S segments.

    What the kernel cannot read where it lies, on the host for example, it reads from a copy, which is made layer by
    layer.
    """

    def __init__(self, segments: Sequence[ShiftedSegment], kv: PagedKV) -> None:
        """`kv`: any layer's cache. Raises ValueError for a segment that does not fit it."""
        if not segments:
            raise ValueError("segments is empty: make no ShiftSources where nothing is shifted")
        heads = (kv.kv_heads, kv.head_dim)
        for each in segments:
            if each.k.dim() != 4 or each.k.shape != each.v.shape or each.k.shape[2:] != heads or not each.num_tokens:
                raise ValueError(
                    f"segment K {list(each.k.shape)} and V {list(each.v.shape)} must both be [layers, tokens, "
                    f"{heads[0]}, {heads[1]}], as the cache has {heads[0]} KV heads of {heads[1]}, and hold a token"
                )
        self.segments = tuple(segments)
        self.device = kv.key.device
        self.num_layers = min(len(each.k) for each in segments)
        self.lengths = np.array([each.num_tokens for each in segments])
        self.first_tokens = np.cumsum([0, *self.lengths])
        self.num_tokens = int(self.first_tokens[-1])
        self.stop = max(each.start + each.num_tokens for each in segments)
        same_dtype = all(each.k.dtype == each.v.dtype == kv.dtype for each in segments)
        self.is_compiled = same_dtype and cuda.accepts_pages(kv.key, kv.head_dim)
        self._copies: list[tuple[ShiftedSegment, torch.Tensor, torch.Tensor]] = []

    def copy_layer(self, layer: int) -> None:
        """Copy what the kernel reads from copies, on the current stream."""
        for segment, k, v in self._copies:
            k.copy_(segment.k[layer], non_blocking=True)
            v.copy_(segment.v[layer], non_blocking=True)

    @cached_property
    def table(self) -> np.ndarray:
        """Return what the kernels know of the segments, [S] of `SEGMENT`, but for the rows of the step."""
        rows = []
        for each, first in zip(self.segments, self.first_tokens, strict=False):
            k, v, layer_stride = each.k, each.v, each.k.stride(0)
            if not _is_readable(each, self.device):
                k, v = (torch.empty(t.shape[1:], dtype=t.dtype, device=self.device) for t in (k, v))
                self._copies.append((each, k, v))
                layer_stride = 0
            token_stride = k.stride(-3)
            place = (first, each.num_tokens, each.start, each.request, 0, 0, 0)
            rows.append((k.data_ptr(), v.data_ptr(), layer_stride, token_stride, *place, each.strength))
        table = np.array(rows, SEGMENT)
        table["first_tile"] = np.cumsum([0, *self._tiles_of_each])[:-1]
        return table

    @cached_property
    def tiles(self) -> torch.Tensor:
        """Return the segment of each tile, [tiles] int32."""
        return to_device(np.repeat(np.arange(len(self.segments), dtype=np.int32), self._tiles_of_each), self.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Return the position of each token, [T] int64."""
        ranges = [np.arange(each.start, each.start + each.num_tokens) for each in self.segments]
        return to_device(np.concatenate(ranges), self.device)

    @cached_property
    def segment_of(self) -> torch.Tensor:
        """Return the segment of each token, [T] int64."""
        return to_device(np.repeat(np.arange(len(self.segments)), self.lengths), self.device)

    def column(self, name: str) -> torch.Tensor:
        """Return an attribute of all segments on the device: [S, 1] int64, or float32 for the strength."""
        values = np.array([getattr(each, name) for each in self.segments])
        kind = np.float32 if values.dtype.kind == "f" else np.int64
        return to_device(values.astype(kind)[:, None], self.device)

    @cached_property
    def _tiles_of_each(self) -> np.ndarray:
        return -(-self.lengths // TILE)


def _is_readable(segment: ShiftedSegment, device: torch.device) -> bool:
    """Return whether the kernel can read a segment where it lies."""
    k, v = segment.k, segment.v
    return (
        k.device == v.device == device
        and k.stride() == v.stride()
        and k.stride()[2:] == (k.shape[3], 1)
        and not (k.stride(0) | k.stride(1)) % 8
        and not (k.data_ptr() | v.data_ptr()) % 16
    )


@dataclass
class MeanShiftPlan:
    """The rows of a step that lie in each segment, and where the tokens that move are written."""

    sources: ShiftSources
    positions: torch.Tensor  # [N] int64, of the step's rows
    query_start_loc: Sequence[int]  # host, of the step's requests
    block_size: int
    rows: torch.Tensor  # [S, 2] int32: the first row in each segment, and the one behind its last
    slots: torch.Tensor  # [T] int64: the slot of each token that moves, ~slot of those that are left alone
    table: torch.Tensor | None = None  # on the device, where the kernels run
    shift: torch.Tensor | None = None  # [S, 2, kv_heads * head_dim] float32, of the layer that was done last

    @cached_property
    def is_inside(self) -> torch.Tensor:
        """Return whether each row is in each segment, [S, N] bool."""
        row = torch.arange(len(self.positions), device=self.rows.device)
        return (row >= self.rows[:, :1]) & (row < self.rows[:, 1:])

    @cached_property
    def weights(self) -> torch.Tensor:
        """Return what the change of each row counts for each segment, [S, N] float32."""
        count = (self.rows[:, 1:] - self.rows[:, :1]).clamp_min(1)
        return self.is_inside * (self.sources.column("strength") / count)

    @cached_property
    def stored_at(self) -> torch.Tensor:
        """Return the token that each row computes again, [N] int64; any where it is in no segment."""
        first = to_device(self.sources.first_tokens[:-1, None], self.rows.device)
        offset = (self.is_inside * (first - self.sources.column("start"))).sum(0)
        return torch.where(self.is_inside.any(0), offset + self.positions, 0)


def plan_mean_shift(
    sources: ShiftSources,
    positions: torch.Tensor,
    query_start_loc: Sequence[int],
    block_tables: torch.Tensor,
    kv: PagedKV,
) -> MeanShiftPlan:
    """Return where the tokens of `sources` go in a step, for all its layers.

    positions: [N] int64, ascending in each request; query_start_loc: host offsets of the requests' rows; block_tables:
    [requests, max_blocks] int32. A token that a row computes again is left alone, and so is every token of a segment of
    which nothing is computed. Segments of a request do not overlap.
    """
    if not sources.is_compiled:
        return plan_mean_shift_reference(sources, positions, query_start_loc, block_tables, kv)
    table = sources.table.copy()
    starts = np.asarray(query_start_loc, np.int32)
    table["row_start"], table["row_stop"] = starts[table["request"]], starts[table["request"] + 1]
    on_device = to_device(table.view(np.uint8), sources.device)
    count = len(table)
    rows = torch.empty(count, 2, dtype=torch.int32, device=sources.device)
    slots = torch.empty(sources.num_tokens, dtype=torch.int64, device=sources.device)
    code = cuda.functions().mean_shift_plan(
        to.Segments(on_device), expect(to.Positions, positions, "positions", torch.int64),
        expect(to.BlockTables, block_tables, "block_tables", torch.int32, False), to.Slots(slots), to.Rows(rows),
        block_tables.stride(0), count, kv.block_size, stream_of(slots),
    )  # fmt: skip
    check("plan_mean_shift", code)
    shift = torch.empty(count, 2, kv.kv_heads * kv.head_dim, dtype=torch.float32, device=sources.device)
    return MeanShiftPlan(sources, positions, query_start_loc, kv.block_size, rows, slots, on_device, shift)


def plan_mean_shift_reference(
    sources: ShiftSources,
    positions: torch.Tensor,
    query_start_loc: Sequence[int],
    block_tables: torch.Tensor,
    kv: PagedKV,
) -> MeanShiftPlan:
    """Run the plain torch twin of `plan_mean_shift`."""
    device, size = sources.device, kv.block_size
    requests = [each.request for each in sources.segments]
    bounds = np.asarray(query_start_loc, np.int64)
    first_row, stop_row = (to_device(bounds[[r + i for r in requests], None], device) for i in (0, 1))
    row = torch.arange(len(positions), device=device)
    is_own = (row >= first_row) & (row < stop_row)
    start = sources.column("start")
    first = first_row + (is_own & (positions < start)).sum(1, keepdim=True)
    last = first_row + (is_own & (positions < start + sources.column("num_tokens"))).sum(1, keepdim=True)
    rows = torch.cat([first, last], 1).to(torch.int32)
    owner = sources.column("request")[:, 0][sources.segment_of]
    slots = block_tables[owner, sources.positions // size].long() * size + sources.positions % size
    plan = MeanShiftPlan(sources, positions, query_start_loc, size, rows, slots)
    is_computed = torch.zeros(sources.num_tokens + 1, dtype=torch.bool, device=device)
    is_computed[torch.where(plan.is_inside.any(0), plan.stored_at, sources.num_tokens)] = True  # the last: of none
    plan.slots = torch.where(is_computed[:-1] | (first == last)[:, 0][sources.segment_of], ~slots, slots)
    return plan


def mean_shift(
    plan: MeanShiftPlan,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: PagedKV,
) -> None:
    """Write the reused tokens of a layer, shifted by strength * mean(computed - stored) of their segment, to its cache.

    k (before RoPE), v: what the step has computed, [N, kv_heads, head_dim]; cos, sin: float32 tables [positions,
    rotary_dim / 2]. The mean is taken in float32 in a fixed order, K is rotated in float32, and both are cast once.
    Raises ValueError, before anything is written, for shapes that do not fit together.
    """
    sources, shape = plan.sources, (len(plan.positions), kv.kv_heads, kv.head_dim)
    if k.shape != shape or v.shape != shape or not 0 <= layer < sources.num_layers:
        raise ValueError(
            f"k {list(k.shape)} and v {list(v.shape)} of layer {layer} must be {list(shape)}, as the plan's rows and "
            f"the cache have it, of one of the {sources.num_layers} layers that are stored"
        )
    if cos.shape != sin.shape or len(cos) < sources.stop:
        raise ValueError(
            f"cos {list(cos.shape)} and sin {list(sin.shape)} must be alike, with a row for each of {sources.stop} "
            "positions"
        )
    fits = k.dtype == v.dtype and cuda.fit(k.dtype, kv.dtype)
    if not (plan.table is not None and fits and cuda.accepts_pages(kv.key, cos.shape[-1])):
        return mean_shift_reference(plan, layer, k, v, cos, sin, kv)
    assert plan.table is not None and plan.shift is not None
    sources.copy_layer(layer)
    view = cache_view(kv)
    code = cuda.functions().mean_shift(
        to.Segments(plan.table), to.Tiles(sources.tiles), to.Positions(plan.positions), to.Rows(plan.rows),
        to.Slots(plan.slots), rows_of(to.Key, k, "k", k.dtype), rows_of(to.Value, v, "v", k.dtype),
        expect(to.Cos, cos, "cos", torch.float32), expect(to.Sin, sin, "sin", torch.float32), to.Shift(plan.shift),
        view.key, view.value, k.stride(0), v.stride(0), view.page_stride, view.slot_stride, view.head_stride, layer,
        len(sources.segments), len(sources.tiles), kv.kv_heads, kv.head_dim, cos.shape[-1], kv.block_size,
        DTYPES[k.dtype], view.dtype, stream_of(k),
    )  # fmt: skip
    return check("mean_shift", code)


def mean_shift_reference(
    plan: MeanShiftPlan,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: PagedKV,
) -> None:
    """Run the plain torch twin of `mean_shift`."""
    sources, size = plan.sources, plan.block_size
    stored = [[each.k[layer] for each in sources.segments], [each.v[layer] for each in sources.segments]]
    keys, values = (_shifted(plan, new, old) for new, old in zip((k, v), stored, strict=True))
    keys = rotary_embedding(keys, cos[sources.positions], sin[sources.positions])
    moves = (plan.slots >= 0)[:, None, None]
    slots = torch.where(plan.slots >= 0, plan.slots, ~plan.slots)
    where = slots // size, slots % size
    for pages, moved in ((kv.key, keys), (kv.value, values)):
        there = as_bytes(pages)
        there[where] = torch.where(moves, as_bytes(narrowed(moved, pages.dtype)), there[where])


def _shifted(plan: MeanShiftPlan, computed: torch.Tensor, stored: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all stored tokens after their segment's shift, whether they move or not: [T, kv_heads, head_dim]."""
    sources = plan.sources
    old = widened(torch.cat([part.to(computed.device, non_blocking=True) for part in stored]), torch.float32)
    shift = old.new_zeros(len(sources.segments), old[0].numel())
    for request in dict.fromkeys(each.request for each in sources.segments):
        segments = [i for i, each in enumerate(sources.segments) if each.request == request]
        own = slice(segments[0], segments[-1] + 1)  # those of other requests in between count nothing here
        rows = slice(plan.query_start_loc[request], plan.query_start_loc[request + 1])
        change = computed[rows].float() - old[plan.stored_at[rows]]
        shift[own] += plan.weights[own, rows] @ change.flatten(1)
    return old + shift.view(-1, *old.shape[1:])[sources.segment_of]
