"""Ranks that are threads of this process instead of processes: the same code, without the seconds that each process
takes to start."""

from __future__ import annotations

import os
import pickle
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from multiprocessing import Pipe
from typing import Any, ClassVar, TypeVar

import pytest
import torch

from tests.engine.engines import new_llm
from vllm_blend import LLM
from vllm_blend.distributed import ranks
from vllm_blend.distributed.ranks import Ranks, connect, store_in_folder
from vllm_blend.executor import multiproc, worker_process
from vllm_blend.executor.follower import Follower
from vllm_blend.executor.messages import RequestUpdate
from vllm_blend.executor.worker_process import Bootstrap, run_rank
from vllm_blend.request import Request
from vllm_blend.worker.model_runner import ModelRunner

T = TypeVar("T")
CPU = torch.device("cpu")
SECONDS = 60.0  # for a thread to end in, or to answer another, on any machine


def on_ranks(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """Return what `work` gives on each of `size` ranks, which all run at once."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    pipes = [Pipe() for _ in range(1, size)]

    def run(rank: int, folder: str) -> None:
        links = [pipe[0] for pipe in pipes] if rank == 0 else [pipes[rank - 1][1]]
        try:
            with torch.inference_mode():
                results[rank] = work(connect(rank, size, store_in_folder(folder, size), CPU, links))
        except BaseException as error:
            errors.append(error)

    with tempfile.TemporaryDirectory() as folder:
        threads = [threading.Thread(target=run, args=(rank, folder)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
    for one, other in pipes:
        one.close()
        other.close()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


class RankThread:
    """Stands for the process of a rank, as `subprocess.Popen` does. It cannot be killed: it ends with its pipe."""

    pid = 0

    def __init__(self, bootstrap: Bootstrap) -> None:
        self.returncode: int | None = None
        self._thread = threading.Thread(target=self._run, args=(bootstrap,), name=f"rank {bootstrap.rank}")
        self._thread.start()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        return self.returncode

    def kill(self) -> None:
        pass

    def _run(self, bootstrap: Bootstrap) -> None:
        self.returncode = run_rank(bootstrap)


def start_thread(module: str, settings: bytes, pass_fds: Sequence[int]) -> RankThread:
    """Start a rank as `child_process.start_module` does. The caller closes its end of the pipe to it."""
    assert module == multiproc.MODULE
    bootstrap: Bootstrap = pickle.loads(settings)
    assert list(pass_fds) == [bootstrap.pipe]
    return RankThread(replace(bootstrap, pipe=os.dup(bootstrap.pipe)))


class SeenFollower(Follower):
    """A follower that tests can look at while it waits for a step."""

    all: ClassVar[list[SeenFollower]] = []

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.all.append(self)
        self.num_ahead = 0  # requests of steps that were told of before the last token was known

    def _request(self, update: RequestUpdate) -> Request:
        self.num_ahead += update.num_in_flight > 0
        return super()._request(update)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_chunks(self) -> int:
        return len(self._kept)


@contextmanager
def rank_threads() -> Iterator[None]:
    """The ranks of engines that are made meanwhile are threads, which must all have ended in the end."""
    before, followers = set(threading.enumerate()), list(SeenFollower.all)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiproc, "start_module", start_thread)
        patch.setattr(worker_process, "Follower", SeenFollower)
        patch.setattr(ranks, "TIMEOUT", timedelta(seconds=SECONDS))  # a thread that fails keeps its sockets open
        yield
    SeenFollower.all[:] = followers
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("rank ")]


@contextmanager
def threaded_llm(model: str, size: int, **arguments: Any) -> Iterator[LLM]:
    """An engine whose ranks are threads."""
    with rank_threads():
        llm = new_llm(model, tensor_parallel_size=size, **arguments)
        try:
            yield llm
        finally:
            llm.shutdown()
