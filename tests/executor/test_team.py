"""Rank 0 stops waiting for another rank that has ended, and what it then computed is not read."""

from __future__ import annotations

import os
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.engine.engines import tiny_model
from vllm_blend import LLM, SamplingParams
from vllm_blend.distributed.ranks import Ranks
from vllm_blend.engine.errors import EngineDeadError
from vllm_blend.executor.several_ranks import SeveralRanksExecutor
from vllm_blend.executor.team import WATCH_SECONDS, Team

pytestmark = pytest.mark.cpu_only

SECONDS = 60.0  # for a thread to notice, on any machine


class Process:
    """A rank that has ended once its event is set."""

    name = "process 7"

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.link: Connection  # its end of the connection to rank 0

    def wait(self, timeout: float) -> str | None:
        return "ended with exit status 1" if self.ended.wait(timeout) else None

    def kill(self) -> None:
        self.ended.set()


class OnGPU(Ranks):
    """Ranks whose exchanges a GPU waits for."""

    waits_on_device = True

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.left = threading.Event()

    def leave(self) -> None:
        self.left.set()


def team_of_two() -> tuple[Team, Process, OnGPU]:
    team, process, ranks = Team(), Process(), OnGPU()
    own, process.link = Pipe()
    team.processes.append(process)
    team.links.append(own)
    team.part_from(ranks)
    return team, process, ranks


def test_the_exchange_ends_when_another_rank_is_out_of_reach() -> None:
    """Its process, which Ray may be long in asking about, has not ended."""
    team, process, ranks = team_of_two()
    assert not ranks.left.wait(3 * WATCH_SECONDS)
    process.link.close()
    assert ranks.left.wait(SECONDS)
    process.ended.set()
    team.end()


def test_the_exchange_ends_when_another_rank_has_ended() -> None:
    team, process, ranks = team_of_two()
    assert not ranks.left.is_set()
    process.ended.set()
    assert ranks.left.wait(SECONDS)
    team.end()


def test_the_exchange_ends_with_the_team() -> None:
    team, process, ranks = team_of_two()
    process.ended.set()
    team.end()
    assert ranks.left.is_set()


def test_tokens_of_a_step_in_which_a_rank_has_ended_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank ends after rank 0 has queued the step, so that only reading it can tell."""
    with LLM(tiny_model("llama"), tensor_parallel_size=2, max_model_len=64, num_gpu_blocks_override=64) as llm:
        executor: Any = llm.llm_engine.model_executor
        run = SeveralRanksExecutor.execute_model

        def execute(self: SeveralRanksExecutor, output: Any) -> Any:
            result = run(self, output)
            for process in self._team.processes:
                process.kill()
                assert process.wait(SECONDS)
            return result

        monkeypatch.setattr(type(executor), "execute_model", execute)
        llm.llm_engine.add_request("one", [1, 2, 3], SamplingParams(max_tokens=4))
        with pytest.raises(EngineDeadError, match="rank 1"):
            llm.llm_engine.step()
        assert not llm.llm_engine.requests.by_id["one"].requests[0].output_token_ids


def test_a_fork_that_ends_leaves_the_ranks_to_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    team, [own, theirs] = Team(), Pipe()
    team.links.append(own)
    called: list[str] = []
    team.first.callback(called.append, "first")
    team.undo.callback(called.append, "undo")
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: -1)
        team.end()
        assert called == [] and not own.closed
    team.end()
    assert called == ["first", "undo"] and own.closed
    theirs.close()
