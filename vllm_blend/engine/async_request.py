"""A request as the server's process sees it: text is made here from the tokens that the engine process sends."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Executor
from dataclasses import replace

from vllm_blend.detokenizer import Detokenizer
from vllm_blend.engine.output_processor import OutputProcessor
from vllm_blend.engine.process.messages import Delta, Facts, Tokens, WireLogprobs, from_wire
from vllm_blend.engine.requests import RequestGroup
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from vllm_blend.request import Request
from vllm_blend.sampling_params import RequestOutputKind, SamplingParams

INLINE_LOGPROBS = 256  # more of them are made in another thread: other requests go on meanwhile


class AsyncRequest:
    """The outputs of one request, for one reader.

    Tokens are entered when they arrive, also while nothing is read: a stop string must be found at once. An output is
    made when it is read, so a slow reader gets fewer and larger ones.
    """

    def __init__(
        self,
        number: int,
        request_id: str,
        parsed: ParsedPrompt,
        params: SamplingParams,
        arrival_time: float,
        processor: OutputProcessor,
        converting: Executor | None = None,
        tenant: str = "",
    ) -> None:
        """`converting` runs what takes long; None: a thread of the event loop's."""
        self.number, self.request_id, self.params = number, request_id, params
        self.tenant = tenant
        self.loop = asyncio.get_running_loop()
        metrics = RequestMetrics(arrival_time)
        requests = []
        for index in range(params.n):
            request = Request(request_id, parsed.token_ids, params, metrics, index)
            request.detokenizer = Detokenizer(processor.tokenizer, params, parsed.token_ids)
            requests.append(request)
        self._group = RequestGroup(request_id, parsed, metrics, requests)
        self._processor, self._converting = processor, converting
        self._shown = [(0, 0)] * params.n  # tokens and characters of each completion in outputs that were read
        self._ended = [False] * params.n  # completions whose end was read
        # another thread appends to it; a token alone comes with its time, as in `Outputs.singles`
        self.arrived: deque[Delta | tuple[int, float]] = deque()
        self._prompt_logprobs: list[WireLogprobs | None] | None = None  # as they came, until they are read
        self.has_news = False  # whether `read` has something to return
        self._reader: asyncio.Future[None] | None = None  # waits for news
        self._error: BaseException | None = None

    @property
    def finished(self) -> bool:
        """Return whether nothing more will come but what is there to be read."""
        return self._error is not None or self._group.finished

    @property
    def arrival_time(self) -> float:
        return self._group.metrics.arrival_time

    @property
    def has_begun(self) -> bool:
        """Return whether the engine has generated anything."""
        return self._group.metrics.first_token_time is not None

    def enter_arrived(self) -> tuple[list[int], int]:
        """Enter what has arrived, up to the first news with log-probabilities. Return the completions that a stop
        string has ended, of which the engine must be told, and how many log-probabilities were entered."""
        stopped: list[int] = []
        while self.arrived:
            news = self.arrived.popleft()
            if isinstance(news, tuple):
                stopped += self._enter_single(*news)
                continue
            stopped += self._enter(news)
            if num_logprobs := news.num_logprobs:
                return stopped, num_logprobs
        return stopped, 0

    def abort(self) -> None:
        """End it with what there is."""
        for request in self._group.requests:
            if not request.finished:
                request.finish("abort")
        self._tell_reader()

    def fail(self, error: BaseException) -> None:
        """Raise an error in the reader, unless the request has finished."""
        if not self.finished:
            self._error = error
            self._tell_reader()

    async def read(self) -> RequestOutput:
        """Wait for news, and return the next output. Raises the error with which the request failed."""
        while not self.has_news:
            self._reader = self.loop.create_future()
            await self._reader
        if self._prompt_logprobs is not None:
            await self._make_prompt_logprobs()
        self.has_news = False
        if self._error is not None:
            raise self._error
        if self.params.output_kind is RequestOutputKind.DELTA:
            return self._delta()
        output = self._processor.output(self._group)
        if not output.finished:  # what later tokens may change is held back
            for completion, request in zip(output.outputs, self._group.requests, strict=True):
                completion.text = _stream_text(request)
        return output

    def _enter(self, delta: Delta) -> list[int]:
        if self.finished:
            return []
        if delta.facts is not None:
            self._enter_facts(delta.facts)
        # a completion that a stop string has ended runs on until the engine hears of it
        news = [tokens for tokens in delta.tokens if not self._group.requests[tokens.index].finished]
        stopped = [tokens.index for tokens in news if self._enter_tokens(tokens, delta.time)]
        if self._group.finished or (news and self.params.output_kind is not RequestOutputKind.FINAL_ONLY):
            self._tell_reader()
        return stopped

    def _enter_single(self, token: int, now: float) -> list[int]:
        request = self._group.requests[0]
        if self._error is not None or request.finished:
            return []
        request.output_token_ids.append(token)
        stopped = self._processor.enter_token(request, token, None, None, now)
        if stopped or self.params.output_kind is not RequestOutputKind.FINAL_ONLY:
            self._tell_reader()
        return [request.index] if stopped else []

    def _tell_reader(self) -> None:
        self.has_news = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _enter_facts(self, facts: Facts) -> None:
        group, first = self._group, self._group.requests[0]
        # RequestMetrics that were handed out are updated, as the engine's own are
        vars(group.metrics).update(vars(facts.metrics))
        first.num_cached_tokens, first.found_in, group.blend = facts.num_cached_tokens, facts.found_in, facts.blend
        first.error = facts.error
        if facts.token_ids is not None:
            group.parsed = replace(group.parsed, token_ids=facts.token_ids, text=None)
        if facts.prompt_logprobs is not None:
            self._prompt_logprobs = facts.prompt_logprobs

    async def _make_prompt_logprobs(self) -> None:
        """Make the prompt's log-probabilities of what the engine has sent: many of them in a thread, one request at a
        time, as they take microseconds each."""
        wire, self._prompt_logprobs = self._prompt_logprobs or [], None
        if sum(len(entry or ()) for entry in wire) <= INLINE_LOGPROBS:
            made = self._with_texts(wire)
        else:
            made = await self.loop.run_in_executor(self._converting, self._with_texts, wire)
        self._group.prompt_logprobs = made

    def _with_texts(self, wire: list[WireLogprobs | None]) -> list[dict[int, Logprob] | None]:
        with_text, first = self._processor.with_text, self._group.requests[0]
        return [None if entry is None else with_text(first, from_wire(entry)) for entry in wire]

    def _enter_tokens(self, tokens: Tokens, now: float) -> bool:
        """Enter the new tokens of a completion; return whether a stop string ended it before the engine did."""
        request = self._group.requests[tokens.index]
        last = len(tokens.token_ids) - 1
        reason = tokens.finish_reason
        for at, token in enumerate(tokens.token_ids):
            entry = None if tokens.logprobs is None else from_wire(tokens.logprobs[at])
            stop = (reason, tokens.stop_reason) if at == last and reason in ("stop", "length") else None
            request.output_token_ids.append(token)
            if self._processor.enter_token(request, token, entry, stop, now):
                return reason is None
        if reason is not None:  # an error, or an end without a token
            request.finish(reason, tokens.stop_reason)
        return False

    def _delta(self) -> RequestOutput:
        """Return what is new since the last output. A prompt made of pieces has no text there: decoding thousands of
        tokens would delay the first one."""
        group = self._group
        completions = [news for request in group.requests if (news := self._completion_delta(request)) is not None]
        output = self._processor.assemble(group, completions, group.parsed.token_ids, group.parsed.text)
        group.prompt_logprobs = None  # which come once
        return output

    def _completion_delta(self, request: Request) -> CompletionOutput | None:
        index = request.index
        num_tokens, num_characters = self._shown[index]
        if self._ended[index] or (len(request.output_token_ids) == num_tokens and not request.finished):
            return None
        self._ended[index] = request.finished
        text = _stream_text(request)
        self._shown[index] = len(request.output_token_ids), len(text)
        return self._processor.completion(request, text[num_characters:], num_tokens)


def _stream_text(request: Request) -> str:
    assert request.detokenizer is not None
    return request.detokenizer.stream_text(request.finished)
