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
from typing import NamedTuple

import torch

from vllm_blend import ops
from vllm_blend.attention.kv_scales import KVScales
from vllm_blend.ops.attention import attention_mass_reference
from vllm_blend.ops.paged_kv import PagedKV


@dataclass(frozen=True)
class AttentionMetadata:
    """The positions and slots of a step's tokens, and the pages of each request's keys.

    Tokens of one request are adjacent rows with strictly ascending positions. All positions below `seq_lens[r]` of
    request r are filled in the cache once this step's own K and V are written.
    """

    positions: torch.Tensor  # [tokens] int64, position of each token in its request
    slot_mapping: torch.Tensor  # [tokens] int64, the cache slot that receives each token's K and V
    block_tables: torch.Tensor  # [requests, max_blocks] int32, padded with 0
    query_start_loc: list[int]  # requests + 1 host offsets: request r has rows [r] up to [r + 1]
    seq_lens: list[int]  # host, filled slots of each request, this step's tokens included
    # Host, per request: its rows are its last positions, with none left out. None if that is not known.
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
        """Return `positions` on the host, once per step. They are read from the device, which waits for a GPU, unless
        `at_end` tells: our own kernels never ask."""
        if self.at_end is None or not all(self.at_end):
            return self.positions.tolist()
        ends = zip(self.seq_lens, pairwise(self.query_start_loc), strict=True)
        return [position for n, (start, stop) in ends for position in range(n - stop + start, n)]

    @cached_property
    def host_tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `query_start_loc` and `seq_lens` as int64 tensors on the host, made once per step."""
        return (
            torch.tensor(self.query_start_loc, dtype=torch.int64),
            torch.tensor(self.seq_lens, dtype=torch.int64),
        )

    def rows(self, request: int) -> slice:
        """Return the rows of the step's tensors that belong to a request."""
        return slice(self.query_start_loc[request], self.query_start_loc[request + 1])

    def narrow(self, rows: torch.Tensor, query_start_loc: list[int]) -> AttentionMetadata:
        """Return the same step with only `rows` (int64, ascending) still active; the keys stay as they are."""
        return replace(
            self,
            positions=self.positions[rows],
            slot_mapping=self.slot_mapping[rows],
            query_start_loc=query_start_loc,
            at_end=None,
            device_query_start_loc=None,
            rope_positions=None if self.rope_positions is None else self.rope_positions[rows],
        )


class LayerStep(NamedTuple):
    """What one layer computes in a step: its backend attends by it, and its hooks are shown it.

    A named tuple, because every layer makes one in every step and a frozen dataclass takes five times as long to make.
    """

    q: torch.Tensor  # [tokens, heads, head_dim], after RoPE
    kv: PagedKV
    metadata: AttentionMetadata
    scale: float  # of the scores
    window: int | None = (
        None  # a query at position t sees keys from position t - window + 1 on; None: from the first on
    )
    layer_idx: int = 0
    sinks: torch.Tensor | None = None  # [heads]: a score of each head that takes part in its softmax and is no key's
    kv_scales: KVScales | None = None  # q, K and V are in these units; None: as the model has them

    def part(self, rows: slice | torch.Tensor, metadata: AttentionMetadata) -> LayerStep:
        """Return the same layer's work for some rows, which are all that `metadata` describes."""
        return self._replace(q=self.q[rows], metadata=metadata)


class AttentionBackend(ABC):
    """One way to compute the contract. Implementations are registered by name in `attention/registry.py`."""

    name: str
    smallest_block: int = 1  # tokens of a page of the cache, at least
    capturable_decode: bool = False  # whether steps of one row a request may be captured into a CUDA graph
    capturable_prefill: bool = False  # whether steps of any rows may, and follow `device_query_start_loc`
    capturable_mass: bool = False  # whether passes that measure attention mass may, for any number of rows and keys
    capturable_cascade: bool = False  # whether `attend_with_lse` may, and follows `device_query_start_loc`

    @abstractmethod
    def attend(self, step: LayerStep) -> torch.Tensor:
        """Return the attention of the step's queries over its paged cache, [tokens, heads, head_dim].

        A key at position p is seen by a query at position t iff p <= t and, with a sliding window w, p > t - w. Where
        the step has `sinks`, what they take of the attention goes nowhere.
        """

    def attention_mass(self, step: LayerStep, query_rows: list[slice]) -> list[torch.Tensor]:
        """Return the attention probability that each key position receives, per request: [seq_len] float32, summed over
        the query rows `query_rows[r]` (rows of q) and averaged over heads. An empty slice gives zeros.

        Here in plain torch: few libraries have a kernel for it.
        """
        q, kv, metadata, scale, window = step[:5]
        where = (metadata.positions, metadata.block_tables, query_rows, metadata.seq_lens)
        return attention_mass_reference(q, kv, *where, scale, window, step.sinks)

    def another(self) -> AttentionBackend:
        """Return a backend for `attend_with_lse` of a second step beside this one's, layer by layer in turns: one that
        plans its steps needs another to keep that plan."""
        return self

    def attend_with_lse(self, step: LayerStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `attend` of the few rows of decode steps with the log-sum-exp [tokens, heads] float32 of their scores,
        to be merged with attention over other keys (`ops.merge_states`). The step's window and sinks are ignored."""
        q, kv, metadata, scale = step[:4]
        starts = metadata.query_start_loc
        if metadata.device_query_start_loc is not None:
            starts = metadata.device_query_start_loc.tolist()
        states = (metadata.positions, metadata.block_tables, starts, metadata.seq_lens, scale)
        out, lse = ops.attention_states(q, kv, *states)
        return out.to(q.dtype), lse

    def attend_early(self, step: LayerStep) -> torch.Tensor | None:
        """Return the log-sum-exp [tokens, heads] float32 of the scores of decode steps, before their layer attends: the
        output that comes with it is kept for `attend` of the same q, which is next. None if it would take another
        pass over the keys."""
        return None

    def add_attention_mass(
        self,
        masses: list[torch.Tensor],
        step: LayerStep,
        query_rows: list[slice],
        ignored: torch.Tensor | None = None,
    ) -> None:
        """Add a layer's `attention_mass` to `masses`, per request [kv_heads, seq_len] float32.

        What counts is the sum over dimension 0: a backend may keep the parts of the KV heads apart until the end.
        `ignored` [tokens] bool, for backends with `capturable_mass`: rows that do not count, wherever they are.
        """
        if ignored is not None:
            raise NotImplementedError(f"the attention backend {self.name!r} measures every row it is given")
        for total, mass in zip(masses, self.attention_mass(step, query_rows), strict=True):
            total[0] += mass
