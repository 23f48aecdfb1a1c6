"""Decide when requests are compressed, and how many of their pages each frees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vllm_blend.features.kv_compress.config import KVCompressConfig
from vllm_blend.features.kv_compress.state import COMPRESSION, CompressionState, in_head_pages
from vllm_blend.features.kv_compress.tables import HeadTables
from vllm_blend.request import Request


@dataclass(frozen=True)
class Eviction:
    """A request that frees `num_pages` head pages; fewer if less may be evicted."""

    request: Request
    state: CompressionState
    num_pages: int


@dataclass
class KVCompressSchedulerOutput:
    prompts: list[Eviction] = field(default_factory=list)  # complete in ordinary blocks, which they now leave
    evictions: list[Eviction] = field(default_factory=list)  # from requests in head pages


class KVCompressScheduler:
    """Decides before every step that is chosen with nothing in flight.

    A request is compressed after so many tokens of its own, whatever else runs: its answer does not depend on its
    batch, unless `new_token_limit` is given, pages run short, or more is due than `max_kv_per_compression`.
    """

    def __init__(self, config: KVCompressConfig, tables: HeadTables, step_tokens: int) -> None:
        """Schedule compressions over these tables. A step computes at most `step_tokens` tokens."""
        self.config, self.tables, self.step_tokens = config, tables, step_tokens
        self._num_new_tokens = 0  # of all requests, since all were last compressed

    def count_new_tokens(self, num_new_tokens: int) -> None:
        """Count the tokens that a queued step appends to requests in head pages."""
        self._num_new_tokens += num_new_tokens

    @property
    def is_full(self) -> bool:
        """Return whether requests have grown by `new_token_limit`."""
        limit = self.config.new_token_limit
        return limit is not None and self._num_new_tokens >= limit

    def is_due(self, state: CompressionState) -> bool:
        """Return whether a request in head pages has grown enough, and holds more than it keeps."""
        return self._is_candidate(state) and self._count_excess_pages(state) > 0

    def schedule(self, running: Sequence[Request], compress_all: bool = False) -> KVCompressSchedulerOutput:
        """Choose what happens before the next step: complete prompts leave their blocks, and the requests that are due
        are compressed, or all of them."""
        output = KVCompressSchedulerOutput()
        compressible: list[tuple[Request, CompressionState]] = []
        for request in running:
            state = COMPRESSION.get(request)
            if state is None:
                continue
            if state.index is not None:
                compressible.append((request, state))
            elif is_complete(request):
                output.prompts.append(Eviction(request, state, self._prompt_excess(state, request.num_computed_tokens)))
        compress_all = compress_all or self.is_full
        if compress_all:
            self._num_new_tokens = 0
        due = [(request, state) for request, state in compressible if compress_all or self._is_candidate(state)]
        candidates = (Eviction(request, state, self._count_excess_pages(state)) for request, state in due)
        self._evict((one for one in candidates if one.num_pages), output)
        return output

    def _is_candidate(self, state: CompressionState) -> bool:
        return state.is_overdue or state.num_tokens - state.compressed_at >= self.config.kvc_interval

    def is_short(self, running: Sequence[Request]) -> bool:
        """Return whether the next step takes more head pages or blocks than are free. All requests are compressed then,
        as one that returned its pages would be computed again from the start."""
        states = [state for state in map(COMPRESSION.get, running) if state is not None]
        if not self.tables.can_append([state.index for state in states if state.index is not None], 1):
            return True
        blocks, wanted, budget = self.tables.pool.blocks, 0, self.step_tokens
        for request in running:
            if in_head_pages(request):
                budget -= 1
                continue
            remaining = request.num_tokens - request.num_computed_tokens
            count = remaining if request.awaits_blend else min(remaining, max(0, budget))
            wanted += max(0, blocks.blocks_for(request.num_computed_tokens + count) - len(request.block_table))
            budget -= count
        return wanted > blocks.num_free_blocks

    def _evict(self, due: Iterable[Eviction], output: KVCompressSchedulerOutput) -> None:
        """Evict from as many requests as are sorted at a time, but at least one; the others stay due."""
        num_kvs = 0
        for eviction in due:
            num_kvs += int(self.tables.lengths[eviction.state.index].sum())
            eviction.state.is_overdue = bool(output.evictions) and num_kvs > self.config.max_kv_per_compression
            if not eviction.state.is_overdue:
                output.evictions.append(eviction)

    def _prompt_excess(self, state: CompressionState, num_tokens: int) -> int:
        """Return the pages that a prompt would take beyond those of the tokens it keeps."""
        size = self.tables.block_size
        kept = -(-state.settings.kept_tokens(num_tokens) // size)
        return self.tables.num_heads * max(0, -(-num_tokens // size) - kept)

    def _count_excess_pages(self, state: CompressionState) -> int:
        """Return the pages that a request in head pages holds beyond those of the tokens it keeps; 0 if it is not
        compressed again."""
        if state.settings.compress_once and state.num_compressions:
            return 0
        size = self.tables.block_size
        kept = self.tables.num_heads * -(-state.settings.kept_tokens(state.num_tokens) // size)
        return max(0, int((-(-self.tables.lengths[state.index] // size)).sum()) - kept)


def is_complete(request: Request) -> bool:
    """Return whether all of a request but its newest token is in ordinary blocks, and scored if the metric looks at
    queries: its next step would decode. One that starts again may stop a token short of its end, before its window."""
    state, computed = COMPRESSION.get(request), request.num_computed_tokens
    if state is None or state.index is not None or not request.output_token_ids or request.num_in_flight:
        return False
    return computed == request.num_tokens - 1 and (not state.window or state.num_scored == computed)
