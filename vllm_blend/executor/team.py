"""The other ranks as rank 0 has them: their processes, the connections to them, and what is undone in the end."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Protocol

from vllm_blend.distributed.ranks import Ranks, has_ended

WATCH_SECONDS = 1.0  # between two looks at whether the other ranks live
LAST_WORDS_SECONDS = 5.0  # in which a worker that fails says why, and one that is told to end does


class RankProcess(Protocol):
    """The process of another rank, wherever it runs."""

    @property
    def name(self) -> str:
        """Return what errors call it."""

    def wait(self, timeout: float) -> str | None:
        """Return how the process has ended, "ended with exit status 1" for example, or None if it still runs after
        `timeout` seconds."""

    def kill(self) -> None:
        """End the process at once."""


class Team:
    """The ranks 1, 2, ... of an engine. `first` holds the calls that are made before they are told to end, `undo` those
    that clean up when they have ended."""

    def __init__(self) -> None:
        self.processes: list[RankProcess] = []
        self.links: list[Connection] = []
        self.first, self.undo = ExitStack(), ExitStack()
        self._owner = os.getpid()

    def part_from(self, ranks: Ranks) -> None:
        """Have rank 0 leave the exchange in the end, and as soon as another rank has ended or is out of reach: on a GPU
        the host would wait for its tensors for ever, as nothing else notifies it."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(WATCH_SECONDS):
                if any(map(has_ended, self.links)) or any(each.wait(0.0) is not None for each in self.processes):
                    ranks.leave()
                    return

        if ranks.waits_on_device:
            threading.Thread(target=watch, daemon=True, name="watch-ranks").start()
        self.undo.callback(ranks.leave)
        self.first.callback(ended.set)

    def end_of(self, rank: int) -> str | None:
        """Return how a rank has ended, or why it is about to; None if it lives. After "ready" it says nothing else."""
        said, link = None, self.links[rank - 1]
        try:
            if link.poll():
                said = link.recv()
        except (EOFError, OSError):
            return self.describe_end(rank, None)
        if said is not None or self.processes[rank - 1].wait(0.0) is not None:
            return self.describe_end(rank, said)
        return None

    def first_end(self) -> str | None:
        """Return how the first rank that does not live has ended; None if all live."""
        return next(filter(None, map(self.end_of, range(1, len(self.links) + 1))), None)

    def describe_end(self, rank: int, said: str | None) -> str:
        """Say how a rank has ended that has closed its connection, or is about to. `said` is its last message."""
        process = self.processes[rank - 1]
        how = process.wait(LAST_WORDS_SECONDS) or "does not answer"
        return f"the worker of rank {rank} ({process.name}) {how}{f' after {said}' if said else ''}"

    def kill(self) -> None:
        """End all processes at once: they may wait for one another."""
        for process in self.processes:
            process.kill()

    def end(self) -> None:
        """Have the processes end, by closing the connections that they listen to; kill those that do not."""
        if os.getpid() != self._owner:  # a fork, which ends: the engine is its parent's, and CUDA cannot be used here
            return
        self.first.close()
        for link in self.links:
            link.close()
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        for process in self.processes:
            if process.wait(max(0.0, deadline - time.monotonic())) is None:
                process.kill()
                process.wait(LAST_WORDS_SECONDS)
        self.undo.close()
