"""What is new of each request since it was last reported: all that the engine process sends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_blend.engine.process.messages import Delta, Facts, Outputs, Tokens, to_wire
from vllm_blend.engine.requests import RequestGroup
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.request import Request


@dataclass(eq=False)
class DeltaReporter:
    """Collects the news of requests, in the order in which the engine enters them. `ended` has the numbers of requests
    of which nothing more will come."""

    news: Outputs = field(default_factory=lambda: Outputs([]))
    ended: list[int] = field(default_factory=list)

    def watch(self, number: int, parsed: ParsedPrompt, num_completions: int) -> Callable[[RequestGroup], None]:
        """Return what the engine is to call when the request `number` has advanced."""
        return _Cursor(self, number, parsed, [0] * num_completions, num_completions)

    def take(self) -> Outputs | None:
        """Hand over what was collected; None if there is nothing. A request may report once between two calls."""
        news = self.news
        if not (news.deltas or news.singles):
            return None
        self.news = Outputs([])
        return news

    def take_ended(self) -> list[int]:
        """Hand over the numbers of the requests that ended."""
        ended, self.ended = self.ended, []
        return ended


@dataclass(eq=False, slots=True)
class _Cursor:
    """How much of a request has been reported. `sent` counts the tokens of each completion; -1: its end, too."""

    reporter: DeltaReporter
    number: int
    parsed: ParsedPrompt
    sent: list[int]
    num_running: int
    has_begun: bool = False
    num_prompt_logprobs: int = 0

    def __call__(self, group: RequestGroup) -> None:
        if self.has_begun and len(self.sent) == 1 and self._is_single(group.requests[0]):
            news, time = self.reporter.news, group.metrics.last_token_time
            assert time is not None
            self.sent[0] += 1
            news.singles.append(self.number)
            news.token_ids.append(group.requests[0].output_token_ids[-1])
            news.time = time
            return
        self._report_delta(group)

    def _is_single(self, request: Request) -> bool:
        """Return whether a token more is all that is new."""
        is_one = len(request.output_token_ids) == self.sent[0] + 1
        return is_one and request.finish_reason is None and not request.logprobs

    def _report_delta(self, group: RequestGroup) -> None:
        news = []
        for request in group.requests:  # plain code: it runs for every stream in every step
            index, known = request.index, request.output_token_ids
            sent, num_known = self.sent[index], len(known)
            finished = request.finish_reason is not None
            if sent == -1 or (sent == num_known and not finished):
                continue
            logprobs = [to_wire(entry) for entry in request.logprobs[sent:]] if request.logprobs else None
            tokens = Tokens(index, known[sent:], logprobs)
            if finished:
                tokens.finish_reason = request.finish_reason
                tokens.stop_reason = request.stop_reason if isinstance(request.stop_reason, int) else None
                self.num_running -= 1
            self.sent[index] = -1 if finished else num_known
            news.append(tokens)
        facts = None
        if not (self.has_begun and self.num_running):
            facts, self.has_begun = self._facts(group), True
            if not self.num_running:
                self.reporter.ended.append(self.number)
        metrics = group.metrics
        self.reporter.news.deltas.append(
            Delta(self.number, news, metrics.last_token_time or metrics.arrival_time, facts)
        )

    def _facts(self, group: RequestGroup) -> Facts:
        first = group.requests[0]
        prompt_logprobs, arranged = None, None
        if not self.has_begun and group.parsed is not self.parsed:
            arranged = group.parsed.token_ids
        if group.prompt_logprobs is not None and len(group.prompt_logprobs) > self.num_prompt_logprobs:
            self.num_prompt_logprobs = len(group.prompt_logprobs)
            prompt_logprobs = [None if entry is None else to_wire(entry) for entry in group.prompt_logprobs]
        errors = [request.error for request in group.requests if request.error]
        return Facts(
            group.metrics,
            first.num_cached_tokens,
            first.found_in,
            group.blend,
            errors[0] if errors else None,
            arranged,
            prompt_logprobs,
        )
