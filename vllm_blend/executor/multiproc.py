"""One worker in this process, rank 0, and each other rank's in a process of its own."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from vllm_blend.child_process import describe_status, start_module
from vllm_blend.core.step import SchedulerOutput
from vllm_blend.distributed.ranks import connect
from vllm_blend.executor.base import WorkerLostError
from vllm_blend.executor.leader import Leader
from vllm_blend.executor.messages import PrefillMessage, StepMessage
from vllm_blend.executor.worker_process import Bootstrap, WorkerSettings
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.log_lines import LogSettings
from vllm_blend.request import Request
from vllm_blend.worker.runner_output import RunnerOutput
from vllm_blend.worker.worker import Worker

T = TypeVar("T")

LAST_WORDS_SECONDS = 5.0  # in which a worker that fails says why, and one that is told to end does
POLL_SECONDS = 0.1  # between two looks at whether a worker that is being started lives
MODULE = "vllm_blend.executor.worker_process"


class MultiProcExecutor:
    """Runs steps on several ranks. Each gets the same requests and blocks, and computes its own heads.

    A worker that ends takes the engine with it: the others wait for its tensors, so they are ended too, and every step
    is a WorkerLostError from then on.
    """

    def __init__(self, settings: WorkerSettings, size: int) -> None:
        """Start the workers of `size` ranks, and wait until all have loaded the model. Raises the errors of `Worker`,
        and WorkerLostError if another rank fails."""
        self._problem: str | None = None
        self._folder = tempfile.mkdtemp(prefix="vllm-blend-ranks-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[Connection] = []
        self._finalizer = weakref.finalize(self, _end, self._processes, self._links, self._folder)
        try:
            self._start(settings, size)
            self._expect("started")
            self.driver_worker = self._build(settings, size)
            self._expect("ready")
        except BaseException:
            self._kill()
            raise
        self._leader = Leader(self.driver_worker.num_layers)

    @property
    def pids(self) -> list[int]:
        """Return the processes of the ranks 1, 2, ..."""
        return [process.pid for process in self._processes]

    def execute_model(self, output: SchedulerOutput) -> RunnerOutput:
        runner = self.driver_worker.model_runner
        return self._run_together(self._leader.step(output), partial(runner.execute, output))

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
            self._problem = next(filter(None, map(self._end_of, range(1, len(self._processes) + 1))), None)
            if self._problem is not None:
                self._kill()
        if self._problem is not None:
            raise WorkerLostError(f"{self._problem}: make another engine")

    def shutdown(self) -> None:
        """End the other ranks, and wait for that. Steps are a WorkerLostError from then on."""
        self._problem = self._problem or "the workers have been shut down"
        self._finalizer()

    def _start(self, settings: WorkerSettings, size: int) -> None:
        threads = max(1, torch.get_num_threads() // size)
        for rank in range(1, size):
            own, theirs = Pipe()
            self._links.append(own)
            try:
                bootstrap = Bootstrap(
                    settings.on(rank),
                    rank,
                    size,
                    self._folder,
                    theirs.fileno(),
                    os.getpid(),
                    LogSettings.current(),
                    threads,
                )
                try:
                    data = pickle.dumps(bootstrap)
                except (pickle.PicklingError, AttributeError, TypeError) as error:
                    raise ValueError(
                        f"tensor_parallel_size={size}: the engine's settings cannot be passed to another process "
                        f"({error}): define what they name at the top level of a module that can be imported"
                    ) from error
                self._processes.append(start_module(MODULE, data, [theirs.fileno()]))
            finally:
                theirs.close()

    def _expect(self, word: str) -> None:
        """Wait until every other rank has said so. Raises WorkerLostError if one ends instead."""
        for rank, link in enumerate(self._links, 1):
            while not link.poll(POLL_SECONDS):
                if self._processes[rank - 1].poll() is not None and not link.poll():
                    raise WorkerLostError(self._end_of(rank))
            try:
                said = link.recv()
            except (EOFError, OSError):
                said = None
            if said != word:
                raise WorkerLostError(self._describe_end(rank, said))

    def _build(self, settings: WorkerSettings, size: int) -> Worker:
        try:
            return settings.build(connect(0, size, self._folder, settings.device, self._links))
        except RuntimeError as error:  # perhaps because another rank has failed
            found = self._reason()
            if found is None:
                raise
            raise WorkerLostError(found) from error

    def _run_together(self, message: StepMessage | PrefillMessage, work: Callable[[], T]) -> T:
        self.check()
        try:
            for link in self._links:
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
        for process in self._processes:
            process.kill()
        self.shutdown()

    def _reason(self) -> str | None:
        """Wait a moment for a rank that has failed, and return what is known of it; None if all live."""
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while time.monotonic() < deadline:
            for rank in range(1, len(self._links) + 1):
                found = self._end_of(rank)
                if found is not None:
                    return found
            time.sleep(0.01)
        return None

    def _end_of(self, rank: int) -> str | None:
        """Return how a rank has ended, or why it is about to; None if it lives. After "ready" it says nothing else."""
        said, link = None, self._links[rank - 1]
        try:
            if link.poll():
                said = link.recv()
        except (EOFError, OSError):
            return self._describe_end(rank, None)
        if said is not None or self._processes[rank - 1].poll() is not None:
            return self._describe_end(rank, said)
        return None

    def _describe_end(self, rank: int, said: str | None) -> str:
        process = self._processes[rank - 1]
        try:
            how = describe_status(process.wait(LAST_WORDS_SECONDS))
        except subprocess.TimeoutExpired:
            how = "does not answer"
        return f"the worker of rank {rank} (process {process.pid}) {how}{f' after {said}' if said else ''}"


def _end(processes: list[subprocess.Popen[bytes]], links: list[Connection], folder: str) -> None:
    """Have the workers end, by closing the pipes that they listen to; kill those that do not."""
    for link in links:
        link.close()
    deadline = time.monotonic() + LAST_WORDS_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    shutil.rmtree(folder, ignore_errors=True)
