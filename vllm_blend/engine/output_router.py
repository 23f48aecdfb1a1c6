"""Whoever waits for a request's outputs may run the engine's steps: the others' outputs are kept for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_blend.outputs import RequestOutput

if TYPE_CHECKING:
    from vllm_blend.engine.llm_engine import LLMEngine


class OutputRouter:
    """Outputs by request, for requests that are read in any order, or in turns."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._boxes: dict[str, deque[RequestOutput]] = {}

    def outputs(self, request_id: str) -> Iterator[RequestOutput]:
        """The outputs of a request that has just been added, up to the finished one. A reader that stops before, or is
        dropped, aborts the request."""
        self._boxes[request_id] = deque()
        return _Outputs(self, request_id)

    def next(self, request_id: str) -> RequestOutput:
        """The next output of a request. Raises RuntimeError where another loop has taken it from the engine."""
        box = self._boxes[request_id]
        while not box:
            if not self._engine.has_request(request_id):
                raise RuntimeError(
                    f"the outputs of request {request_id} are gone: it was aborted, or another loop over the engine's "
                    "step() took them"
                )
            for output in self._engine.step():
                self.keep(output)
        return box.popleft()

    def keep(self, output: RequestOutput) -> bool:
        """Keep an output that somebody else will read; whether there is somebody."""
        box = self._boxes.get(output.request_id)
        if box is not None:
            box.append(output)
        return box is not None

    def close(self, request_id: str) -> None:
        if self._boxes.pop(request_id, None) is not None and self._engine.has_request(request_id):
            self._engine.abort_request(request_id)


class _Outputs(Iterator[RequestOutput]):
    """An iterator that is closed when it ends, by `close`, or when nobody holds it any more."""

    def __init__(self, router: OutputRouter, request_id: str) -> None:
        self._router, self._request_id = router, request_id
        self._finished = False

    def __next__(self) -> RequestOutput:
        if self._finished:
            raise StopIteration
        try:
            output = self._router.next(self._request_id)
        except BaseException:  # also a Ctrl-C: what was queued must not run with the next call
            self.close()
            raise
        if output.finished:
            self.close()
        return output

    def close(self) -> None:
        self._finished = True
        self._router.close(self._request_id)

    def __del__(self) -> None:
        if not self._finished:
            self.close()
