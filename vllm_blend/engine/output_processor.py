"""Turns sampled tokens into what users see: stop conditions, text, log-probabilities, counts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from vllm_blend.blend.plan import BlendPlan
from vllm_blend.chunks.retention import RetentionKey
from vllm_blend.detokenizer import token_texts, with_decoded_tokens
from vllm_blend.engine.metrics import ReuseCounts, count_reuse
from vllm_blend.engine.requests import RequestGroup
from vllm_blend.layers.sampling_state import check_stop
from vllm_blend.outputs import BlendStats, CompletionOutput, FlatLogprobs, Logprob, RequestOutput
from vllm_blend.request import Request
from vllm_blend.worker.runner_output import BlendResult

Entry = TypeVar("Entry", bound="dict[int, Logprob] | None")


@dataclass
class OutputProcessor:
    tokenizer: PreTrainedTokenizerBase | None
    max_model_len: int

    def append_token(self, request: Request, token: int, logprobs: dict[int, Logprob] | None, now: float) -> bool:
        """Add a sampled token to its request; return whether that ends it. `now` is in seconds since the epoch."""
        request.output_token_ids.append(token)
        state, longest = request.sampling, request.max_num_tokens
        assert state is not None
        stop, num_tokens = None, request.num_known_tokens
        # the few tokens that may end it are looked at closely
        if token in state.stopping_ids or longest is None or num_tokens >= longest:
            stop = check_stop(state, token, num_tokens, self.max_model_len)
        return self.enter_token(request, token, logprobs, stop, now)

    def enter_token(
        self,
        request: Request,
        token: int,
        logprobs: dict[int, Logprob] | None,
        stop: tuple[str, int | None] | None,
        now: float,
    ) -> bool:
        """Enter the last of a request's tokens, which has been appended already; return whether that ends the request.
        `stop` is what `check_stop` says of the token, to which stop strings are added here."""
        metrics = request.metrics
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        metrics.last_token_time = now
        if logprobs is not None:
            request.logprobs.append(self.with_text(request, logprobs))
        assert request.detokenizer is not None
        stop_string = request.detokenizer.append(token, stop is not None and stop[0] == "stop")
        if stop_string is not None:
            request.finish("stop", stop_string)
        elif stop is not None:
            request.finish(*stop)
        else:
            return False
        return True

    def add_prompt_logprobs(
        self, group: RequestGroup, request: Request, start: int, entries: list[dict[int, Logprob]]
    ) -> None:
        """Enter what the positions from `start` + 1 on have. What is computed again after a preemption replaces the
        old."""
        if request is not group.requests[0]:
            return
        decoded = [self.with_text(request, entry) for entry in entries]
        group.prompt_logprobs = [*(group.prompt_logprobs or [None])[: start + 1], *decoded]

    def with_text(self, request: Request, entry: dict[int, Logprob]) -> dict[int, Logprob]:
        """Return the entry with the text of each token, if the request wants text."""
        if self.tokenizer is None or request.params is None or not request.params.detokenize:
            return entry
        return with_decoded_tokens(entry, self.tokenizer)

    def record_blend(self, group: RequestGroup, request: Request, result: BlendResult) -> ReuseCounts | None:
        """Count what a blended prefill reused. Return None for a request that is blended again after a preemption: it
        keeps its first counts, as what it finds then may be its own."""
        if request.found_in is not None:
            return None
        counts = count_reuse(result)
        request.num_cached_tokens, request.found_in = counts.num_found, dict(counts.found)
        _record(group, counts, result.plan)
        return counts

    def record_retained(self, group: RequestGroup, request: Request, retention: RetentionKey, asked: BlendPlan) -> bool:
        """Count what a prompt reused whose blended context was found in retained pages. Return whether it had not been
        counted yet."""
        if request.found_in is not None:
            return False
        request.found_in = {"retained": retention.num_tokens}
        reused, computed = retention.num_tokens, len(group.parsed.token_ids) - retention.num_tokens
        kinds = "r" * reused + "c" * computed
        _record(group, ReuseCounts(0, reused, 0, computed, request.found_in, kinds), asked, retained=True)
        return True

    def output(self, group: RequestGroup) -> RequestOutput:
        """Return the state of a group as its user sees it."""
        completions = [self.completion(request) for request in group.requests]
        token_ids = list(group.parsed.token_ids)  # the caller may change the prompt
        return self.assemble(group, completions, token_ids, self._text(group))

    def assemble(
        self, group: RequestGroup, completions: list[CompletionOutput], prompt_token_ids: list[int], prompt: str | None
    ) -> RequestOutput:
        """Return what is known of a group, with these completions and this text of its prompt."""
        errors = [request.error for request in group.requests if request.error]
        prompt_logprobs = group.prompt_logprobs
        output = RequestOutput(
            request_id=group.request_id,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            prompt_logprobs=None if prompt_logprobs is None else _format_logprobs(group.requests[0], prompt_logprobs),
            outputs=completions,
            finished=group.finished,
            metrics=group.metrics,
            num_cached_tokens=group.requests[0].num_cached_tokens,
            num_found_tokens=_count_found_tokens(group.requests[0]),
            blend=group.blend,
            error=errors[0] if errors else None,
        )
        if self.tokenizer is not None:
            output.show_with(partial(token_texts, self.tokenizer))
        return output

    def _text(self, group: RequestGroup) -> str | None:
        """Return the text of a prompt: as it was given, or of one made of pieces what its ids decode to."""
        parsed, params = group.parsed, group.requests[0].params
        wanted = parsed.text is None and parsed.is_composed and params is not None and params.detokenize
        if wanted and self.tokenizer is not None and group.text is None:
            group.text = str(self.tokenizer.decode(parsed.token_ids))
        return group.text if parsed.text is None else parsed.text

    def completion(self, request: Request, text: str | None = None, start: int = 0) -> CompletionOutput:
        """Return what has been generated from token `start` on. `text` is given where it is not the whole text."""
        cumulative, logprobs = None, None
        if request.params is not None and request.params.logprobs is not None:
            pairs = zip(request.logprobs, request.output_token_ids, strict=False)
            cumulative = sum([entry[token].logprob for entry, token in pairs])
            logprobs = _format_logprobs(request, request.logprobs[start:])
        if text is None:
            text = request.detokenizer.text if request.detokenizer is not None else ""
        return CompletionOutput(
            index=request.index,
            text=text,
            token_ids=request.output_token_ids[start:],
            cumulative_logprob=cumulative,
            logprobs=logprobs,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )


def _record(group: RequestGroup, counts: ReuseCounts, plan: BlendPlan, retained: bool = False) -> None:
    """Enter the counts of a group's first completion, which are its user's."""
    if group.blend is None:
        group.blend = BlendStats(
            selector=plan.selector.name,
            num_reused_tokens=counts.reused,
            num_recomputed_tokens=counts.recomputed,
            num_exact_tokens=counts.exact,
            num_chunks=len(group.parsed.chunk_bounds),
            recompute_ratio=plan.ratio,
            retained=retained,
            num_merged_parts=group.parsed.num_merged_parts,
            num_encoded_tokens=counts.encoded,
            token_kinds=counts.kinds,
        )


def _format_logprobs(request: Request, entries: list[Entry]) -> list[Entry] | FlatLogprobs:
    """Return log-probabilities in the form that the request wants."""
    flat = request.params is not None and request.params.flat_logprobs
    return FlatLogprobs.from_positions(entries) if flat else list(entries)


def _count_found_tokens(request: Request) -> dict[str, int]:
    """Return how many prompt tokens were found in each place."""
    if request.found_in is not None:
        return dict(request.found_in)
    return {"prefix_cache": request.num_cached_tokens} if request.num_cached_tokens else {}
