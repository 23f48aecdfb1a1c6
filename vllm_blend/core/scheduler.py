"""Which tokens of which requests go into the next step: continuous batching with chunked prefill and preemption.

Running requests come first (decodes, and the rest of prefills already begun), then waiting ones in order of arrival, as
far as the token budget, the number of sequences and the pages allow. When pages run out, the request that started last
gives its own back and is computed again later.

Both queues are sorted by priority before that, so a request of a lower number runs earlier and keeps its pages longer.
A waiting request never takes the place of a running one.
"""

from __future__ import annotations

import time
from bisect import insort_left, insort_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_blend.core.block_manager import BlockManager, OutOfBlocks, Retained, chain_digest
from vllm_blend.kv_compress.config import CompressionSettings
from vllm_blend.kv_compress.state import CompressionState
from vllm_blend.kv_compress.tables import HeadTables
from vllm_blend.request import CompositionKey, Request, RequestStatus


@dataclass(frozen=True)
class ScheduledRequest:
    """Positions start .. start + num_tokens - 1 of a request. A blend covers all of them and computes the chosen
    ones. The last positions hold `drafts`, guesses that the step is to verify."""

    request: Request
    start: int
    num_tokens: int
    is_blend: bool = False
    drafts: tuple[int, ...] = ()

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def known_stop(self) -> int:
        """Where the positions end whose tokens are not mere guesses."""
        return self.stop - len(self.drafts)

    @property
    def is_prefill(self) -> bool:
        """Whether it computes several tokens of which none is a guess."""
        return self.num_tokens - len(self.drafts) > 1

    @property
    def is_decode(self) -> bool:
        """Whether this is the next token of a request that has begun to answer."""
        request = self.request
        return self.num_tokens == 1 and self.samples and bool(request.output_token_ids or request.num_in_flight)

    @property
    def samples(self) -> bool:
        """Whether this step computes the request's last known token, so that the next one can be sampled."""
        return self.request.params is not None and self.known_stop == self.request.num_tokens


@dataclass
class SchedulerOutput:
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)  # of those, the ones that run for the first time
    preempted: list[Request] = field(default_factory=list)
    # (from, to): blocks whose content is to be copied before anything of the step is computed
    copies: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.scheduled)


class Scheduler:
    """Owns the queues. Pages are taken here and given back here; the model run in between never allocates."""

    def __init__(self, blocks: BlockManager, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.blocks = blocks
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.on_release: Callable[[Request], None] | None = None  # a request is about to give its pages back
        self.head_tables: HeadTables | None = None  # of requests whose KV is evicted by head
        # Requests that counted on retained pages which are gone, and have no plan: blocked until they have one.
        self.lost: list[Request] = []
        self._uncopied: list[Request] = []  # their copies belong to a step that has not been queued yet

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request behind all others of its priority."""
        insort_right(self.waiting, request, key=_priority_of)

    def add_first(self, request: Request) -> None:
        """Queue a request before all others of its priority."""
        insort_left(self.waiting, request, key=_priority_of)

    def prioritize(self, request: Request, priority: int) -> None:
        """Change the priority of a request. If it waits, it waits before all others of that priority; if it runs, it
        runs behind them."""
        is_waiting, is_running = request in self.waiting, request in self.running
        request.priority = priority
        if is_waiting:
            self.waiting.remove(request)
            self.add_first(request)
        elif is_running:
            self.running.remove(request)
            insort_right(self.running, request, key=_priority_of)

    def schedule(self, ahead: bool = False) -> SchedulerOutput:
        """The next step's tokens. `ahead`: while the step before it still runs, so that some requests will turn out to
        have ended. Nothing is preempted then, as they may be about to give pages back: the output is empty instead.
        """
        self._restart_uncopied()
        output = SchedulerOutput()
        budget = self._schedule_running(output, self.max_num_batched_tokens, ahead)
        if budget is None:
            return SchedulerOutput()
        if not output.preempted:
            self._schedule_waiting(output, budget)
        return output

    def finish(self, request: Request) -> None:
        """Remove a request from the queues, finished or aborted, and give its pages back."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        self._release(request)

    def send_back(self, requests: Sequence[Request]) -> None:
        """Take the pages of running requests and have them wait again, before all others of their priorities."""
        for request in reversed(requests):
            self._wait_again(request)

    def preempt_last(self) -> None:
        """Have the request wait again that started last, of those with the highest priority number."""
        self._wait_again(self.running[-1])
        self.num_preemptions += 1

    def advance(self, output: SchedulerOutput) -> None:
        """Record that the scheduled tokens are in the cache, or will be for every later step, and publish the blocks
        that exact prefill fills."""
        self._uncopied.clear()
        for item in output.scheduled:
            item.request.num_computed_tokens = item.known_stop
            if item.is_blend and item.request.composition is not None:
                self._retain(item.request, item.request.composition)
            if item.known_stop <= item.request.num_known_tokens:
                self._publish(item.request, item.start, item.known_stop)

    def settle(self, output: SchedulerOutput) -> None:
        """The step has been read, and so have all before it: publish blocks that ended in a token then unknown."""
        if self.blocks.enable_prefix_caching:
            for item in output.scheduled:
                if item.num_tokens == 1 and item.stop <= item.request.num_computed_tokens:
                    self._publish(item.request, item.start, item.stop)

    def accept(self, item: ScheduledRequest, count: int) -> None:
        """The step has been read, and the first `count` drafts have become tokens of the request: what the cache holds
        of them is theirs. What it holds of the others is overwritten before anything reads it."""
        request = item.request
        request.num_computed_tokens = item.known_stop + count
        self._publish(request, item.known_stop, request.num_computed_tokens)

    def _schedule_running(self, output: SchedulerOutput, budget: int, ahead: bool) -> int | None:
        """What is left of the budget, None where running ahead would preempt."""
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            if ahead and _is_complete(request):
                index += 1
                continue
            # A blend whose step failed is still to be done, and as a blend: whole, whatever the budget.
            is_blend = request.awaits_blend
            remaining = request.num_tokens - request.num_computed_tokens
            count = remaining if is_blend else min(remaining, budget)
            while not self._grow(request, request.num_computed_tokens + count):
                if ahead:
                    return None
                victim = self.running[-1]
                self._preempt(victim, output)
                if victim is request:
                    return budget
            drafts = self._drafts(request, budget - (len(self.running) - index)) if remaining == 1 else ()
            count += len(drafts)
            output.scheduled.append(ScheduledRequest(request, request.num_computed_tokens, count, is_blend, drafts))
            budget -= _blend_cost(request) if is_blend else count
            index += 1
        return budget

    def _drafts(self, request: Request, room: int) -> tuple[int, ...]:
        """Those of a request's drafts that are verified now: as many as `room` and the free pages allow. Nobody gives
        pages back for guesses, and none are taken that no token could follow."""
        room = min(room, self.blocks.room_in(request.block_table) - request.num_tokens)
        if request.max_num_tokens is not None:
            room = min(room, request.max_num_tokens - request.num_tokens - 1)
        drafts = tuple(request.drafts[: max(0, room)])
        if drafts:
            self._grow(request, request.num_tokens + len(drafts))
        return drafts

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        passed_over: list[Request] = []
        # Contexts that this step blends: whoever wants the same one finds it in the next step.
        blending = {_key_of(item.request) for item in output.scheduled if item.is_blend} - {None}
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting.popleft()
            later = request.blocked or _key_of(request) in blending
            item = None if later else self._admit(request, budget, output)
            if item is None:
                passed_over.append(request)
                if later or request.blocked:
                    continue
                break
            if item.is_blend and request.composition is not None:
                blending.add(request.composition.key)
            output.scheduled.append(item)
            budget -= _blend_cost(request) if item.is_blend else item.num_tokens
            if request.status is not RequestStatus.PREEMPTED:
                output.admitted.append(request)
            request.status = RequestStatus.RUNNING
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = time.time()
            insort_right(self.running, request, key=_priority_of)
        self.waiting.extendleft(reversed(passed_over))

    def _admit(self, request: Request, budget: int, output: SchedulerOutput) -> ScheduledRequest | None:
        """Give a waiting request its first pages and tokens, or None when they do not fit now."""
        if request.composition is not None:
            retained = self.blocks.find_retained(request.composition.key)
            if retained is not None:
                return self._resume(request, retained, budget, output)
            if request.blend is None:
                request.blocked = True
                self.lost.append(request)
                return None
        if request.blend is not None:
            # A blend is one step by nature: it may exceed the budget, but only where nothing else is being prefilled.
            if _blend_cost(request) > budget and any(item.is_prefill for item in output.scheduled):
                return None
            open_pages = self._open_heads if request.blend.compressed else self._grow
            if not open_pages(request, request.num_tokens):
                return None
            return ScheduledRequest(request, 0, request.num_tokens, is_blend=True)
        cached = self._cached_blocks(request)
        start = len(cached) * self.blocks.block_size
        count = min(request.num_tokens - start, budget)
        self.blocks.take(cached)
        request.block_table = list(cached)
        if not self._grow(request, start + count):
            self._release(request)
            return None
        request.num_computed_tokens = start
        if request.status is not RequestStatus.PREEMPTED:  # what it finds of its own is no hit for its user
            request.num_cached_tokens = start
        return ScheduledRequest(request, start, count)

    def _resume(
        self, request: Request, retained: Retained, budget: int, output: SchedulerOutput
    ) -> ScheduledRequest | None:
        """As `_admit`, of a request whose context is in retained pages: it shares those that are full and copies the
        rest of the context, in whose page it goes on."""
        start, size = retained.num_tokens, self.blocks.block_size
        shared, copied = retained.blocks[: start // size], retained.blocks[start // size :]
        count = min(request.num_tokens - start, budget)
        self.blocks.take(shared)
        request.block_table = list(shared)
        # From here on the page to be copied may be given to this very request, or to a later one of this step: its
        # content is read before the step writes anything.
        if not self._grow(request, start + count):
            self._release(request)
            return None
        if copied:
            output.copies.append((copied[0], request.block_table[len(shared)]))
            self._uncopied.append(request)
        request.num_computed_tokens = start
        if request.status is not RequestStatus.PREEMPTED:
            request.num_cached_tokens = start
        return ScheduledRequest(request, start, count)

    def _restart_uncopied(self) -> None:
        """Requests whose step failed before it was queued: nobody knows whether the page was copied, so they start
        again."""
        for request in self._uncopied:
            if request in self.running:
                self._wait_again(request)
        self._uncopied.clear()

    def _retain(self, request: Request, composition: CompositionKey) -> None:
        """The step that blends a request's context has been queued: its pages hold it for every later step."""
        blocks = tuple(request.block_table[: self.blocks.blocks_for(composition.num_tokens)])
        self.blocks.retain(composition.key, Retained(blocks, composition.num_tokens, composition.spans))

    def _cached_blocks(self, request: Request) -> list[int]:
        limit = request.max_cached_tokens // self.blocks.block_size
        if not self.blocks.enable_prefix_caching or limit == 0:
            return []
        self._extend_digests(request, limit)
        return self.blocks.match_prefix(
            request.block_digests[:limit], request.token_slice(0, limit * self.blocks.block_size)
        )

    def _extend_digests(self, request: Request, count: int) -> None:
        size = self.blocks.block_size
        for index in range(len(request.block_digests), count):
            parent = request.block_digests[index - 1] if index else request.salt
            request.block_digests.append(chain_digest(parent, request.token_slice(index * size, (index + 1) * size)))

    def _publish(self, request: Request, start: int, stop: int) -> None:
        """Make the blocks findable that the tokens at start .. stop - 1 have filled."""
        size = self.blocks.block_size
        first, full = start // size, stop // size
        if full == first or not request.exact or not self.blocks.enable_prefix_caching:
            return
        self._extend_digests(request, full)
        for index in range(first, full):
            tokens = request.token_slice(index * size, (index + 1) * size)
            self.blocks.publish(request.block_table[index], request.block_digests[index], tokens)

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Extend the block table to hold `num_tokens`; False, with nothing taken, when there are too few free
        blocks."""
        if request.in_head_pages:
            return self._grow_heads(request, num_tokens)
        needed = self.blocks.blocks_for(num_tokens) - len(request.block_table)
        if needed > self.blocks.num_free_blocks:
            return False
        if needed > 0:
            request.block_table.extend(self.blocks.allocate(needed))
        return True

    def _grow_heads(self, request: Request, num_tokens: int) -> bool:
        """`_grow` of a request whose heads have pages of their own."""
        state = request.compression
        assert self.head_tables is not None and state is not None and state.index is not None
        if not self.head_tables.append(state.index, num_tokens - state.num_tokens):
            return False
        state.num_tokens = num_tokens
        return True

    def _open_heads(self, request: Request, num_tokens: int) -> bool:
        """`_grow` of a waiting request whose chunks are compressed: it has head pages from the start."""
        assert self.head_tables is not None and request.blend is not None
        lengths = np.full(self.head_tables.lengths.shape[1:], request.blend.most_kvs(num_tokens))
        try:
            index = self.head_tables.open(lengths)
        except OutOfBlocks:
            return False
        if request.compression is None:
            request.compression = CompressionState(CompressionSettings())  # which evict nothing
        request.compression.begin(index, num_tokens)
        return True

    def _preempt(self, request: Request, output: SchedulerOutput) -> None:
        self._wait_again(request)
        output.preempted.append(request)
        self.num_preemptions += 1

    def _wait_again(self, request: Request) -> None:
        """Take the pages of a running request and have it wait, before all others of its priority."""
        self.running.remove(request)
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        self.add_first(request)

    def _release(self, request: Request) -> None:
        held = request.block_table if request.residency is None else request.residency.device_table()
        if self.on_release is not None:
            self.on_release(request)
        self.blocks.release(held)
        if request.compression is not None:
            if self.head_tables is not None and request.compression.index is not None:
                self.head_tables.close(request.compression.index)
            request.compression.reset()
        request.block_table = []
        request.num_computed_tokens = 0
        request.collected.clear()


def _priority_of(request: Request) -> int:
    return request.priority


def _key_of(request: Request) -> bytes | None:
    return None if request.composition is None else request.composition.key


def _is_complete(request: Request) -> bool:
    """Whether a step in flight computes all that there is to compute of a request, or draws its last token."""
    longest = request.max_num_tokens
    return request.num_computed_tokens == request.num_tokens or (longest is not None and request.num_tokens >= longest)


def _blend_cost(request: Request) -> int:
    """Tokens that a blend's step computes at most. What was generated before a preemption is computed with it."""
    assert request.blend is not None
    return request.blend.num_scheduled_tokens + len(request.output_token_ids)
