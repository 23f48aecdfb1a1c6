"""Speculative decoding in the step loop: drafts before a step, their verification after it, and the counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_blend.engine.extension import EngineParts, Extension, Step
from vllm_blend.engine.metrics import Counter, Metric
from vllm_blend.features.spec_decode.config import SpeculativeConfig
from vllm_blend.features.spec_decode.speculation import SPECULATION, Speculator
from vllm_blend.features.spec_decode.verifier import num_kept
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.request import Request
from vllm_blend.sampling_params import SamplingParams


@dataclass
class DraftCounts:
    """Totals since the engine started."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def counters(self) -> list[Metric]:
        """Return the totals under vLLM's names."""
        return [
            Counter("vllm:spec_decode_num_drafts", self.drafts),
            Counter("vllm:spec_decode_num_draft_tokens", self.draft_tokens),
            Counter("vllm:spec_decode_num_accepted_tokens", self.accepted_tokens),
        ]


class NoSpeculation(Extension):
    """The feature, switched off: its counts stay at zero."""

    def gauges(self) -> list[Metric]:
        return DraftCounts().counters()


@dataclass(eq=False)
class SpeculativeDecoding(Extension):
    """Gives the running requests drafts, and learns from what became of them."""

    speculator: Speculator
    counts: DraftCounts = field(default_factory=DraftCounts)

    def begin(self, requests: Sequence[Request], parsed: ParsedPrompt, params: SamplingParams) -> None:
        """Begin to draft for requests, unless they have logits processors: these may count their calls."""
        if params.logits_processors:
            return
        for request in requests:
            begun = self.speculator.begin(
                request.prompt_token_ids, request.output_token_ids, parsed.chunk_bounds, request.salt
            )
            SPECULATION.set(request, begun)

    def before_schedule(self, running: Sequence[Request], ahead: bool) -> None:
        """Set `drafts` of the requests that the next step decodes: one token of theirs is known and not computed. When
        running `ahead` that token is not known, and nothing is drafted."""
        for request in running:
            request.drafts = []
            speculation = SPECULATION.get(request) if ahead else None
            if speculation is not None:
                speculation.length.skip_step()
        if ahead:
            return
        decoding = [r for r in running if r.output_token_ids and r.num_computed_tokens == r.num_tokens - 1]
        for request in decoding:
            # past the last token that the request may have, nothing is drawn
            longest = request.max_num_tokens
            limit = self.speculator.num_speculative_tokens if longest is None else longest - request.num_tokens - 1
            speculation = SPECULATION.get(request)
            if speculation is not None and limit > 0:
                request.drafts = speculation.propose(len(decoding), limit)

    def may_run_ahead(self, step: Step, running: Sequence[Request]) -> bool:
        """Return whether `step` verifies nothing, and no request would draft in the next one."""
        if any(item.drafts for item in step.scheduled.scheduled):
            return False
        states = [SPECULATION.get(request) for request in running if request.output_token_ids or request.num_in_flight]
        decoding = [speculation for speculation in states if speculation is not None]
        return all(speculation.length.is_idle(len(decoding)) for speculation in decoding)

    def verify(self, request: Request, drafts: Sequence[int], drawn: Sequence[int]) -> int:
        """Return how many of the drawn tokens count: those that agree with the drafts, and one more."""
        kept = num_kept(drafts, drawn)
        counts = request.metrics.spec_token_acceptance_counts or []
        counts += [0] * (kept - len(counts))
        for position in range(kept):
            counts[position] += 1
        request.metrics.spec_token_acceptance_counts = counts
        if drafts:
            self.counts.drafts += 1
            self.counts.draft_tokens += len(drafts)
            self.counts.accepted_tokens += kept - 1
            assert request.sampling is not None
            request.sampling.take_back(len(drawn) - kept)
            SPECULATION.require(request).length.verified(len(drafts), kept - 1)
        return kept

    def gauges(self) -> list[Metric]:
        return self.counts.counters()


def make_speculation(config: SpeculativeConfig, parts: EngineParts) -> Extension:
    """Return the feature as the engine's configuration asks for it."""
    if not config.is_on:
        return NoSpeculation()
    return SpeculativeDecoding(Speculator(config.make_drafter(), config.num_speculative_tokens, parts.runs_ahead))
