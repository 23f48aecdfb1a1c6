"""One worker in this process, rank 0, and each other rank's in a process of its own, started by a subclass."""

from __future__ import annotations

import pickle
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from vllm_blend.core.step import SchedulerOutput
from vllm_blend.distributed.ranks import Ranks
from vllm_blend.executor.base import WorkerLostError
from vllm_blend.executor.leader import Leader
from vllm_blend.executor.messages import PrefillMessage, StepMessage
from vllm_blend.executor.team import LAST_WORDS_SECONDS, Team
from vllm_blend.executor.worker_process import WorkerSettings
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.request import Request
from vllm_blend.worker.runner_output import RunnerOutput
from vllm_blend.worker.worker import Worker

T = TypeVar("T")

POLL_SECONDS = 0.1  # between two looks at whether a worker that is being started lives


class SeveralRanksExecutor(ABC):
    """Runs steps on several ranks. Each gets the same requests and blocks, and computes its own heads.

    A worker that ends takes the engine with it: the others wait for its tensors, so they are ended too, and every step
    is a WorkerLostError from then on.
    """

    def __init__(self, settings: WorkerSettings, size: int) -> None:
        """Start the workers of `size` ranks, and wait until all have loaded the model. Raises the errors of `Worker`,
        and WorkerLostError if another rank fails."""
        self._problem: str | None = None
        self._team = Team()
        self._finalizer = weakref.finalize(self, self._team.end)
        try:
            meet = self._start(settings, size)
            self._expect("started")
            self.driver_worker = self._build(settings, meet)
            self._expect("ready")
        except BaseException:
            self._kill()
            raise
        self._leader = Leader(self.driver_worker.num_layers)

    @abstractmethod
    def _start(self, settings: WorkerSettings, size: int) -> Callable[[], Ranks]:
        """Start the other ranks' processes and fill `_team`. Return what makes this process rank 0 among them, as
        `ranks.connect` does."""

    def execute_model(self, output: SchedulerOutput) -> RunnerOutput:
        runner = self.driver_worker.model_runner
        return self._run_together(self._leader.step(output), partial(runner.execute, output))

    def draw(self, result: RunnerOutput) -> None:
        self.driver_worker.model_runner.draw(result)

    def settle(self, result: RunnerOutput) -> None:
        if result.tokens is not None:
            result.tokens.result()
        self.check()

    def prefill_chunk(self, request: Request, max_tokens: int) -> ChunkKV:
        runner = self.driver_worker.model_runner
        message, parts = self._leader.prefill(request, max_tokens)
        kv = self._run_together(message, partial(runner.prefill_chunk, request, max_tokens))
        return replace(kv, parts=parts)

    def collected_chunk(self, request: Request) -> ChunkKV:
        return self._leader.keep_collected(request, ChunkKV.collected(request.collected_kv()))

    def forget(self, requests: Sequence[Request]) -> None:
        self.driver_worker.model_runner.forget(requests)

    def check(self) -> None:
        if self._problem is None:
            self._problem = self._team.first_end()
            if self._problem is not None:
                self._kill()
        if self._problem is not None:
            raise WorkerLostError(f"{self._problem}: make another engine")

    def shutdown(self) -> None:
        """End the other ranks, and wait for that. Steps are a WorkerLostError from then on."""
        self._problem = self._problem or "the workers have been shut down"
        self._finalizer()

    def _expect(self, word: str) -> None:
        """Wait until every other rank has said so. Raises WorkerLostError if one ends instead."""
        for rank, link in enumerate(self._team.links, 1):
            while not link.poll(POLL_SECONDS):
                if self._team.processes[rank - 1].wait(0.0) is not None and not link.poll():
                    raise WorkerLostError(self._team.describe_end(rank, None))
            try:
                said = link.recv()
            except (EOFError, OSError):
                said = None
            if said != word:
                raise WorkerLostError(self._team.describe_end(rank, said))

    def _build(self, settings: WorkerSettings, meet: Callable[[], Ranks]) -> Worker:
        try:
            ranks = meet()
            self._team.part_from(ranks)
            worker = settings.build(ranks)
            self._team.first.callback(worker.drop_graphs)
            return worker
        except RuntimeError as error:  # perhaps because another rank has failed
            found = self._reason()
            if found is None:
                raise
            raise WorkerLostError(found) from error

    def _run_together(self, message: StepMessage | PrefillMessage, work: Callable[[], T]) -> T:
        self.check()
        try:
            for link in self._team.links:
                link.send(message)
            return work()
        except Exception as error:  # the others are in the middle of the step, and wait
            self._problem = self._reason() or f"a step has failed on rank 0 ({type(error).__name__}: {error})"
            self._kill()
            raise WorkerLostError(f"{self._problem}: make another engine") from error
        except BaseException as error:  # such as a second Ctrl-C
            self._problem = f"a step was cut off ({type(error).__name__})"
            self._kill()
            raise

    def _kill(self) -> None:
        """End the other ranks, which may wait for one another."""
        self._team.kill()
        self.shutdown()

    def _reason(self) -> str | None:
        """Wait a moment for a rank that has failed, and return what is known of it; None if all live."""
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while time.monotonic() < deadline:
            found = self._team.first_end()
            if found is not None:
                return found
            time.sleep(0.01)
        return None


def pickle_settings(bootstrap: Any, size: int) -> bytes:
    """Return what another rank is told at its start as bytes. Raises ValueError for what it could not import."""
    try:
        return pickle.dumps(bootstrap)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"tensor_parallel_size={size}: the engine's settings cannot be passed to another process ({error}): "
            "define what they name at the top level of a module that can be imported"
        ) from error
