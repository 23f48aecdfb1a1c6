"""The process of a rank other than 0: builds a worker, and runs the steps that rank 0 tells of.

It ends when rank 0 has closed the connection to it or is gone, and when a step fails here, as the ranks then disagree.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from transformers import PretrainedConfig

from vllm_blend.config import EngineConfig
from vllm_blend.distributed.ranks import RankLostError, Ranks, connect, has_ended, store_in_folder
from vllm_blend.executor.follower import Follower
from vllm_blend.log_lines import LogSettings
from vllm_blend.models.without_compiler import without_compiler
from vllm_blend.worker.worker import Worker

logger = logging.getLogger("vllm_blend.executor.worker_process")  # __name__ is "__main__" in the process

ENDING = "ending"  # the file in the ranks' folder that says that rank 0 ends the others, and removes the folder
PARENT_SECONDS = 1.0  # between two looks at whether rank 0's process is there


@dataclass(frozen=True)
class WorkerSettings:
    """The arguments of a `Worker`, for all ranks alike but for the device."""

    config: EngineConfig
    hf_config: PretrainedConfig
    dtype: torch.dtype
    device: torch.device
    max_model_len: int

    def on(self, rank: int) -> WorkerSettings:
        """Return the settings of another rank, which is on the GPU after that of the rank before it. What has been done
        here already, by a function of the user's perhaps, is not done again."""
        config = replace(self.config, model=replace(self.config.model, hf_overrides=None))
        if self.device.type == "cpu":
            return replace(self, config=config)
        return replace(self, config=config, device=torch.device("cuda", (self.device.index or 0) + rank))

    def build(self, ranks: Ranks) -> Worker:
        """Return a rank's worker. Raises the errors of `Worker`."""
        return Worker(self.config, self.hf_config, self.dtype, self.device, self.max_model_len, ranks)


@dataclass(frozen=True)
class Bootstrap:
    """What the process reads from its standard input."""

    settings: WorkerSettings
    rank: int
    size: int
    folder: str  # in which the ranks find one another
    pipe: int  # the file descriptor of the pipe to rank 0
    parent: int  # rank 0's process
    logs: LogSettings
    num_threads: int  # of torch's operators on a CPU


def main() -> int:
    """Run a rank whose settings are on the standard input; return its exit status."""
    with without_compiler():  # unpickling a configuration imports its module
        bootstrap: Bootstrap = pickle.load(sys.stdin.buffer)
    bootstrap.logs.apply_to_engine()
    watched = (bootstrap.parent, bootstrap.folder)
    threading.Thread(target=_follow_parent, args=watched, daemon=True, name="follow-parent").start()
    torch.set_num_threads(bootstrap.num_threads)
    return run_rank(bootstrap)


def run_rank(bootstrap: Bootstrap) -> int:
    """Run a rank to its end; return the exit status for its process."""
    settings, link = bootstrap.settings, Connection(bootstrap.pipe)

    def meet() -> Ranks:
        store = store_in_folder(bootstrap.folder, bootstrap.size)
        return connect(bootstrap.rank, bootstrap.size, store, settings.device, [link])

    try:
        return follow(bootstrap.rank, settings, link, meet)
    finally:
        # Rank 0 removes the folder, when the others have ended: NCCL's threads look into it until their rank has left,
        # and warn if it is gone. If rank 0 is gone, it has not said that it ends the others.
        if has_ended(link) and not Path(bootstrap.folder, ENDING).exists():
            shutil.rmtree(bootstrap.folder, ignore_errors=True)


def follow(rank: int, settings: WorkerSettings, link: Connection, meet: Callable[[], Ranks]) -> int:
    """Tell rank 0 through `link` how far this rank is, build its worker when `meet` has found the other ranks, and run
    what comes through `link` to its end. Return the exit status for the process."""
    leave, is_ready = ExitStack(), False
    try:
        link.send("started")
        ranks = meet()
        leave.callback(ranks.leave)
        worker = settings.build(ranks)
        leave.callback(worker.drop_graphs)
        link.send("ready")
        is_ready = True
        Follower(worker.model_runner).serve(link)
    except (RankLostError, BrokenPipeError, ConnectionResetError, TimeoutError):
        logger.debug("rank %d ends because another rank has", rank, exc_info=True)
        return 1
    except Exception as error:
        # A fault of the model or of an option is the same on all ranks, and rank 0 says so. Only a bug needs a trace.
        is_bad_input = not is_ready and isinstance(error, (ValueError, FileNotFoundError))
        logger.log(logging.DEBUG if is_bad_input else logging.ERROR, "rank %d has failed", rank, exc_info=True)
        try:
            link.send(f"{type(error).__name__}: {error}")
        except OSError:
            logger.debug("rank 0 is gone", exc_info=True)
        return 1
    finally:
        leave.close()
    return 0


def _follow_parent(parent: int, folder: str) -> None:
    """End this process at once when rank 0's process is gone, whatever it is doing."""
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
