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

    def __bool__(self) -> bool:
        return bool(self.adoptions or self.evictions)


class KVCompressScheduler:
    """Decides before every step that is chosen with nothing in flight."""

    def __init__(self, config: KVCompressConfig, tables: HeadTables) -> None:
        self.config, self.tables = config, tables
        self._num_steps = 0  # since requests in head pages were last compressed
        self._num_new_tokens = 0
        self._left_over = False  # some were not, as others had taken what may be sorted at a time

    def step_taken(self, num_new_tokens: int) -> None:
        """A step has been queued that appends so many tokens to requests in head pages."""
        self._num_steps += 1
        self._num_new_tokens += num_new_tokens

    @property
    def is_due(self) -> bool:
        """Whether requests that have been compressed are to be looked at again, whatever the pages."""
        limit = self.config.new_token_limit
        full = limit is not None and self._num_new_tokens >= limit
        return self._left_over or full or self._num_steps >= self.config.kvc_interval

    def run(self, running: Sequence[Request]) -> KVCompressSchedulerOutput:
        """What the next step starts with. Prompts that are complete always leave their blocks; the rest is compressed
        when it is due, and when the pages do not hold one more token of everybody: a request that gave its pages back
        would be computed again from the start."""
        output = KVCompressSchedulerOutput()
        compressed, indices = [], []
        for request in running:
            state = request.compression
            if state is None:
                continue
            if state.index is not None:
                compressed.append((request, state))
                indices.append(state.index)
            elif is_complete(request):
                output.adoptions.append(Eviction(request, state, self._excess(state, request.num_computed_tokens)))
        if self.is_due or not self.tables.can_append(indices, 1):
            self._evict(compressed, output)
        return output

    def _evict(self, compressed: Iterable[tuple[Request, CompressionState]], output: KVCompressSchedulerOutput) -> None:
        self._num_steps = self._num_new_tokens = 0
        self._left_over = False
        sorted_kvs = 0
        for request, state in compressed:
            if state.settings.compress_once and state.num_compressions:
                continue
            num_pages = self._excess(state, state.num_tokens)
            if num_pages <= 0:
                continue
            sorted_kvs += int(self.tables.lengths[state.index].sum())
            if output.evictions and sorted_kvs > self.config.max_kv_per_compression:
                self._left_over = True
                return
            output.evictions.append(Eviction(request, state, num_pages))

    def _excess(self, state: CompressionState, num_tokens: int) -> int:
        """Pages that a request of `num_tokens` tokens holds, or would, beyond those of the tokens it keeps."""
        size, heads = self.tables.block_size, self.tables.num_heads
        kept = heads * -(-state.settings.kept_tokens(num_tokens) // size)
        held = heads * -(-num_tokens // size)
        if state.index is not None:
            held = int((-(-self.tables.lengths[state.index] // size)).sum())
        return max(0, held - kept)


def is_complete(request: Request) -> bool:
    """Whether all of a request but its newest token is in ordinary blocks: its next step would decode."""
    drawn = bool(request.output_token_ids) and request.num_in_flight == 0
    return drawn and not request.in_head_pages and request.num_computed_tokens == request.num_tokens - 1
