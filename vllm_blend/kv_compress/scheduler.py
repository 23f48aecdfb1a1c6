"""When requests are compressed, and how many of their pages each gives back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vllm_blend.kv_compress.config import KVCompressConfig
from vllm_blend.kv_compress.state import CompressionState
from vllm_blend.kv_compress.tables import HeadTables
from vllm_blend.request import Request


@dataclass(frozen=True)
class Eviction:
    """A request is to free `num_pages` pages of single heads; fewer where less may be evicted."""

    request: Request
    state: CompressionState
    num_pages: int


@dataclass
class KVCompressSchedulerOutput:
    adoptions: list[Eviction] = field(default_factory=list)  # whose prompts are complete, in ordinary blocks
    evictions: list[Eviction] = field(default_factory=list)  # of requests in head pages


class KVCompressScheduler:
    """Decides before every step that is chosen with nothing in flight.

    A request is compressed after so many tokens of its own, whoever else runs: what it answers does not depend on its
    batch, unless `new_token_limit` is given, pages run short, or more is due than `max_kv_per_compression`.
    """

    def __init__(self, config: KVCompressConfig, tables: HeadTables, step_tokens: int) -> None:
        """`step_tokens`: the most that a step computes."""
        self.config, self.tables, self.step_tokens = config, tables, step_tokens
        self._num_new_tokens = 0  # of all requests since everybody was compressed

    def step_taken(self, num_new_tokens: int) -> None:
        """A step has been queued that appends so many tokens to requests in head pages."""
        self._num_new_tokens += num_new_tokens

    @property
    def is_full(self) -> bool:
        """Whether requests have grown by `new_token_limit`."""
        limit = self.config.new_token_limit
        return limit is not None and self._num_new_tokens >= limit

    def is_due(self, state: CompressionState) -> bool:
        """Whether a request in head pages has grown enough, and holds more than it keeps."""
        return self._is_candidate(state) and self._excess(state) > 0

    def _has_grown(self, state: CompressionState) -> bool:
        return state.num_tokens - state.compressed_at >= self.config.kvc_interval

    def run(self, running: Sequence[Request], everybody: bool = False) -> KVCompressSchedulerOutput:
        """What the next step starts with: prompts that are complete leave their blocks, and whoever is due is
        compressed, or `everybody`."""
        output = KVCompressSchedulerOutput()
        in_head_pages: list[tuple[Request, CompressionState]] = []
        for request in running:
            state = request.compression
            if state is None:
                continue
            if state.index is not None:
                if not request.awaits_blend:
                    in_head_pages.append((request, state))
            elif is_complete(request):
                output.adoptions.append(Eviction(request, state, self._adopted(state, request.num_computed_tokens)))
        everybody = everybody or self.is_full
        if everybody:
            self._num_new_tokens = 0
        due = [(request, state) for request, state in in_head_pages if everybody or self._is_candidate(state)]
        candidates = (Eviction(request, state, self._excess(state)) for request, state in due)
        self._evict((one for one in candidates if one.num_pages), output)
        return output

    def _is_candidate(self, state: CompressionState) -> bool:
        return state.is_overdue or self._has_grown(state)

    def is_short(self, running: Sequence[Request]) -> bool:
        """Whether the next step of those that run takes more than is free, pages of heads or blocks. Everybody is to
        be compressed then: a request that gave its pages back would be computed again from the start."""
        states = [request.compression for request in running if request.compression is not None]
        if not self.tables.can_append([state.index for state in states if state.index is not None], 1):
            return True
        blocks, wanted, budget = self.tables.pool.blocks, 0, self.step_tokens
        for request in running:
            if request.in_head_pages:
                budget -= 1
                continue
            remaining = request.num_tokens - request.num_computed_tokens
            count = remaining if request.awaits_blend else min(remaining, max(0, budget))
            wanted += max(0, blocks.blocks_for(request.num_computed_tokens + count) - len(request.block_table))
            budget -= count
        return wanted > blocks.num_free_blocks

    def _evict(self, due: Iterable[Eviction], output: KVCompressSchedulerOutput) -> None:
        """As many as are sorted at a time, but at least one; the others are due as long as they are not."""
        num_kvs = 0
        for eviction in due:
            num_kvs += int(self.tables.lengths[eviction.state.index].sum())
            eviction.state.is_overdue = bool(output.evictions) and num_kvs > self.config.max_kv_per_compression
            if not eviction.state.is_overdue:
                output.evictions.append(eviction)

    def _adopted(self, state: CompressionState, num_tokens: int) -> int:
        """Pages of a prompt beyond those of the tokens it keeps."""
        size = self.tables.block_size
        kept = -(-state.settings.kept_tokens(num_tokens) // size)
        return self.tables.num_heads * max(0, -(-num_tokens // size) - kept)

    def _excess(self, state: CompressionState) -> int:
        """Pages that a request in head pages holds beyond those of the tokens it keeps; 0 where it is not compressed
        again."""
        if state.settings.compress_once and state.num_compressions:
            return 0
        size = self.tables.block_size
        kept = self.tables.num_heads * -(-state.settings.kept_tokens(state.num_tokens) // size)
        return max(0, int((-(-self.tables.lengths[state.index] // size)).sum()) - kept)


def is_complete(request: Request) -> bool:
    """Whether all of a request but its newest token is in ordinary blocks, and scored if the metric looks at queries:
    its next step would decode. One that starts again may stop a token short of its end, before its window is seen."""
    state, computed = request.compression, request.num_computed_tokens
    if state is None or state.index is not None or not request.output_token_ids or request.num_in_flight:
        return False
    return computed == request.num_tokens - 1 and (not state.window or state.num_scored == computed)
