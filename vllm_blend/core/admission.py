"""Give a waiting request its first pages and tokens: from the beginning, after cached blocks, after a retained context,
or as a blend."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_blend.core.block_manager import BlockManager, Retained
from vllm_blend.core.pages import BlockTable
from vllm_blend.core.prefix_cache import find_prefix
from vllm_blend.core.step import BlendPart, ScheduledRequest, SchedulerOutput, blend_rows
from vllm_blend.request import Request, RequestStatus


class Admission:
    """Admits requests to steps of at most `max_num_batched_tokens`, in which blends are divided or not."""

    def __init__(self, blocks: BlockManager, max_num_batched_tokens: int, divides_blends: bool) -> None:
        self.blocks, self.divides_blends = blocks, divides_blends
        self.max_num_batched_tokens = max_num_batched_tokens
        # Requests that counted on retained pages which are gone, and have no plan: blocked until they have one.
        self.lost: list[Request] = []
        self.uncopied: list[Request] = []  # their copies belong to a step that has not been queued yet

    def count_rows(self, request: Request) -> int:
        """Return how many tokens of a waiting request steps will compute: all but those that it finds in pages now."""
        if request.retention is not None and request.retention.key in self.blocks.retained:
            return request.num_tokens - request.retention.num_tokens
        if request.blend is not None:
            return blend_rows(request)
        return request.num_tokens - len(find_prefix(self.blocks, request)) * self.blocks.block_size

    def is_divided(self, request: Request) -> bool:
        """Return whether a request's prefill may be computed in parts."""
        return request.blend is None or self.blend_part(request, 1) is not None

    def admit(self, request: Request, budget: int, output: SchedulerOutput) -> ScheduledRequest | None:
        """Give a waiting request its first pages and tokens; return None if they do not fit now."""
        if request.retention is not None:
            retained = self.blocks.find_retained(request.retention.key)
            if retained is not None:
                return self._resume(request, retained, budget, output)
            if request.blend is None:
                request.blocked = True
                self.lost.append(request)
                return None
        if request.blend is not None:
            part = self.blend_part(request, budget)
            # A blend that is not divided may exceed the budget, but only if nothing else is being prefilled.
            exceeds = part is None and blend_rows(request) > budget
            if exceeds and any(item.is_prefill for item in output.scheduled):
                return None
            if not self._open(request, (), request.num_tokens):
                return None
            return ScheduledRequest(request, 0, request.num_tokens, is_blend=True, part=part)
        cached = find_prefix(self.blocks, request)
        return self._go_on(request, cached, len(cached) * self.blocks.block_size, budget)

    def blend_part(self, request: Request, budget: int) -> BlendPart | None:
        """Return the rows of a request's blend that the next step computes, None for all in one step."""
        total, first = blend_rows(request), request.num_blended_rows
        if total <= self.max_num_batched_tokens or not (self.divides_blends and _is_divisible(request)):
            return None
        stop = min(total, first + budget)
        return BlendPart(first, stop, stop == total)

    def _resume(
        self, request: Request, retained: Retained, budget: int, output: SchedulerOutput
    ) -> ScheduledRequest | None:
        """Admit a request whose context is in retained pages: it shares the full ones, and copies the last one if that
        is not full, as it goes on there."""
        num_full = retained.num_tokens // self.blocks.block_size
        # The page to be copied may be allocated to this very request, or to a later one of this step: its content is
        # read before the step writes anything.
        item = self._go_on(request, retained.blocks[:num_full], retained.num_tokens, budget)
        if item is not None and len(retained.blocks) > num_full:
            output.copies.append((retained.blocks[num_full], request.block_table[num_full]))
            self.uncopied.append(request)
        return item

    def _go_on(self, request: Request, shared: Sequence[int], start: int, budget: int) -> ScheduledRequest | None:
        """Admit a request whose first `start` tokens need not be computed, and whose table begins with `shared` blocks;
        return None if its next tokens do not fit now."""
        count = min(request.num_tokens - start, budget)
        if not self._open(request, shared, start + count):
            return None
        request.num_computed_tokens = start
        if request.status is not RequestStatus.PREEMPTED:  # blocks of its own are no hit for its user
            request.num_cached_tokens = start
        return ScheduledRequest(request, start, count)

    def _open(self, request: Request, shared: Sequence[int], num_tokens: int) -> bool:
        """Give a waiting request a table of `num_tokens` that begins with shared blocks; return False, with nothing
        taken, if too few blocks are free."""
        self.blocks.take(shared)
        pages = BlockTable(self.blocks, shared)
        if not pages.grow(num_tokens):
            pages.release()
            return False
        request.hold(pages)
        return True


def _is_divisible(request: Request) -> bool:
    """Return whether a blend can be computed in several steps: nothing but its next token is asked of it."""
    assert request.blend is not None
    wants_rows = (
        request.collect_from is not None or request.params is None or request.params.prompt_logprobs is not None
    )
    return request.blend.is_divisible and not wants_rows
