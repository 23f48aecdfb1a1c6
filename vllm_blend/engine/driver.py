"""One engine for several threads: one of them drives its steps, and the others wait for what is theirs.

Whatever touches the engine's state holds `Driver.lock`. A caller opens an inbox for its requests, adds them and waits.
The first to wait drives: it runs step after step, and every output goes into the inbox of its request. When the driver
has what it waits for, or an error or a Ctrl-C ends its wait, it rings the others, and one of them goes on driving.
Outputs of requests without an inbox are kept for the next caller of `LLMEngine.step`.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

from vllm_blend.outputs import RequestOutput

if TYPE_CHECKING:
    from vllm_blend.engine.llm_engine import LLMEngine

LOOK_AGAIN_SECONDS = 1.0  # the longest that a ring is missed, should a second Ctrl-C have cut a hand-over short

P = ParamSpec("P")
R = TypeVar("R")


class TurnLock:
    """A reentrant lock that threads get in about the order in which they ask: a thread that releases it and asks again
    at once, as the driver does after every step, queues behind those that wait."""

    def __init__(self, before_release: Callable[[], None]) -> None:
        self.closed: str | None = None  # why nothing may be done under it any more
        self._before_release = before_release
        self._queue, self._lock = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._stepping = False

    @property
    def held(self) -> bool:
        """Whether the calling thread has it."""
        return self._owner == threading.get_ident()

    @property
    def in_step(self) -> bool:
        """Whether the calling thread has it and is in the middle of a step: the step has called a user's function."""
        return self.held and self._stepping

    def __enter__(self) -> None:
        self._take()
        if self.closed is not None:
            self.__exit__()
            raise RuntimeError(self.closed)

    @contextmanager
    def unless_closed(self) -> Iterator[bool]:
        """Hold the lock even if nothing may be done under it any more; gives whether something may."""
        self._take()
        try:
            yield self.closed is None
        finally:
            self.__exit__()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Mark the thread that holds the lock as being in a step."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def check_between_steps(self) -> None:
        """Raise RuntimeError in the middle of a step, whose requests and pages must stay as it found them."""
        if self.in_step:
            raise RuntimeError(
                "a function that a step calls, such as a logits processor, cannot change the engine or run requests: "
                "do it when the step has ended, outside the function"
            )

    def __exit__(self, *_: object) -> None:
        try:
            if self._depth == 1 and self.closed is None:
                self._before_release()
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._owner = None
                self._lock.release()

    def try_enter(self) -> bool:
        """Take the lock if no thread has it, not even this one."""
        if not self._lock.acquire(blocking=False):
            return False
        self._enter()
        self._depth = 1
        return True

    def _take(self) -> None:
        if not self.held:
            with self._queue:
                self._lock.acquire()
            self._enter()
        self._depth += 1

    def _enter(self) -> None:
        self._owner = threading.get_ident()
        self._stepping = False  # also where a second Ctrl-C has cut off the end of the last step


class _Locked(Protocol):
    @property
    def lock(self) -> TurnLock: ...


S = TypeVar("S", bound=_Locked)


def exclusive(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Have a method hold the lock of its object, and refuse to run in the middle of a step."""

    @wraps(method)
    def locked(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            self.lock.check_between_steps()
            return method(self, *args, **kwargs)

    return locked


@dataclass(eq=False)
class Inbox:
    """Where one caller finds the outputs of its requests, in the order in which they came."""

    request_ids: list[str] = field(default_factory=list)
    outputs: deque[RequestOutput] = field(default_factory=deque)
    bell: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)

    def ring(self) -> None:
        """Wake the thread that waits."""
        if self.bell.empty():
            self.bell.put(None)


class Driver:
    """See the module's docstring."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self.lock = TurnLock(self._abort_dropped)
        self._inboxes: dict[str, Inbox] = {}
        self._waiting: dict[Inbox, None] = {}
        self._driving: Inbox | None = None
        self._driving_thread: int | None = None
        self._seat = threading.RLock()  # of the driver: held while one sits down, also by a signal's handler meanwhile
        self._kept: dict[str, RequestOutput] = {}  # the newest outputs of requests without an inbox
        self._dropped: deque[Inbox] = deque()  # closed where the lock could not be waited for

    @property
    def keeps_outputs(self) -> bool:
        """Whether there are outputs for the next caller of `LLMEngine.step`."""
        return bool(self._kept)

    def expect(self, request_id: str, inbox: Inbox) -> None:
        """Have the outputs of a request that is about to be added put into `inbox`."""
        inbox.request_ids.append(request_id)
        self._inboxes[request_id] = inbox

    def refused(self, request_id: str, inbox: Inbox) -> None:
        """A request that was expected could not be added."""
        inbox.request_ids.remove(request_id)
        del self._inboxes[request_id]

    def close(self, inbox: Inbox) -> None:
        """Keep nothing more for a caller, and abort those of its requests that still run, when a step that calls this
        has ended."""
        with self.lock.unless_closed() as is_open:
            if self.lock.in_step:
                self._dropped.append(inbox)
            elif is_open:
                self._abort(inbox)

    def drop(self, inbox: Inbox) -> None:
        """Do what `close` does without waiting, as a finalizer must that runs in the middle of a step."""
        self._dropped.append(inbox)
        if self.lock.try_enter():
            self.lock.__exit__()  # which aborts what was dropped

    def wait(self, inbox: Inbox, arrived: Callable[[], bool]) -> None:
        """Return when `arrived()`, which is asked in this thread only; drive the engine unless another thread does.

        Without outputs to look at, `arrived` calls nothing of the user's. With some it may, and that may wait in turn.
        """
        if self.lock.held:
            raise RuntimeError("a callback of the engine cannot wait for other requests: its step has to end first")
        self._waiting[inbox] = None
        try:
            while not arrived():
                if self._drives(inbox):
                    self._step(inbox, arrived)
                else:
                    with suppress(queue.Empty):
                        inbox.bell.get(timeout=LOOK_AGAIN_SECONDS)
        finally:
            self._waiting.pop(inbox, None)
            if self._driving is inbox:
                self._driving = None
                self.ring_all()

    def abandon_all(self) -> None:
        """Deliver nothing to anyone any more."""
        self._inboxes.clear()
        self._kept.clear()

    def ring_all(self) -> None:
        """Have every thread that waits look at what has changed."""
        for inbox in list(self._waiting):
            inbox.ring()

    def distribute(self, outputs: Iterable[RequestOutput]) -> None:
        """Put outputs where they are waited for, or keep them."""
        for output in outputs:
            inbox = self._inboxes.get(output.request_id)
            if inbox is None:
                self._keep([output])
                continue
            inbox.outputs.append(output)
            if output.finished:  # and its id is free
                del self._inboxes[output.request_id]
            if inbox is not self._driving:
                inbox.ring()

    def take_kept(self) -> list[RequestOutput]:
        """Hand over the outputs that were kept."""
        kept, self._kept = list(self._kept.values()), {}
        return kept

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request."""
        self._kept.pop(request_id, None)

    def is_free(self, request_id: str) -> bool:
        """Whether no request has this id, and no output that is still to be handed over."""
        return not (self._engine.has_request(request_id) or request_id in self._kept or self.awaits(request_id))

    def awaits(self, request_id: str) -> bool:
        """Whether a caller waits for the outputs of a request."""
        return request_id in self._inboxes

    def _keep(self, outputs: Iterable[RequestOutput]) -> None:
        self._kept.update((output.request_id, output) for output in outputs)

    def _drives(self, inbox: Inbox) -> bool:
        with self._seat:
            # The driver waits here again if what it does with its outputs, such as a progress bar, runs requests.
            if self._driving is None or self._driving_thread == threading.get_ident():
                self._driving, self._driving_thread = inbox, threading.get_ident()
        return self._driving is inbox

    def _step(self, inbox: Inbox, arrived: Callable[[], bool]) -> None:
        with self.lock:
            if inbox.outputs or arrived():  # a thread that calls the engine's own step() was quicker
                return
            if self._engine.is_idle:
                raise RuntimeError(
                    f"requests {inbox.request_ids} ended without an output: report this with what was called"
                )
            self._keep(self._engine.step())

    def _abort(self, inbox: Inbox) -> None:
        for request_id in inbox.request_ids:
            if self._inboxes.get(request_id) is inbox:
                del self._inboxes[request_id]
                if self._engine.has_request(request_id):
                    self._engine.abort_request(request_id)

    def _abort_dropped(self) -> None:
        while self._dropped:
            self._abort(self._dropped.popleft())


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Let a Ctrl-C wait until a step is over: cut off in the middle, it would leave the requests of other callers half
    entered. A second Ctrl-C is raised at once."""
    usual = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return
    pending: list[int] = []

    def hold_back(number: int, frame: FrameType | None) -> None:
        if pending:
            usual(number, frame)
        pending.append(number)

    signal.signal(signal.SIGINT, hold_back)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if pending:
            raise KeyboardInterrupt
