"""The step loop: choose a step, queue it on the device, read it, report the requests that advanced."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_blend.blend.controller import LoadingController
from vllm_blend.core.step import SchedulerOutput
from vllm_blend.engine.chunk_stores import observe_step
from vllm_blend.engine.errors import dead_if_lost
from vllm_blend.engine.extension import Extension, Step
from vllm_blend.engine.metrics import StatLogger
from vllm_blend.engine.requests import LiveRequests, RequestGroup
from vllm_blend.engine.step_results import StepResults
from vllm_blend.executor.base import Executor
from vllm_blend.kv_store.chunk_kv import ChunkLost
from vllm_blend.outputs import RequestOutput
from vllm_blend.request import Request
from vllm_blend.worker.runner_output import RunnerOutput

logger = logging.getLogger(__name__)

LOAD_WAIT_SECONDS = 0.05  # the longest that a step waits for chunks when there is nothing to compute


@dataclass(eq=False)
class StepLoop:
    """Runs the steps of an engine. `runs_ahead`: a step is queued on the device before the one before it is read,
    so that the host works while the device does. What it computes for a request that turns out to have ended is thrown
    away. Where a draw follows the tokens before it, only the model runs ahead, and the draw waits until they are
    read."""

    executor: Executor
    requests: LiveRequests
    results: StepResults
    extensions: list[Extension]
    controller: LoadingController | None
    stat_logger: StatLogger | None
    runs_ahead: bool
    _in_flight: Step | None = None
    _unreported: list[RequestGroup] = field(default_factory=list)  # which ended in a step that could not be read
    _launch_failed: bool = False

    def __post_init__(self) -> None:
        self.scheduler, self.composer = self.requests.scheduler, self.requests.composer

    @property
    def is_idle(self) -> bool:
        """Return whether nothing runs, and nothing waits to run."""
        return not (self.scheduler.has_requests or self.composer.is_loading or self._unreported)

    def run(self) -> list[RequestOutput]:
        """Run one step, and return the outputs of the requests that advanced."""
        self.requests.schedule_first(self.composer.poll())
        self.requests.compose_lost()
        if self._in_flight is None or self._in_flight.is_abandoned:
            self._in_flight = self.launch(ahead=False)
        if self._in_flight is None and self.composer.start_early():
            self._in_flight = self.launch(ahead=False)
        if self._in_flight is None:
            if not self._unreported:
                self.composer.wait(LOAD_WAIT_SECONDS)
            return self._report(())
        following = self.launch(ahead=True) if self._may_run_ahead(self._in_flight) else None
        done, self._in_flight = self._in_flight, following
        try:
            touched = self._read(done)
            if following is not None:
                self.executor.draw(following.result)  # unless it was queued with the step
            self.settle_if_idle()
        except BaseException:
            self._undo([done] if following is None else [done, following])
            raise
        return self._report(touched)

    @property
    def has_full_step(self) -> bool:
        """Return whether `run_full` has something to do: the device works beside the host, and what waits fills a
        step."""
        return self.runs_ahead and self.scheduler.has_full_step

    def run_full(self) -> list[RequestOutput]:
        """Keep the device busy while a caller still adds requests, and return the outputs of those that advanced. The
        first step is queued only; each later one is queued before the one before it is read. The steps hold the same
        requests as if all had been added before the first, unless some wait for a context that another one blends."""
        if self._in_flight is not None and not self._in_flight.is_abandoned:
            return self.run()
        self._in_flight = self.launch(ahead=False)
        return []

    def launch(self, ahead: bool) -> Step | None:
        """Queue a step on the device; return None if there is nothing to compute."""
        for extension in self.extensions:
            extension.before_schedule(self.scheduler.running, ahead)
        scheduled = self.scheduler.schedule(ahead)
        if not scheduled:
            return None
        self.results.count_scheduled(scheduled)
        launched = None if ahead else time.perf_counter()
        self._launch_failed = True
        try:
            with dead_if_lost():
                result = self.executor.execute_model(scheduled)
                if not (ahead and _follows_tokens(result)):
                    self.executor.draw(result)
        except ChunkLost as error:
            self._start_again(scheduled, error)
            result = None
        self._launch_failed = False
        if result is None:
            return None
        self.scheduler.advance(scheduled)
        step = Step(scheduled, result, launched)
        for request in result.sampled:
            request.num_in_flight += 1
        try:
            for extension in self.extensions:
                extension.launched(step)
        except BaseException:
            self._undo([step] if self._in_flight is None else [self._in_flight, step])
            raise
        return step

    def settle_if_idle(self) -> None:
        """When nothing is left to run, drop a step that was queued ahead for requests that have ended, and let features
        end what they are doing, so that an idle engine holds no pages."""
        if self.scheduler.has_requests:
            return
        self.drop_abandoned()
        for extension in self.extensions:
            extension.idle()

    def drop_abandoned(self) -> None:
        """Let go of a step in flight whose requests have all finished: it may hold their chunks' KV."""
        if self._in_flight is not None and self._in_flight.is_abandoned:
            self._in_flight = None

    def withdraw_report(self, group: RequestGroup) -> None:
        """Report a group no more that ended in a step which could not be read."""
        self._unreported = [other for other in self._unreported if other is not group]

    def _start_again(self, scheduled: SchedulerOutput, error: ChunkLost) -> None:
        """Have requests start again that reuse a chunk which turned out to be damaged in the middle of a step. The rest
        of the step is done again."""
        logger.warning("a step is done again: %s", error)
        lost: dict[str, list[Request]] = {}
        for item in scheduled.scheduled:
            segments = item.request.blend.segments if item.is_blend and item.request.blend is not None else ()
            if any(segment.kv.arriving is not None and segment.kv.arriving.is_lost for segment in segments):
                lost.setdefault(item.request.request_id, []).append(item.request)
        for requests in reversed(lost.values()):
            self.requests.start_again(requests)

    def _may_run_ahead(self, step: Step) -> bool:
        """Return whether the next step can be chosen and computed before the tokens of this one are known."""
        if not self.runs_ahead or self._launch_failed:  # after an error, the next step starts from what is known
            return False
        return all(extension.may_run_ahead(step, self.scheduler.running) for extension in self.extensions)

    def _read(self, step: Step) -> list[RequestGroup]:
        """Wait for a step's tokens and enter them; return the groups of the requests that advanced."""
        with dead_if_lost():
            self.executor.settle(step.result)
        self.scheduler.settle(step.scheduled)
        touched = self.results.process(step.scheduled, step.result)
        if step.launched is not None:
            device, metrics = self.executor.driver_worker.device, self.results.metrics
            observe_step(metrics, self.controller, step.scheduled, step.result, device, step.launched)
        self.results.metrics.num_steps += 1
        if self.stat_logger is not None:
            blocks = self.scheduler.blocks
            self.stat_logger.step(len(self.scheduler.running), len(self.scheduler.waiting), blocks.usage)
        return touched

    def _undo(self, steps: Sequence[Step]) -> None:
        """Compute again what a step that could not be read, and the one after it, were to give. Requests that had ended
        by then are reported by the next step."""
        self._in_flight = None
        again: dict[Request, None] = {}
        for step in reversed(steps):
            drafts = {item.request: len(item.drafts) for item in step.scheduled.scheduled}
            for request in step.result.sampled:
                if not request.num_in_flight:  # its tokens were entered before reading failed
                    continue
                drew = step.result.tokens is not None and not request.finished  # it may have ended before its draw
                if drew and request.sampling is not None:
                    request.sampling.take_back(1 + drafts[request])
                request.num_in_flight -= 1
        for step in steps:
            for item in step.scheduled.scheduled:
                group = self.requests.groups.get(item.request)
                if group is not None and group.finished and group not in self._unreported:
                    self._unreported.append(group)
                if item.request in self.scheduler.running:
                    again[item.request] = None
        self.scheduler.send_back(list(again))

    def _report(self, touched: Sequence[RequestGroup]) -> list[RequestOutput]:
        """Return the outputs of groups that advanced, and of those that an earlier step could not report."""
        earlier, self._unreported = self._unreported, []
        outputs = []
        for group in dict.fromkeys([*earlier, *touched]):
            finished = group.finished
            if group.on_advance is not None:
                group.on_advance(group)
            elif finished or not group.final_only:
                outputs.append(self.results.processor.output(group))
            if finished:
                self.requests.forget(group)
        return outputs


def _follows_tokens(result: RunnerOutput) -> bool:
    """Return whether a step draws from logits that depend on the tokens before it in other ways than through the
    model."""
    return any(request.sampling is not None and request.sampling.follows_tokens for request in result.sampled)
