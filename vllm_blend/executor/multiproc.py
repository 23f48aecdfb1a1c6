"""Ranks that are processes of this machine, started as children of rank 0's."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path

import torch

from vllm_blend.child_process import describe_status, start_module
from vllm_blend.distributed.ranks import Ranks, connect, store_in_folder
from vllm_blend.executor.several_ranks import SeveralRanksExecutor, pickle_settings
from vllm_blend.executor.worker_process import ENDING, Bootstrap, WorkerSettings
from vllm_blend.log_lines import LogSettings

MODULE = "vllm_blend.executor.worker_process"


class ChildProcess:
    """The process of another rank, which is a child of this one."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def name(self) -> str:
        return f"process {self.pid}"

    def wait(self, timeout: float) -> str | None:
        try:
            return describe_status(self._process.wait(timeout))
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self._process.kill()


class MultiProcExecutor(SeveralRanksExecutor):
    """Runs steps on several ranks of one machine."""

    @property
    def pids(self) -> list[int]:
        """Return the processes of the ranks 1, 2, ..."""
        return [process.pid for process in self._team.processes if isinstance(process, ChildProcess)]

    def _start(self, settings: WorkerSettings, size: int) -> Callable[[], Ranks]:
        team, folder = self._team, tempfile.mkdtemp(prefix="vllm-blend-ranks-")
        team.first.callback(_say_that_it_ends, folder)
        team.undo.callback(shutil.rmtree, folder, ignore_errors=True)
        threads = max(1, torch.get_num_threads() // size)
        for rank in range(1, size):
            own, theirs = Pipe()
            team.links.append(own)
            try:
                bootstrap = Bootstrap(
                    settings.on(rank), rank, size, folder, theirs.fileno(), os.getpid(), LogSettings.current(), threads
                )
                data = pickle_settings(bootstrap, size)
                team.processes.append(ChildProcess(start_module(MODULE, data, [theirs.fileno()])))
            finally:
                theirs.close()
        return lambda: connect(0, size, store_in_folder(folder, size), settings.device, team.links)


def _say_that_it_ends(folder: str) -> None:
    with suppress(OSError):  # the folder is gone: what cleans up temporary files may have removed it
        Path(folder, ENDING).touch()
