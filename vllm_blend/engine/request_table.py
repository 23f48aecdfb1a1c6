"""The unfinished requests of an `AsyncLLM`: brings what the engine process sends to the event loops that read it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

from vllm_blend.engine.async_request import AsyncRequest
from vllm_blend.engine.errors import EngineDeadError
from vllm_blend.engine.process.messages import Abort, Outputs, Stop, ToEngine

logger = logging.getLogger(__name__)

BATCH = 32  # requests whose news are entered before others get their turn on an event loop: some 0.1 ms
LOGPROBS = 1024  # after this many, others take their turn: each takes some microseconds to make
RECENT = 64  # requests whose ends tell how fast the queue moves
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0


def is_full(counts: Mapping[str, int], tenant: str, num_new: int, limit: int) -> bool:
    """Return whether a tenant may add no more where `limit` is the most for all together. One that has less than its
    part may add some even then, so that no tenant takes all: all together never have more than twice the limit."""
    total = sum(counts.values())
    if not total or total + num_new <= limit:
        return False
    return counts.get(tenant, 0) + num_new > limit // len({*counts, tenant}) or len({*counts, tenant}) == 1


@contextmanager
def counted(counts: Counter[str], tenant: str) -> Iterator[None]:
    """Count one more of a tenant as long as the context lasts. Tenants without any are left out of the counts, as
    `is_full` divides the limit among those that are there."""
    counts[tenant] += 1
    try:
        yield
    finally:
        counts[tenant] -= 1
        if not counts[tenant]:
            del counts[tenant]


class RequestTable:
    """Requests by number and by id. Each belongs to the event loop that it was made in; the client's thread hands what
    it hears over to these."""

    def __init__(self) -> None:
        self.send: Callable[[ToEngine], None]  # to the engine process, which is made later
        self._requests: dict[int, AsyncRequest] = {}
        self._ids: dict[str, AsyncRequest] = {}
        self._ends: deque[float] = deque(maxlen=RECENT)

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    @property
    def num_completions(self) -> Counter[str]:
        """Return the number of unfinished completions of each tenant."""
        counts: Counter[str] = Counter()
        for request in list(self._requests.values()):
            counts[request.tenant] += request.params.n
        return counts

    def add(self, request: AsyncRequest) -> None:
        """Keep a request until it has ended. Its id must be free."""
        self._requests[request.number] = self._ids[request.request_id] = request

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests with what there is of them; unknown ids are ignored, as they may just have finished."""
        aborted = [request for request_id in request_ids if (request := self._ids.get(request_id)) is not None]
        for request in aborted:
            request.abort()
            self.remove(request)
        self._tell_aborted([request.number for request in aborted])

    def abort_all(self) -> None:
        self.abort(list(self._ids))

    def drop(self, request: AsyncRequest) -> None:
        """Forget a request that is not read any more, and stop it if it still runs."""
        if request.number in self._requests:
            self.remove(request)
            self._tell_aborted([request.number])

    def remove(self, request: AsyncRequest) -> None:
        """Forget a request that has ended."""
        if self._requests.pop(request.number, None) is not None:
            self._ids.pop(request.request_id, None)
            self._ends.append(time.monotonic())

    def retry_after(self, num_waiting: int) -> float:
        """Estimate in how many seconds `num_waiting` requests will have ended, by how fast the last ones have."""
        if len(self._ends) < 2:
            return MIN_RETRY_SECONDS
        seconds = (time.monotonic() - self._ends[0]) / len(self._ends)
        return min(max(MIN_RETRY_SECONDS, float(math.ceil(seconds * num_waiting))), MAX_RETRY_SECONDS)

    def advanced(self, news: Outputs) -> None:
        """Hand news to the event loops of their requests. This and the next two are for the client's thread."""
        by_loop: defaultdict[asyncio.AbstractEventLoop, deque[AsyncRequest]] = defaultdict(deque)
        known, time = self._requests, news.time
        for delta in news.deltas:
            request = known.get(delta.number)
            if request is not None:
                request.arrived += delta.pieces()
                by_loop[request.loop].append(request)
        for number, token in zip(news.singles, news.token_ids, strict=True):
            request = known.get(number)
            if request is not None:
                request.arrived.append((token, time))
                by_loop[request.loop].append(request)
        for loop, requests in by_loop.items():
            self._run_in(loop, partial(self._enter, requests))

    def refused(self, number: int, error: Exception) -> None:
        """Fail a request that the engine did not take."""
        request = self._requests.get(number)
        if request is not None:
            self._run_in(request.loop, partial(self._fail, request, error))

    def died(self, error: EngineDeadError) -> None:
        """Fail every request."""
        for request in list(self._requests.values()):
            self._run_in(request.loop, partial(self._fail, request, error))

    def _run_in(self, loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
        try:
            loop.call_soon_threadsafe(work)
        except RuntimeError:  # the loop was closed with requests unread: nothing will read them
            left = [request for request in list(self._requests.values()) if request.loop is loop]
            for request in left:
                self.remove(request)
            self._tell_aborted([request.number for request in left])

    def _enter(self, requests: deque[AsyncRequest]) -> None:
        """Enter the news of some requests, and come back for the rest."""
        num_logprobs = 0
        for _ in range(min(BATCH, len(requests))):
            if num_logprobs > LOGPROBS:
                break
            request = requests.popleft()
            try:
                stopped, entered = request.enter_arrived()
            except Exception as error:  # a tokenizer of the user's may raise anything
                logger.exception("the text of request %s could not be made", request.request_id)
                request.fail(error)
                self.drop(request)
                continue
            num_logprobs += entered
            if request.arrived:
                requests.append(request)
            if stopped:
                self._tell_stopped(request, stopped)
            if request.finished:
                self.remove(request)
        if requests:
            asyncio.get_running_loop().call_soon(self._enter, requests)

    def _fail(self, request: AsyncRequest, error: Exception) -> None:
        request.fail(error)
        self.remove(request)

    def _tell_stopped(self, request: AsyncRequest, indices: list[int]) -> None:
        with suppress(EngineDeadError):  # then there is nothing to stop
            for index in indices:
                self.send(Stop(request.number, index))

    def _tell_aborted(self, numbers: list[int]) -> None:
        if numbers:
            with suppress(EngineDeadError):
                self.send(Abort(numbers))
