"""Choose which tokens of which requests go into the next step: continuous batching, chunked prefill and preemption.

Running requests come first (decodes, and the rest of prefills already begun), then waiting ones in turn over tenants
and their calls, as far as the token budget, the number of sequences and the pages allow. When pages run out, the
request that started last returns its pages and is computed again later.

Both queues are sorted by priority before that, so a request of a lower number runs earlier and keeps its pages longer.
A waiting request takes the place of a running one only if that one's tenant, or call, has more than its part.
"""

from __future__ import annotations

import time
from bisect import insort_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from vllm_blend.core.admission import Admission
from vllm_blend.core.block_manager import BlockManager, Retained
from vllm_blend.core.fairness import divide_prefill, find_victim
from vllm_blend.core.prefix_cache import publish_blocks
from vllm_blend.core.step import ScheduledRequest, SchedulerOutput, blend_rows, is_complete
from vllm_blend.core.waiting_queue import Call, WaitingQueue, priority_of
from vllm_blend.request import Request, RequestStatus


class Scheduler:
    """Owns the queues. It takes and returns pages; the model run in between never allocates."""

    def __init__(
        self, blocks: BlockManager, max_num_seqs: int, max_num_batched_tokens: int, divides_blends: bool = True
    ) -> None:
        """`divides_blends`: a blend of more than `max_num_batched_tokens` rows is computed in several steps, where its
        plan allows it; otherwise it exceeds the budget in one."""
        self.blocks = blocks
        self.admission = Admission(blocks, max_num_batched_tokens, divides_blends)
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting = WaitingQueue(self.admission.count_rows)
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.on_release: list[Callable[[Request], None]] = []  # called when a request is about to return its pages
        self._partial: list[Request] = []  # that the last step has left in the middle of their prefill
        self._shares: dict[str, int] | None = None  # how many tokens of a step's prefill each may have; None: any

    def take_lost(self) -> list[Request]:
        """Return the requests that counted on retained pages which are gone, and have no plan: blocked until they have
        one."""
        lost, self.admission.lost = self.admission.lost, []
        return lost

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def has_full_step(self) -> bool:
        """Return whether what waits fills the next step: its tokens, or the number of requests that may run."""
        room = self.max_num_seqs - len(self.running)
        return room > 0 and self.waiting.fills(room, self.max_num_batched_tokens - len(self.running))

    def add(self, request: Request) -> None:
        """Queue a request behind all others of its priority."""
        self.waiting.add(request)

    def add_first(self, request: Request) -> None:
        """Queue a request before all others of its priority."""
        self.waiting.add_first(request)

    def prioritize(self, request: Request, priority: int) -> None:
        """Change the priority of a request. A waiting one is queued before all others of that priority, a running one
        behind them."""
        is_waiting, is_running = request in self.waiting, request in self.running
        request.priority = priority
        if is_waiting:
            self.waiting.remove(request)
            self.add_first(request)
        elif is_running:
            self.running.remove(request)
            insort_right(self.running, request, key=priority_of)

    def schedule(self, ahead: bool = False) -> SchedulerOutput:
        """Choose the next step's tokens. `ahead`: while the step before it still runs, so that some requests will turn
        out to have ended. Nothing is preempted then, as they may be about to return pages: the output is empty instead.
        """
        self.waiting.count_anew()
        self._restart_uncopied()
        output = SchedulerOutput()
        is_contended = self.waiting.is_contended
        if is_contended and self.waiting and not self._make_room(ahead):
            return output
        self._shares = self._divide_prefill() if is_contended and self._partial else None
        budget = self._schedule_running(output, self.max_num_batched_tokens, ahead)
        if budget is None:
            return SchedulerOutput()
        if is_contended and self.waiting:  # where nothing waits, everyone gets what it needs
            for item in output.scheduled:
                rows = item.num_tokens
                self.waiting.charge(item.request, rows if rows == 1 else item.num_rows)
        if not output.preempted:
            self._schedule_waiting(output, budget)
        self._partial = [item.request for item in output.scheduled if item.num_tokens > 1 and not item.ends_prefill]
        return output

    def finish(self, request: Request) -> None:
        """Remove a request from the queues, finished or aborted, and return its pages."""
        if request in self.running:
            self.running.remove(request)
            self.waiting.stopped(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        self._release(request)

    def send_back(self, requests: Sequence[Request]) -> None:
        """Take the pages of running requests and queue them again, before all others of their priorities."""
        for request in reversed(requests):
            self._wait_again(request)

    def preempt_last(self) -> Request:
        """Preempt the request that started last, of those with the highest priority number, and return it."""
        self._preempt(last := self.running[-1])
        return last

    def advance(self, output: SchedulerOutput) -> None:
        """Record that the scheduled tokens are in the cache, or will be for every later step, and publish the blocks
        that exact prefill fills."""
        self.admission.uncopied.clear()
        size = self.blocks.block_size
        for item in output.scheduled:
            request = item.request
            if item.part is not None:
                request.num_blended_rows = item.part.stop
                if not item.part.is_last:
                    continue
            start, stop = item.start, item.known_stop
            request.num_computed_tokens = stop
            if item.is_blend and request.retention is not None:  # its pages hold the context for every later step
                retention = request.retention
                blocks = tuple(request.block_table[: self.blocks.blocks_for(retention.num_tokens)])
                self.blocks.retain(retention.key, Retained(blocks, retention.num_tokens, retention.pieces))
            if start // size != stop // size and stop <= request.num_known_tokens:
                publish_blocks(self.blocks, request, start, stop)

    def settle(self, output: SchedulerOutput) -> None:
        """Publish blocks that ended in a token unknown when the step was queued. Call this when the step has been read,
        and all before it."""
        if not self.blocks.enable_prefix_caching:
            return
        size = self.blocks.block_size
        for item in output.scheduled:
            if item.num_tokens == 1 and item.stop % size == 0 and item.stop <= item.request.num_computed_tokens:
                publish_blocks(self.blocks, item.request, item.start, item.stop)

    def accept(self, item: ScheduledRequest, count: int) -> None:
        """Count the first `count` drafts of a step that has been read as tokens of the request: the cache holds their
        KV. What it holds of the other drafts is overwritten before anything reads it."""
        request = item.request
        request.num_computed_tokens = item.known_stop + count
        publish_blocks(self.blocks, request, item.known_stop, request.num_computed_tokens)

    def _schedule_running(self, output: SchedulerOutput, budget: int, ahead: bool) -> int | None:
        """Schedule running requests. Return what is left of the budget, None if running ahead would preempt."""
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            computed, num_tokens = request.num_computed_tokens, request.num_tokens
            if ahead and is_complete(request, num_tokens):
                index += 1
                continue
            if computed == num_tokens - 1 and computed and not request.drafts and self._grow(request, num_tokens):
                output.scheduled.append(ScheduledRequest(request, computed, 1))  # as most are: the next token alone
                budget -= 1
                index += 1
                continue
            # A blend goes on, or is done again if its step failed, whole if it is not divided, whatever the budget.
            is_blend = request.awaits_blend
            limit = self._limit(request, budget)
            if limit <= 0 and self.admission.is_divided(request):
                index += 1
                continue
            part = self.admission.blend_part(request, limit) if is_blend else None
            remaining = num_tokens - computed
            count = remaining if is_blend else min(remaining, limit)
            while not self._grow(request, computed + count):
                if ahead:
                    return None
                output.preempted.append(self.preempt_last())
                if output.preempted[-1] is request:
                    return budget
            drafts: tuple[int, ...] = ()
            if request.drafts and remaining == 1:
                drafts = self._take_drafts(request, budget - (len(self.running) - index))
                count += len(drafts)
            item = ScheduledRequest(request, computed, count, is_blend, drafts, part)
            output.scheduled.append(item)
            budget -= item.num_rows
            self._use(item)
            index += 1
        return budget

    def _take_drafts(self, request: Request, limit: int) -> tuple[int, ...]:
        """Return those of a request's drafts that are verified now: at most `limit`, and as many as the free pages
        allow. No request returns pages for guesses, and no guess is taken that no token could follow."""
        assert request.pages is not None
        limit = min(limit, request.pages.max_tokens - request.num_tokens)
        if request.max_num_tokens is not None:
            limit = min(limit, request.max_num_tokens - request.num_tokens - 1)
        drafts = tuple(request.drafts[: max(0, limit)])
        if drafts:
            self._grow(request, request.num_tokens + len(drafts))
        return drafts

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        if not self.waiting or budget <= 0 or len(self.running) >= self.max_num_seqs:
            return
        skipped: list[Request] = []
        # Contexts that this step blends: another request for the same one finds it in the next step.
        blending = {_key_of(item.request) for item in output.scheduled if item.is_blend} - {None}
        turns = self.waiting.in_turn()
        while budget > 0 and len(self.running) < self.max_num_seqs:
            request = turns.take()
            if request is None:
                break
            limit = self._limit(request, budget)
            is_divided = self.admission.is_divided(request)
            later = request.blocked or _key_of(request) in blending or (limit <= 0 and is_divided)
            item = None if later else self.admission.admit(request, limit if is_divided else budget, output)
            if item is None:
                skipped.append(request)
                if later or request.blocked:
                    continue
                break
            if item.is_blend and request.retention is not None:
                blending.add(request.retention.key)
            output.scheduled.append(item)
            budget -= item.num_rows
            self._use(item)
            self.waiting.started(request)
            self.waiting.charge(request, item.num_rows)
            if request.status is not RequestStatus.PREEMPTED:
                output.admitted.append(request)
            request.status = RequestStatus.RUNNING
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = time.time()
            insort_right(self.running, request, key=priority_of)
        self.waiting.put_back(skipped)

    def _make_room(self, ahead: bool) -> bool:
        """Preempt requests of tenants and calls that have more than their part, if the next request in turn has less
        and finds no room. Return False if that is to be done, but a step still runs."""
        call = self._next_ready()
        while call is not None:
            asking = call.waiting[0]
            victim = None
            if len(self.running) >= self.max_num_seqs:
                victim = find_victim(self.waiting, asking, self.running, lambda _: 1, self.max_num_seqs, 1)
            else:
                needed = self.blocks.blocks_for(min(asking.num_tokens, self.max_num_batched_tokens))
                if needed > self.blocks.num_free_blocks:
                    usable = self.blocks.num_usable_blocks
                    victim = find_victim(self.waiting, asking, self.running, _num_blocks, usable, needed)
            if victim is None:
                return True
            if ahead:
                return False
            self._preempt(victim)
        return True

    def _next_ready(self) -> Call | None:
        """Return the call whose first request is next in turn, if there is anyone who may have to make room for it: a
        tenant, or a call, of which several requests run."""
        tenants = self.waiting.tenants.values()
        if not self.waiting.num_shared and (len(tenants) == 1 or all(each.num_running < 2 for each in tenants)):
            return None
        call = self.waiting.in_turn().peek()
        return None if call is None or call.waiting[0].blocked else call

    def _divide_prefill(self) -> dict[str, int] | None:
        """Return how many tokens of the next step each tenant, or call, may have prefilled; None if one alone needs
        any."""
        partial = [each for each in self._partial if each.status is RequestStatus.RUNNING]
        if not partial:
            return None
        needs: dict[str, int] = {}
        waits = self.waiting.in_turn().peek() if len(self.running) < self.max_num_seqs else None
        if waits is not None and not waits.waiting[0].blocked:
            first = waits.waiting[0]
            if all(self.waiting.flow_of(first) != self.waiting.flow_of(each) for each in partial):
                needs[self.waiting.flow_of(first)] = self.admission.count_rows(first)
        for request in partial:
            rows = blend_rows(request) if request.awaits_blend else request.num_tokens
            done = request.num_blended_rows if request.awaits_blend else request.num_computed_tokens
            flow = self.waiting.flow_of(request)
            needs[flow] = needs.get(flow, 0) + rows - done
        if len(needs) < 2:
            return None
        return divide_prefill(needs, self.max_num_batched_tokens - (len(self.running) - len(partial)))

    def _limit(self, request: Request, budget: int) -> int:
        """Return how many tokens of a request's prefill this step may compute."""
        if self._shares is None:
            return budget
        return min(budget, self._shares.get(self.waiting.flow_of(request), budget))

    def _use(self, item: ScheduledRequest) -> None:
        """Take what a step prefills for a request from the part of its tenant, or call."""
        if self._shares is not None and item.num_rows > 1:
            flow = self.waiting.flow_of(item.request)
            if flow in self._shares:
                self._shares[flow] -= item.num_rows

    def _restart_uncopied(self) -> None:
        """Start requests again whose step failed before it was queued: their page may not have been copied."""
        for request in self.admission.uncopied:
            if request in self.running:
                self._wait_again(request)
        self.admission.uncopied.clear()

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Extend the pages of a running request to hold `num_tokens`; return False, with nothing taken, if too few are
        free."""
        assert request.pages is not None
        return request.pages.grow(num_tokens)

    def _preempt(self, request: Request) -> None:
        self._wait_again(request)
        self.num_preemptions += 1

    def _wait_again(self, request: Request) -> None:
        """Take the pages of a running request and queue it again, before all others of its priority."""
        self.running.remove(request)
        request.status = RequestStatus.PREEMPTED
        self.add_first(request)
        self.waiting.stopped(request)
        self._release(request)

    def _release(self, request: Request) -> None:
        """Return the pages of a request, even if something that has to know of it raises."""
        with ExitStack() as last_first:
            last_first.callback(request.release_pages)
            for call in reversed(self.on_release):
                last_first.callback(call, request)


def _key_of(request: Request) -> bytes | None:
    return None if request.retention is None else request.retention.key


def _num_blocks(request: Request) -> int:
    return len(request.block_table)
