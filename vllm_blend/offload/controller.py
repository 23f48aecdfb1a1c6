"""What the engine calls around its steps: places requests' chunks before one, looks at its queries after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from vllm_blend.offload.attention import QueryTap
from vllm_blend.offload.kv_cache_scheduler import KVCacheScheduler, Moved
from vllm_blend.offload.promotion import Asked, ChunkScorer
from vllm_blend.offload.residency import Residency
from vllm_blend.request import Request

_T = TypeVar("_T")


@dataclass(frozen=True)
class OffloadReport:
    """A request's chunks before a step, by their numbers in the prompt."""

    resident_chunks: list[int]
    promotions: list[int] = field(default_factory=list)
    evictions: list[int] = field(default_factory=list)
    scores: list[float] | None = None


class OffloadController:
    """Ties a scheduler of moves to the scores of a predictor. `hides`: chunks off the device are not seen (mode
    "resident"), so what is computed without them is not what full attention gives. At most `scored_per_step` requests
    are scored by the queries of a step, in turns (None: all); new ones always are."""

    def __init__(
        self,
        scheduler: KVCacheScheduler,
        scorer: ChunkScorer,
        block_size: int,
        hides: bool,
        scored_per_step: int | None = None,
    ) -> None:
        self.scheduler, self.scorer, self.block_size, self.hides = scheduler, scorer, block_size, hides
        self.scored_per_step = scored_per_step
        self._turn = 0
        self.reports: dict[str, OffloadReport] = {}  # of the last step, by request id
        self._asked: dict[Request, Asked] = {}
        self._placed_by_rank: set[Residency] = set()

    def begin_step(self, running: Sequence[Request]) -> None:
        """Move chunks. Called between steps, before the next one's pages are taken."""
        scores: dict[Residency, list[float]] = {}
        for request in running:
            if not request.chunk_bounds or request.num_computed_tokens < request.num_prompt_tokens:
                continue
            if request.residency is None:
                self._track(request)
            residency = request.residency
            assert residency is not None
            asked = self._asked.pop(request, None)
            if asked is not None:
                asked = asked.until(request.num_computed_tokens - 1)
            known = self.scorer.scores(residency, asked, request.draft_source)
            if known is not None and residency not in self._placed_by_rank:
                scores[residency] = known
            self._placed_by_rank.discard(residency)
        self.scheduler.step(scores, reserve=len(running))
        self.reports = {}
        for request in running:
            if request.residency is not None:
                self.reports[request.request_id] = self._report(request.residency, scores.get(request.residency))
                if self.hides and request.residency.num_missing_blocks:
                    request.residency.approximate = True

    def observe(self, computed: Iterable[tuple[Request, int, int]], tap: QueryTap) -> None:
        """Keep the queries of the step that was just queued. `computed`: request, first position and the one after the
        last, in the order of the step."""
        known = []
        for index, (request, start, stop) in enumerate(computed):
            if not request.chunk_bounds or stop < request.num_prompt_tokens:
                continue
            rows = stop - start if start >= request.num_prompt_tokens else 1
            if request.residency is None:
                self._asked[request] = Asked(tap.last_rows(index, rows), stop - 1)
            else:
                known.append((index, request, rows, stop - 1))
        for index, request, rows, position in self._in_turn(known):
            self._asked[request] = Asked(tap.last_rows(index, rows), position)

    def _in_turn(self, items: list[_T]) -> list[_T]:
        count = self.scored_per_step
        if count is None or len(items) <= count:
            return items
        first, self._turn = self._turn % len(items), (self._turn + count) % len(items)
        return (items + items)[first : first + count]

    def released(self, request: Request) -> None:
        """A request has given its pages back, or is about to."""
        self._asked.pop(request, None)
        if request.residency is not None:
            self.scheduler.forget(request.residency)
            self.scorer.forget(request.residency)
            self._placed_by_rank.discard(request.residency)
            request.residency = None

    def end_moves(self) -> None:
        """No request is left: wait for the copies under way, and give the pages back that they own."""
        self.scheduler.end_moves()

    def _track(self, request: Request) -> None:
        residency = Residency.of(request.block_table, request.chunk_bounds, request.chunk_ranking, self.block_size)
        request.residency = residency
        self.scheduler.track(residency)
        if request.chunk_ranking:  # what the user said decides the first placement, what is seen the next ones
            self._placed_by_rank.add(residency)

    def _report(self, residency: Residency, scores: list[float] | None) -> OffloadReport:
        moved = self.scheduler.moved.get(residency, Moved())
        return OffloadReport(residency.resident_chunks, moved.promotions, moved.evictions, scores)
