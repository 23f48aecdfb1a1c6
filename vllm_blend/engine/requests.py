"""The unfinished requests of an engine, and what happens to each of them between two steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_blend.core.scheduler import Scheduler
from vllm_blend.engine.composer import ChunkComposer
from vllm_blend.engine.metrics import EngineMetrics
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.outputs import BlendStats, Logprob, RequestMetrics
from vllm_blend.request import Request, RequestStatus


@dataclass(eq=False)
class RequestGroup:
    """A user's request and the sequences (one per completion) that serve it."""

    request_id: str
    parsed: ParsedPrompt
    metrics: RequestMetrics
    requests: list[Request]
    final_only: bool = False  # report once, at the end
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    text: str | None = None  # what the prompt's ids decode to, once it has been asked for
    blend: BlendStats | None = None
    on_end: Callable[[], None] | None = None  # called once, when nothing more will come
    on_advance: Callable[[RequestGroup], None] | None = None  # called when there is news, instead of reporting it
    thread: int = field(default_factory=threading.get_ident)  # which added it

    @property
    def finished(self) -> bool:
        for request in self.requests:  # noqa: SIM110 - a generator would double the time of what every step asks
            if request.status is not RequestStatus.FINISHED:
                return False
        return True


@dataclass(eq=False)
class LiveRequests:
    """The groups that have not been reported as finished, and the way of their requests through the queues. `on_forget`
    lets the model runner drop what it keeps of requests."""

    scheduler: Scheduler
    composer: ChunkComposer
    metrics: EngineMetrics
    on_forget: Callable[[Sequence[Request]], None]
    by_id: dict[str, RequestGroup] = field(default_factory=dict)
    groups: dict[Request, RequestGroup] = field(default_factory=dict)

    def add(self, group: RequestGroup) -> None:
        """Keep a group from now on. Its requests are queued by `queue`."""
        self.by_id[group.request_id] = group
        self.groups |= dict.fromkeys(group.requests, group)

    def queue(self, group: RequestGroup) -> None:
        """Have the requests of a group scheduled, after the encodings that they need."""
        retention = group.requests[0].retention
        # Whose context is in retained pages already is composed only if these are gone when its turn comes.
        is_retained = retention is not None and retention.key in self.scheduler.blocks.retained
        blends = self.composer.planner.blends(group.parsed) and not is_retained
        encodings = self.composer.compose(group.parsed, group.requests) if blends else []
        for request in [*encodings, *group.requests]:
            self.scheduler.add(request)

    def schedule_first(self, encodings: Sequence[Request]) -> None:
        """Queue encodings ahead of all others of their priority: requests that came before those need them."""
        for encoding in reversed(encodings):
            self.scheduler.add_first(encoding)

    def compose_lost(self) -> None:
        """Plan requests anew that counted on retained pages which have been given to others since."""
        lost = self.scheduler.take_lost()
        for request in lost:
            if not request.finished:
                self.schedule_first(self.composer.compose(self.groups[request].parsed, [request]))

    def start_again(self, requests: Sequence[Request]) -> None:
        """Plan running requests of one group anew, without chunks that were lost."""
        self.scheduler.send_back(requests)
        self.schedule_first(self.composer.start_again(self.groups[requests[0]].parsed, requests))

    def finish_encoding(self, request: Request) -> None:
        """Store the chunk that a request has encoded, and go on with those that waited for it."""
        started = self.composer.encoded(request)
        self.scheduler.finish(request)
        self.schedule_first(started)

    def finish(self, request: Request, reason: str) -> None:
        """End a request, unless it has just ended itself, and take its pages back."""
        if not request.finished:
            request.finish(reason)
        self.scheduler.finish(request)
        self.metrics.finished[reason] = self.metrics.finished.get(reason, 0) + 1

    def abort(self, group: RequestGroup) -> None:
        """End the requests of a group that still run."""
        for request in group.requests:
            if not request.finished:
                self.finish(request, "abort")

    def withdraw_encodings(self, group: RequestGroup) -> None:
        """End encodings that only an aborted group waited for."""
        for encoding in self.composer.forget(group.requests):
            self.scheduler.finish(encoding)

    def forget(self, group: RequestGroup) -> None:
        """Let go of a group of which nothing more is reported."""
        self.by_id.pop(group.request_id, None)
        for request in group.requests:
            self.groups.pop(request, None)
        self.on_forget(group.requests)
        on_end, group.on_end = group.on_end, None
        if on_end is not None:
            on_end()
