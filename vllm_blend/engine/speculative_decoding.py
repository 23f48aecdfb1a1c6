"""Speculative decoding in the step loop: drafts before a step, their verification after it, and the counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_blend.core.scheduler import SchedulerOutput
from vllm_blend.engine.metrics import EngineMetrics
from vllm_blend.request import Request
from vllm_blend.spec_decode.config import SpeculativeConfig
from vllm_blend.spec_decode.speculation import Speculator
from vllm_blend.spec_decode.verifier import num_kept


@dataclass(frozen=True)
class SpeculativeDecoding:
    """Gives the running requests drafts, and learns from what became of them."""

    speculator: Speculator
    metrics: EngineMetrics

    @classmethod
    def of(
        cls, config: SpeculativeConfig | None, metrics: EngineMetrics, runs_ahead: bool
    ) -> SpeculativeDecoding | None:
        if config is None:
            return None
        return cls(Speculator(config.make_drafter(), config.num_speculative_tokens, runs_ahead), metrics)

    def begin(self, requests: Sequence[Request], chunk_bounds: Sequence[tuple[int, int]]) -> None:
        """Make new requests, completions of one prompt, ready for `propose`."""
        for request in requests:
            request.speculation = self.speculator.begin(
                request.prompt_token_ids, request.output_token_ids, chunk_bounds, request.salt
            )

    def may_run_ahead(self, step: SchedulerOutput, running: Sequence[Request]) -> bool:
        """Whether the step after `step` is known without the tokens that this one draws: it verifies nothing, and
        nobody would draft in the next one."""
        if any(item.drafts for item in step.scheduled):
            return False
        decoding = [
            r.speculation for r in running if r.speculation is not None and (r.output_token_ids or r.num_in_flight)
        ]
        return all(speculation.length.rests(len(decoding)) for speculation in decoding)

    def propose(self, running: Sequence[Request], ahead: bool) -> None:
        """Set `drafts` of the requests that the next step decodes: one token of theirs is known and not computed. When
        running `ahead` that token is not known, and nobody drafts."""
        for request in running:
            request.drafts, request.draft_source = [], None
            if ahead and request.speculation is not None:
                request.speculation.length.passed_by()
        if ahead:
            return
        decoding = [r for r in running if r.output_token_ids and r.num_computed_tokens == r.num_tokens - 1]
        for request in decoding:
            # past the last token that the request may have, nothing is drawn
            longest = request.max_num_tokens
            limit = self.speculator.num_speculative_tokens if longest is None else longest - request.num_tokens - 1
            if request.speculation is not None and limit > 0:
                request.drafts = request.speculation.propose(len(decoding), limit)
                if request.drafts:
                    request.draft_source = request.speculation.history.copied_from

    def verify(self, request: Request, drafts: Sequence[int], drawn: Sequence[int]) -> int:
        """How many of the tokens that were drawn for a request count: at least 1."""
        kept = num_kept(drafts, drawn)
        counts = request.metrics.spec_token_acceptance_counts or []
        counts += [0] * (kept - len(counts))
        for position in range(kept):
            counts[position] += 1
        request.metrics.spec_token_acceptance_counts = counts
        if drafts:
            self.metrics.spec_drafts += 1
            self.metrics.spec_draft_tokens += len(drafts)
            self.metrics.spec_accepted_tokens += kept - 1
            assert request.sampling is not None and request.speculation is not None
            request.sampling.take_back(len(drawn) - kept)
            request.speculation.verified(len(drafts), kept - 1)
        return kept
