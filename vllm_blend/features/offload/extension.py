"""Offloading in the step loop: it places requests' chunks before a step, and looks at its queries after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from vllm_blend.checks import require
from vllm_blend.engine.extension import EngineParts, Extension, Step
from vllm_blend.engine.metrics import Gauge, Metric
from vllm_blend.features.offload.attention import QueryTap
from vllm_blend.features.offload.config import OffloadConfig
from vllm_blend.features.offload.copies import BlockCopies, PlainCopies, StreamCopies, ThreadCopies
from vllm_blend.features.offload.kv_cache_scheduler import KVCacheScheduler, StepMoves
from vllm_blend.features.offload.passes import OffloadPasses
from vllm_blend.features.offload.planner import MovePlanner, MovePolicy
from vllm_blend.features.offload.predictors import make_predictor
from vllm_blend.features.offload.promotion import ChunkScorer, StepQueries
from vllm_blend.features.offload.residency import OFFLOAD, OffloadState, Residency
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.models.causal_lm import attention_layers
from vllm_blend.request import Request
from vllm_blend.sampling_params import SamplingParams

_T = TypeVar("_T")

SCORED_PER_STEP = 2  # requests, if the host must keep ahead of the device: each costs it some twenty launches


@dataclass(frozen=True)
class OffloadReport:
    """The places of a request's chunks in a step, and the moves before it. Chunks go by their numbers in the prompt."""

    resident_chunks: list[int]
    promotions: list[int] = field(default_factory=list)
    evictions: list[int] = field(default_factory=list)
    scores: list[float] | None = None


class NoOffload(Extension):
    """The feature, switched off: it refuses prompts that ask for it."""

    def check(self, parsed: ParsedPrompt, params: SamplingParams) -> None:
        if parsed.chunk_ranking:
            raise ValueError(
                "the prompt has chunk_ranking, but the engine's chunks do not move while decoding: give offload_mode "
                "to the engine, or leave it out"
            )


class ChunkOffload(Extension):
    """Ties a scheduler of moves to the scores of a predictor.

    In mode "resident", chunks off the device are not attended to (`hides`), so what is computed without them is not
    what full attention gives. At most `scored_per_step` requests are scored by the queries of a step, in turns
    (None: all); new ones always are.
    """

    def __init__(
        self,
        passes: OffloadPasses,
        scheduler: KVCacheScheduler,
        scorer: ChunkScorer,
        block_size: int,
        scored_per_step: int | None = None,
    ) -> None:
        self.passes, self.scheduler, self.scorer, self.block_size = passes, scheduler, scorer, block_size
        self.hides = not passes.exact
        self.scored_per_step = scored_per_step
        self._turn = 0
        self.reports: dict[str, OffloadReport] = {}  # of the last step, by request id
        self._queries: dict[Request, StepQueries] = {}
        self._placed_by_rank: set[Residency] = set()

    def begin(self, requests: Sequence[Request], parsed: ParsedPrompt, params: SamplingParams) -> None:
        """Note the chunks of a new prompt, which may move while its requests decode."""
        if parsed.chunk_bounds:
            for request in requests:
                OFFLOAD.set(request, OffloadState(parsed.chunk_bounds, parsed.chunk_ranking))

    def before_schedule(self, running: Sequence[Request], ahead: bool) -> None:
        """Move chunks, before the next step's pages are taken."""
        scores: dict[Residency, list[float]] = {}
        for request in running:
            state = OFFLOAD.get(request)
            if state is None or request.num_computed_tokens < request.num_prompt_tokens:
                continue
            residency = state.residency or self._track(request, state)
            queries = self._queries.pop(request, None)
            if queries is not None:
                queries = queries.up_to(request.num_computed_tokens - 1)
            known = self.scorer.scores(residency, queries)
            if known is not None and residency not in self._placed_by_rank:
                scores[residency] = known
            self._placed_by_rank.discard(residency)
        self.scheduler.step(scores, reserve=len(running))
        self.reports = {}
        for request in running:
            state = OFFLOAD.get(request)
            if state is None or state.residency is None or request.pages is None:
                continue
            self.reports[request.request_id] = self._report(state.residency, scores.get(state.residency))
            request.pages.num_missing = state.residency.num_missing_blocks
            request.pages.version = state.residency.version
            if self.hides and request.pages.num_missing:
                request.pages.is_exact = False

    def launched(self, step: Step) -> None:
        """Keep the queries of the step that was just queued."""
        queries = self.passes.take_queries()
        if queries is not None:
            self.observe(((i.request, i.start, i.stop) for i in step.scheduled.scheduled), queries)

    def observe(self, computed: Iterable[tuple[Request, int, int]], tap: QueryTap) -> None:
        """Keep the queries of a step that `tap` has. `computed` has each request's first position and the one after its
        last, in the order of the step."""
        known = []
        for index, (request, start, stop) in enumerate(computed):
            state = OFFLOAD.get(request)
            if state is None or stop < request.num_prompt_tokens:
                continue
            rows = stop - start if start >= request.num_prompt_tokens else 1
            if state.residency is None:
                self._queries[request] = StepQueries(tap.last_rows(index, rows), stop - 1)
            else:
                known.append((index, request, rows, stop - 1))
        for index, request, rows, position in self._in_turn(known):
            self._queries[request] = StepQueries(tap.last_rows(index, rows), position)

    def _in_turn(self, items: list[_T]) -> list[_T]:
        count = self.scored_per_step
        if count is None or len(items) <= count:
            return items
        first, self._turn = self._turn % len(items), (self._turn + count) % len(items)
        return (items + items)[first : first + count]

    def released(self, request: Request) -> None:
        """Let go of a request that is about to return its pages."""
        self._queries.pop(request, None)
        state = OFFLOAD.get(request)
        if state is not None and state.residency is not None:
            self.scheduler.forget(state.residency)
            self.scorer.forget(state.residency)
            self._placed_by_rank.discard(state.residency)
            state.residency = None

    def idle(self) -> None:
        """Wait for the copies under way, and return the pages that they own."""
        self.scheduler.end_moves()

    def gauges(self) -> list[Metric]:
        scheduler = self.scheduler
        return [
            Gauge("vllm_blend:chunk_promotions", scheduler.num_promotions),
            Gauge("vllm_blend:chunk_evictions", scheduler.num_evictions),
            Gauge("vllm_blend:offload_bytes_moved", scheduler.num_bytes),
            Gauge("vllm_blend:offload_moves_dropped", scheduler.num_dropped),
            Gauge("vllm_blend:offload_plans_dropped", scheduler.num_stale_plans),
            Gauge("vllm_blend:offload_host_blocks_free", scheduler.host.num_free_blocks),
        ]

    def _track(self, request: Request, state: OffloadState) -> Residency:
        residency = Residency.from_bounds(request.block_table, state.chunk_bounds, state.chunk_ranking, self.block_size)
        state.residency = residency
        self.scheduler.track(residency)
        if state.chunk_ranking:  # the user's ranking decides the first placement, scores decide the next ones
            self._placed_by_rank.add(residency)
        return residency

    def _report(self, residency: Residency, scores: list[float] | None) -> OffloadReport:
        moved = self.scheduler.moved.get(residency, StepMoves())
        return OffloadReport(residency.resident_chunks, moved.promotions, moved.evictions, scores)


def make_offload(config: OffloadConfig, parts: EngineParts) -> Extension:
    """Return the feature as the engine's configuration asks for it. Raises ValueError naming the setting for what
    cannot be.

    An engine that runs ahead plans moves in a thread, and on a CPU copies in another. Any other does so at once: then
    the same prompt has the same placement in every run.
    """
    if not config.is_on:
        return NoOffload()
    runner, runs_ahead = parts.worker.model_runner, parts.runs_ahead
    predictor = make_predictor(config.predictor)
    attentions = attention_layers(runner.model)
    windows = sorted({a.sliding_window for a in attentions if a.sliding_window is not None})
    require(
        not windows,
        f"offload_mode={config.mode!r}: the model has layers with a sliding window ({windows}), which look at "
        "positions that a table without some of its blocks no longer tells; leave offload_mode out, or set "
        "max_model_len to the shortest of them or less",
    )
    require(
        all(attention.sinks is None for attention in attentions),
        f"offload_mode={config.mode!r}: the model has attention sinks, which attention that is merged from two places "
        "does not know; leave offload_mode out",
    )
    cache = runner.cache
    passes = parts.worker.extension(OffloadPasses)
    host = passes.host
    kind: type[BlockCopies] = StreamCopies if cache.key.is_cuda else ThreadCopies if runs_ahead else PlainCopies
    policy = MovePolicy(config.resident_chunks, config.device_fraction, config.bytes_per_step)
    rotary_dim = 2 * attentions[0].rotary.cos.shape[1]
    scorer = ChunkScorer(predictor, passes.tapped_layers, cache.layers, attentions[0].scale, rotary_dim)
    planner = MovePlanner(policy, in_thread=runs_ahead)
    scheduler = KVCacheScheduler(parts.scheduler.blocks, host, kind(cache.key, cache.value, host), planner)
    # Scores that come a step or two late change little; a step that waits for the host does.
    return ChunkOffload(passes, scheduler, scorer, cache.block_size, SCORED_PER_STEP if runs_ahead else None)
