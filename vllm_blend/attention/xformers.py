"""The contract on xformers' memory_efficient_attention_forward (Lefaudeux et al., 2022), with masks made once a step.

Requests with one row read the pages in place, through xformers' split-K Triton kernel. Prefills gather K and V of their
requests into one row of keys per layer. On those, a run of adjacent positions is a block of the gappy causal mask whose
keys end at the run's last position, so that runs share the keys of their request; scattered queries go in tiles with
their keys up to the tile's largest position and an explicit bias. A gappy mask cannot slide, so with a sliding window
every row is a block of its own: exact, and slower than it could be.

Masks are made on the host: a step with scattered rows reads its positions back once, which waits for the device.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata, LayerStep
from vllm_blend.attention.runs import Queries, SplitStep, mask_pieces, row_index, split_step, tile_masks
from vllm_blend.ops.host_copy import to_device
from vllm_blend.ops.paged_kv import PagedKV

TILE_ROWS = 1024
# Rows from which a run among scattered ones is worth a block of its own. 15% of 4096 tokens in runs of 32, on an H200
# at 32/8 heads of 128: 0.34 ms a layer as blocks, 0.66 in tiles; in runs of 16, 0.57 and 0.69.
LONG_RUN = 32
TRITON_HEAD_DIMS = (16, 32, 64, 128, 256, 512)
SMALLEST_PAGE = 16  # keys: what a block of the Triton kernel takes at least


@dataclass(frozen=True)
class _Call:
    rows: slice | torch.Tensor
    bias: Any
    op: Any  # None: xformers chooses
    keys: slice | None  # of the gathered ones; None: the paged cache itself


@dataclass(frozen=True)
class _Plan:
    slots: torch.Tensor | None  # [keys] int64, of the gathered keys
    calls: list[_Call]


@dataclass
class _Plans:
    metadata: AttentionMetadata
    by_window: dict[int | None, _Plan] = field(default_factory=dict)


class XFormersBackend(AttentionBackend):
    """See the module's docstring. Takes float16 and bfloat16. Raises ImportError when xformers is not installed.

    The attention mass is computed in plain torch: xformers has no kernel for it.
    """

    name = "xformers"

    def __init__(self) -> None:
        from xformers.ops import fmha

        self._fmha = fmha
        self._has_triton = importlib.util.find_spec("triton") is not None
        # Only these two take a bias of numbers, and the first is in the compiled part of the package.
        self._bias_op = fmha.cutlass.FwOp if fmha.cutlass.FwOp.is_available() else fmha.triton_splitk.FwOp
        self._plans: _Plans | None = None

    def attend(self, step: LayerStep) -> torch.Tensor:
        q, kv = step.q, step.kv
        if self._plans is None or self._plans.metadata is not step.metadata:
            self._plans = _Plans(step.metadata)
        plan = self._plans.by_window.get(step.window)
        if plan is None:
            plan = self._plans.by_window[step.window] = self._plan(step)
        kv_heads, head_dim = kv.kv_heads, kv.head_dim
        group = q.shape[1] // kv_heads
        paged = tuple(c.view(1, -1, kv_heads, 1, head_dim) for c in (kv.key, kv.value))
        gathered = paged if plan.slots is None else tuple(c[:, plan.slots] for c in paged)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for call in plan.calls:
            k, v = (
                pair.expand(-1, -1, -1, group, -1)
                for pair in (paged if call.keys is None else (c[:, call.keys] for c in gathered))
            )
            queries = q[call.rows].reshape(1, -1, kv_heads, group, head_dim)
            attended = self._fmha.memory_efficient_attention_forward(
                queries, k, v, attn_bias=call.bias, scale=step.scale, op=call.op
            )
            out[call.rows] = attended.reshape(-1, *q.shape[1:])
        return out

    def _plan(self, step: LayerStep) -> _Plan:
        metadata, device = step.metadata, step.q.device
        split = split_step(metadata, 1, step.window, LONG_RUN, TILE_ROWS)
        paged = self._paged_op(step.kv)
        calls = []
        if len(split.single) and paged is not None:
            calls.append(self._single_rows_call(split.single, metadata, step.kv.block_size, paged))
        # Where each request's keys begin among the gathered ones; requests that need none have none.
        lengths = np.zeros(metadata.num_requests, np.int64)
        for part in (split.causal, split.tiles, *([] if paged is not None else [split.single])):
            np.maximum.at(lengths, part.request, part.first_key + part.num_keys)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        if starts[-1] == 0:
            return _Plan(None, calls)
        if len(split.single) and paged is None:
            calls.append(self._gappy_call(split.single, starts, causal=True, device=device))
        if step.window is not None:
            rows = split_rows(metadata, split, step.window)
            if len(rows):
                calls.append(self._gappy_call(rows, starts, causal=False, device=device))
        else:
            if len(split.causal):
                calls.append(self._gappy_call(split.causal, starts, causal=True, device=device))
            if len(split.tiles):
                calls += self._tile_calls(split.tiles, starts, step)
        return _Plan(_slots(lengths, metadata, step.kv.block_size), calls)

    def _paged_op(self, kv: PagedKV) -> Any:
        """Return the split-K kernel made to read our pages, None if it cannot."""
        if not self._has_triton or kv.head_dim not in TRITON_HEAD_DIMS or kv.block_size % SMALLEST_PAGE:
            return None
        base = self._fmha.triton_splitk.FwOp
        block = next(n for n in (64, 32, 16) if kv.block_size % n == 0)
        return base if block == base.BLOCK_N else type(base.__name__, (base,), {"BLOCK_N": block})

    def _single_rows_call(self, part: Queries, metadata: AttentionMetadata, block_size: int, op: Any) -> _Call:
        tables = metadata.block_tables
        if len(part) != metadata.num_requests:
            tables = tables[to_device(part.request, tables.device)]
        # A paged mask is made of one whose requests lie one after the other, each padded to its row of the tables.
        masks = self._fmha.attn_bias
        padded = tables.shape[1] * block_size
        starts = np.arange(len(part) + 1) * padded
        starts[:-1] += part.first_key
        unpaged = masks.BlockDiagonalGappyKeysMask.from_seqlens(
            q_seqlen=[1] * len(part),
            kv_seqstarts=starts.tolist(),
            kv_seqlen=part.num_keys.tolist(),
            device=tables.device,
        )
        bias = unpaged.make_paged(tables.contiguous(), block_size, padded, masks.PagedBlockDiagonalGappyKeysMask)
        return _Call(row_index(part.rows, tables.device), bias, op, None)

    def _gappy_call(self, part: Queries, starts: np.ndarray, causal: bool, device: torch.device) -> _Call:
        masks = self._fmha.attn_bias
        kind = masks.BlockDiagonalCausalWithOffsetGappyKeysMask if causal else masks.BlockDiagonalGappyKeysMask
        bias = kind.from_seqlens(
            q_seqlen=part.lengths.tolist(),
            kv_seqstarts=[*(starts[part.request] + part.first_key).tolist(), int(starts[-1])],
            kv_seqlen=part.num_keys.tolist(),
            device=device,
        )
        return _Call(row_index(part.rows, device), bias, None, slice(None))

    def _tile_calls(self, part: Queries, starts: np.ndarray, step: LayerStep) -> list[_Call]:
        calls = []
        q, kv_heads = step.q, step.kv.kv_heads
        pieces = mask_pieces(part, tile_masks(part, step.metadata.positions, None))
        for index, visible in enumerate(pieces):
            m, n = visible.shape
            bias = torch.zeros(m, -(-n // 8) * 8, dtype=q.dtype, device=q.device)[:, :n]  # rows aligned to 16 bytes
            bias.masked_fill_(~visible, float("-inf"))
            rows = part.rows[part.offsets[index] : part.offsets[index + 1]]
            start = int(starts[part.request[index]])
            expanded = bias.expand(1, kv_heads, q.shape[1] // kv_heads, m, n)
            calls.append(_Call(row_index(rows, q.device), expanded, self._bias_op, slice(start, start + n)))
        return calls


def split_rows(metadata: AttentionMetadata, step: SplitStep, window: int) -> Queries:
    """Return every row of the causal runs and tiles as an entry of its own, with exactly the keys of its window."""
    rows = np.sort(np.concatenate([step.causal.rows, step.tiles.rows]))
    positions = np.asarray(metadata.host_positions, np.int64)[rows]
    request = np.searchsorted(np.asarray(metadata.query_start_loc), rows, side="right") - 1
    first = np.maximum(0, positions - window + 1)
    return Queries(rows, np.ones_like(rows), request, first, positions + 1 - first)


def _slots(lengths: np.ndarray, metadata: AttentionMetadata, block_size: int) -> torch.Tensor:
    """Return the cache slots of the first lengths[r] positions of every request, [sum of lengths] int64 on the
    device."""
    tables = metadata.block_tables
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    positions = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    blocks = np.repeat(np.arange(len(lengths)) * tables.shape[1], lengths) + positions // block_size
    at, within = to_device(np.stack([blocks, positions % block_size]), tables.device)
    slots: torch.Tensor = tables.reshape(-1)[at].long() * block_size + within
    return slots
