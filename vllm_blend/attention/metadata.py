"""The attention contract: a step is a set of (request, position) tokens.

Every backend implements one function, `AttentionBackend.attend`: each query token sees exactly the filled slots of its
own request whose position is <= its own. Queries of a request may be any ascending subset of its positions (holes are
normal), so the mask is never inferred from shapes: a "bottom-right causal" mask is wrong here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch

from vllm_blend import ops


@dataclass(frozen=True)
class AttentionMetadata:
    """Where the tokens of a step are, and where each request's keys lie.

    Tokens of one request are adjacent rows with strictly ascending positions. All positions below `seq_lens[r]` of
    request r are filled in the cache once this step's own K and V are written.
    """

    positions: torch.Tensor  # [tokens] int64, position of each token in its request
    slot_mapping: torch.Tensor  # [tokens] int64, the cache slot that receives each token's K and V
    block_tables: torch.Tensor  # [requests, max_blocks] int32, padded with 0
    query_start_loc: list[int]  # requests + 1 host offsets: request r has rows [r] up to [r + 1]
    seq_lens: list[int]  # host, filled slots of each request, this step's tokens included
    # Host, per request: its rows are its last positions, with none left out. None where that is not known.
    at_end: tuple[bool, ...] | None = None
    # [requests + 1] int32 on the device: what holds there where a graph is replayed with other numbers of rows than
    # `query_start_loc`, which it was captured with, says.
    device_query_start_loc: torch.Tensor | None = None
    # [tokens] int64, where RoPE puts the tokens. None: at `positions`. They differ where blocks of a request are left
    # out of its block table: attention counts the keys that are there.
    rope_positions: torch.Tensor | None = None
    # Each KV head of a request is a request here, with the query heads that share it: a row is one KV head of a token,
    # q is [tokens * kv_heads, heads per KV head, head_dim], and the cache has one KV head. Tables and lengths then
    # differ by head, and by layer.
    per_head: bool = False

    @property
    def num_tokens(self) -> int:
        return self.query_start_loc[-1]

    @property
    def num_requests(self) -> int:
        return len(self.seq_lens)

    @cached_property
    def host_positions(self) -> list[int]:
        """`positions` on the host, once per step. Read from the device, which waits for a GPU, unless `at_end` tells:
        our own kernels never ask."""
        if self.at_end is None or not all(self.at_end):
            return self.positions.tolist()
        ends = zip(self.seq_lens, pairwise(self.query_start_loc), strict=True)
        return [position for n, (start, stop) in ends for position in range(n - stop + start, n)]

    def rows(self, request: int) -> slice:
        """Rows of the step's tensors that belong to a request."""
        return slice(self.query_start_loc[request], self.query_start_loc[request + 1])

    def narrow(self, rows: torch.Tensor, query_start_loc: list[int]) -> AttentionMetadata:
        """The same step with only `rows` (int64, ascending) still active; the keys stay as they are."""
        return replace(
            self,
            positions=self.positions[rows],
            slot_mapping=self.slot_mapping[rows],
            query_start_loc=query_start_loc,
            at_end=None,
            device_query_start_loc=None,
            rope_positions=None if self.rope_positions is None else self.rope_positions[rows],
        )


@dataclass(frozen=True)
class LayerCache:
    """Paged K (after RoPE) and V of one layer, each [num_blocks, block_size, kv_heads, head_dim]."""

    key: torch.Tensor
    value: torch.Tensor

    @property
    def block_size(self) -> int:
        return self.key.shape[1]


class AttentionBackend(ABC):
    """One way to compute the contract. Implementations are registered by name in `attention/registry.py`."""

    name: str
    smallest_block: int = 1  # tokens of a page of the cache, at least
    capturable_decode: bool = False  # whether steps of one row a request may be captured into a CUDA graph
    capturable_mass: bool = False  # whether passes that measure attention mass may, for any number of rows and keys
    capturable_cascade: bool = False  # whether `attend_with_lse` may, and follows `device_query_start_loc`

    @abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        """Attention of q [tokens, heads, head_dim] over the paged cache -> [tokens, heads, head_dim].

        A key at position p is seen by a query at position t iff p <= t and, with a sliding window w, p > t - w.
        """

    @abstractmethod
    def attention_mass(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
        query_rows: list[slice],
        sliding_window: int | None = None,
    ) -> list[torch.Tensor]:
        """Attention probability received by each key position, per request: [seq_len] float32, summed over the query
        rows `query_rows[r]` (rows of q) and averaged over heads. An empty slice gives zeros."""

    def another(self) -> AttentionBackend:
        """A backend for `attend_with_lse` of a second step beside this one's, layer by layer in turns: one that plans
        its steps needs another to keep that plan."""
        return self

    def attend_with_lse(
        self, q: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`attend` of the few rows of decode steps, with the log-sum-exp [tokens, heads] float32 of their scores, to be
        merged with attention over other keys (`ops.merge_states`)."""
        positions, tables, starts = metadata.positions, metadata.block_tables, metadata.query_start_loc
        if metadata.device_query_start_loc is not None:
            starts = metadata.device_query_start_loc.tolist()
        states = (positions, tables, starts, metadata.seq_lens, scale)
        out, lse = ops.attention_states(q, cache.key, cache.value, *states)
        return out.to(q.dtype), lse

    def attend_early(
        self, q: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata, scale: float
    ) -> torch.Tensor | None:
        """The log-sum-exp [tokens, heads] float32 of the scores of decode steps, before their layer attends: the output
        that comes with it is kept for `attend` of the same q, which is next. None where it would take another pass over
        the keys."""
        return None

    def add_attention_mass(
        self,
        masses: list[torch.Tensor],
        q: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
        query_rows: list[slice],
        sliding_window: int | None = None,
        ignored: torch.Tensor | None = None,
    ) -> None:
        """Add a layer's `attention_mass` to `masses`, per request [kv_heads, seq_len] float32.

        What counts is the sum over dimension 0: a backend may keep the parts of the KV heads apart until the end.
        `ignored` [tokens] bool, for backends with `capturable_mass`: rows that do not count, wherever they are.
        """
        if ignored is not None:
            raise NotImplementedError(f"the attention backend {self.name!r} measures every row it is given")
        layer = self.attention_mass(q, cache, metadata, scale, query_rows, sliding_window)
        for total, mass in zip(masses, layer, strict=True):
            total[0] += mass
