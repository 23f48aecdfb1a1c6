"""The outputs of one request as an iterator."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from vllm_blend.engine.driver import Driver, Inbox
from vllm_blend.outputs import RequestOutput


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
