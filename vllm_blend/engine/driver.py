"""One engine for several threads: one of them drives its steps, and the others wait for what is theirs.

A thread that touches the engine's state holds `Driver.lock`. A caller opens an inbox for its requests, adds them and
waits. The first to wait drives: it runs step after step, and every output goes into the inbox of its request. When the
driver has what it waits for, or an error or a Ctrl-C ends its wait, it wakes the others, and one of them drives on.
Outputs of requests without an inbox are kept for the next caller of `LLMEngine.step`.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from vllm_blend.engine.lock import FairLock
from vllm_blend.outputs import RequestOutput

MISSED_WAKEUP_SECONDS = 1.0  # the longest that a wake-up is missed, should a second Ctrl-C have cut a hand-over short


@dataclass(eq=False)
class Inbox:
    """The outputs of one caller's requests, in the order in which they came."""

    request_ids: list[str] = field(default_factory=list)
    outputs: deque[RequestOutput] = field(default_factory=deque)
    wakeups: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)

    def wake(self) -> None:
        """Wake the thread that waits."""
        if self.wakeups.empty():
            self.wakeups.put(None)


class SteppedEngine(Protocol):
    """The methods of an engine that a driver calls."""

    @property
    def is_idle(self) -> bool: ...

    def step(self) -> list[RequestOutput]: ...

    def has_request(self, request_id: str) -> bool: ...

    def abort_request(self, request_id: str) -> None: ...


class Driver:
    """See the module's docstring."""

    def __init__(self, engine: SteppedEngine) -> None:
        self._engine = engine
        self.lock = FairLock(self._abort_dropped)
        self._inboxes: dict[str, Inbox] = {}
        self._waiting: dict[Inbox, None] = {}
        self._driving: Inbox | None = None
        self._driving_thread: int | None = None
        # held while a driver is chosen; a signal's handler may choose one meanwhile
        self._choosing = threading.RLock()
        self._kept: dict[str, RequestOutput] = {}  # the newest outputs of requests without an inbox
        self._dropped: deque[Inbox] = deque()  # closed where the lock could not be waited for

    @property
    def is_driven(self) -> bool:
        """Return whether a thread runs step after step."""
        return self._driving is not None

    @property
    def keeps_outputs(self) -> bool:
        """Return whether there are outputs for the next caller of `LLMEngine.step`."""
        return bool(self._kept)

    def expect(self, request_id: str, inbox: Inbox) -> None:
        """Have the outputs of a request that is about to be added put into `inbox`."""
        inbox.request_ids.append(request_id)
        self._inboxes[request_id] = inbox

    def stop_expecting(self, request_id: str, inbox: Inbox) -> None:
        """Undo `expect` for a request that could not be added."""
        inbox.request_ids.remove(request_id)
        del self._inboxes[request_id]

    def close(self, inbox: Inbox) -> None:
        """Keep nothing more for a caller, and abort those of its requests that still run. In the middle of a step, this
        is done when the step has ended."""
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
                if self._becomes_driver(inbox):
                    self._step(inbox, arrived)
                else:
                    with suppress(queue.Empty):
                        inbox.wakeups.get(timeout=MISSED_WAKEUP_SECONDS)
        finally:
            self._waiting.pop(inbox, None)
            if self._driving is inbox:
                self._driving = None
                self.wake_all()

    def abandon_all(self) -> None:
        """Deliver no more outputs."""
        self._inboxes.clear()
        self._kept.clear()

    def wake_all(self) -> None:
        """Have every thread that waits look at what has changed."""
        for inbox in list(self._waiting):
            inbox.wake()

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
                inbox.wake()

    def take_kept(self) -> list[RequestOutput]:
        """Hand over the outputs that were kept."""
        kept, self._kept = list(self._kept.values()), {}
        return kept

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request."""
        self._kept.pop(request_id, None)

    def is_free(self, request_id: str) -> bool:
        """Return whether no request has this id, nor an output that is still to be handed over."""
        return not (self._engine.has_request(request_id) or request_id in self._kept or self.awaits(request_id))

    def awaits(self, request_id: str) -> bool:
        """Return whether a caller waits for the outputs of a request."""
        return request_id in self._inboxes

    def _keep(self, outputs: Iterable[RequestOutput]) -> None:
        self._kept.update((output.request_id, output) for output in outputs)

    def _becomes_driver(self, inbox: Inbox) -> bool:
        with self._choosing:
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


class OutputStream(Iterator[RequestOutput]):
    """The outputs of a request up to the finished one. Asking for the next one runs the engine as far as it needs; a
    stream that is closed or dropped before its end aborts the request."""

    def __init__(self, driver: Driver, inbox: Inbox) -> None:
        self._driver, self._inbox = driver, inbox
        self._finished = False
        self._reading = threading.Lock()

    def __next__(self) -> RequestOutput:
        if not self._reading.acquire(blocking=False):
            raise ValueError("another thread is reading this stream: read each stream in one thread")
        try:
            if self._finished:
                raise StopIteration
            try:
                self._driver.wait(self._inbox, lambda: bool(self._inbox.outputs))
            except BaseException:  # also a Ctrl-C: what was queued must not run with the next call
                self.close()
                raise
            output = self._inbox.outputs.popleft()
            if output.finished:
                self.close()
            return output
        finally:
            self._reading.release()

    def close(self) -> None:
        """Abort the request unless it has finished."""
        self._finished = True
        self._driver.close(self._inbox)

    def __del__(self) -> None:
        if not self._finished:
            self._finished = True
            self._driver.drop(self._inbox)
