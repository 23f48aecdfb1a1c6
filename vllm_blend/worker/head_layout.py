"""Which KV of a prompt over compressed chunks is where: every head has its own, in head pages, in order of position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch

from vllm_blend.attention.metadata import AttentionMetadata
from vllm_blend.kv_compress.tables import HeadTables
from vllm_blend.ops.host_copy import to_device
from vllm_blend.request import Request

NOWHERE = torch.iinfo(torch.int64).max  # behind every position


@dataclass(frozen=True)
class HeadLayout:
    """Of one request: KV number r of a head has positions[layer, head, r] and is in the r-th slot of its pages, so a
    query at position p sees those of numbers up to `ranks(p)`. All on the host."""

    positions: torch.Tensor  # [L, H, n] int64, ascending; NOWHERE behind the last one of a head
    tables: torch.Tensor  # [L, H, W] int64 head pages
    block_size: int

    @classmethod
    def of(cls, request: Request, tables: HeadTables, computed: torch.Tensor | None = None) -> HeadLayout:
        """With the tokens at positions `computed` [m] in every head, beside what each has kept."""
        state, plan = request.compression, request.blend
        assert state is not None and state.index is not None and plan is not None
        positions = plan.head_positions(request.num_tokens).contiguous()
        if computed is not None:
            positions = united(positions, computed)
        width = -(-positions.shape[-1] // tables.block_size)
        pages = tables.tables[state.index, ..., :width].astype(np.int64)
        return cls(positions, torch.from_numpy(pages), tables.block_size)

    @property
    def lengths(self) -> torch.Tensor:
        """KVs of each head, [L, H] int64."""
        return (self.positions != NOWHERE).sum(-1)

    def ranks(self, at: torch.Tensor) -> torch.Tensor:
        """The numbers of the KVs at positions `at`, [m] of each head or [L, H, m], which every head has: [L, H, m]
        int64. Queries there see up to these. Raises RuntimeError where a head has none there."""
        wanted = at.expand(*self.positions.shape[:2], -1).contiguous()
        ranks = torch.searchsorted(self.positions, wanted)
        if not torch.equal(self.positions.gather(-1, ranks.clamp(max=self.positions.shape[-1] - 1)), wanted):
            raise RuntimeError("a head has no place for a token that is computed or placed")
        return ranks

    def slots(self, ranks: torch.Tensor) -> torch.Tensor:
        """Where the KVs of these numbers are: [L, H, m] int64."""
        return self.tables.gather(-1, ranks // self.block_size) * self.block_size + ranks % self.block_size


class HeadRows(Sequence[AttentionMetadata]):
    """The step, layer by layer, that computes tokens of requests in head pages. Every (token, KV head) is a request of
    one row for attention, of the keys that this row sees; rows go by token, then head. What a layer takes on the device
    is made when it is asked for."""

    def __init__(self, layouts: Sequence[HeadLayout], at: Sequence[torch.Tensor], device: torch.device) -> None:
        """`at`: of each request, the ascending positions [m] int64 on the host that are computed."""
        self.num_tokens, self.device = [len(positions) for positions in at], device
        ranks = [layout.ranks(positions) for layout, positions in zip(layouts, at, strict=True)]
        written = [layout.slots(mine) for layout, mine in zip(layouts, ranks, strict=True)]
        self.kv_heads = layouts[0].positions.shape[1]
        self._ranks = torch.cat(ranks, -1).transpose(1, 2).flatten(1)  # [L, rows]
        self._written = torch.cat(written, -1).transpose(1, 2).flatten(1)
        heads = torch.arange(self.kv_heads)
        first = torch.arange(len(layouts)) * self.kv_heads
        self._table_of = (torch.repeat_interleave(first, torch.tensor(self.num_tokens))[:, None] + heads).flatten()
        self._tables = padded([layout.tables for layout in layouts]).flatten(1, 2)  # [L, requests * H, W]
        logical = torch.cat(list(at)).repeat_interleave(self.kv_heads)
        self._logical, self._table_of = to_device(logical, device), to_device(self._table_of, device)

    def __len__(self) -> int:
        return len(self._ranks)

    @overload
    def __getitem__(self, layer: int) -> AttentionMetadata: ...

    @overload
    def __getitem__(self, layer: slice) -> Sequence[AttentionMetadata]: ...

    def __getitem__(self, layer: int | slice) -> AttentionMetadata | Sequence[AttentionMetadata]:
        if isinstance(layer, slice):
            return [self[index] for index in range(*layer.indices(len(self)))]
        ranks, rows = self._ranks[layer], self._ranks.shape[1]
        return AttentionMetadata(
            positions=to_device(ranks.contiguous(), self.device),
            slot_mapping=to_device(self._written[layer].contiguous(), self.device),
            block_tables=self.tables(layer)[self._table_of],
            query_start_loc=list(range(rows + 1)),
            seq_lens=(ranks + 1).tolist(),
            at_end=(True,) * rows,
            rope_positions=self._logical,
            per_head=True,
        )

    def tables(self, layer: int) -> torch.Tensor:
        """[requests * H, W] int32 on the device."""
        return to_device(self._tables[layer].to(torch.int32), self.device)


def padded(tables: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tables [L, H, W] as wide as the widest: [L, tables, H, W], with page 0 beyond their own."""
    width = max(table.shape[-1] for table in tables)
    return torch.stack([torch.nn.functional.pad(table, (0, width - table.shape[-1])) for table in tables], 1)


def united(positions: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """Ascending positions [L, H, n] with those in `more` [m] too, once each: [L, H, <= n + m], NOWHERE behind the last
    one of a head."""
    both = torch.cat([positions, more.expand(*positions.shape[:2], -1)], -1).sort(-1).values
    again = torch.zeros_like(both, dtype=torch.bool)
    again[..., 1:] = both[..., 1:] == both[..., :-1]
    both = both.masked_fill(again, NOWHERE).sort(-1).values
    return both[..., : int((both != NOWHERE).sum(-1).max())].contiguous()
