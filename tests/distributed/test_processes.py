"""The processes of ranks: they answer as one does, are missed when they die, and end with their engine."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from multiprocessing import Pipe
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.distributed.ranks import threaded_llm
from tests.engine.async_engines import async_llm, final, until
from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import DEMO, ROOT, demo_prompt, engine, greedy, new_llm, run, threads, tiny_model
from tests.waiting import wait_until
from vllm_blend import LLM
from vllm_blend.distributed.ranks import Ranks
from vllm_blend.engine.errors import EngineDeadError
from vllm_blend.executor import worker_process
from vllm_blend.executor.multiproc import MultiProcExecutor

pytestmark = pytest.mark.cpu_only
PARAMS = greedy(8, logprobs=1)
OTHER = """
import sys, time
from vllm_blend import LLM
llm = LLM(sys.argv[1], tensor_parallel_size=2, device="cpu")
print(*llm.llm_engine.model_executor.pids, flush=True)
time.sleep(600)
"""


def pids_of(llm: LLM) -> list[int]:
    executor = llm.llm_engine.model_executor
    assert isinstance(executor, MultiProcExecutor)
    return executor.pids


def runs(pid: int) -> bool:
    """Return whether a process is there, and not only until its parent has asked how it ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_life() -> None:
    """Two processes answer as one. One of them is killed: that is an error, now and later, and nothing stays behind."""
    prompts = [demo_prompt(0, 4), demo_prompt(1, 4, blend_selector="value_deviation"), "Where is the city?"]
    with engine(DEMO, enable_blending=True) as one:
        expected = run(one, prompts, PARAMS)
    with threads(1):
        llm = new_llm(DEMO, tensor_parallel_size=2, enable_blending=True)
        [pid] = pids_of(llm)
        for mine, theirs in zip(run(llm, prompts, PARAMS), expected, strict=True):
            assert_same_logprobs(mine, theirs)
        os.kill(pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=rf"the worker of rank 1 \(process {pid}\) was killed by SIGKILL"):
                run(llm, prompts, PARAMS)
    llm.shutdown()
    assert not runs(pid)


def test_no_process_outlives_its_engine(tmp_path: Path) -> None:
    """Nor does the folder in which they met."""
    command = [sys.executable, "-c", OTHER, tiny_model("llama")]
    variables = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=variables) as process:
        assert process.stdout is not None
        [pid] = map(int, process.stdout.readline().split())
        assert runs(pid)
        assert list(tmp_path.glob("vllm-blend-ranks-*"))
        process.kill()
    wait_until(lambda: not runs(pid))
    assert not list(tmp_path.glob("vllm-blend-ranks-*"))


def test_the_folder_is_there_until_rank_0_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's threads look into it until then, and warn if it is gone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[tuple[int, int]] = []

    def folders() -> int:
        return len(list(tmp_path.glob("vllm-blend-ranks-*")))

    def leave(ranks: Ranks) -> None:
        seen.append((ranks.rank, folders()))

    monkeypatch.setattr(Ranks, "leave", leave)
    with threads(1), threaded_llm(tiny_model("llama"), 2):
        assert folders() == 1
    assert seen == [(1, 1), (0, 1)] and folders() == 0


@pytest.mark.parametrize("rank_0_lives", [True, False])
def test_a_rank_that_fails_removes_the_folder_only_if_rank_0_is_gone(
    rank_0_lives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "follow", lambda *_: 1)
    folder = tmp_path / "ranks"
    folder.mkdir()
    own, theirs = Pipe()
    bootstrap = Mock(folder=str(folder), pipe=os.dup(theirs.fileno()))
    theirs.close()
    if not rank_0_lives:
        own.close()
    assert worker_process.run_rank(bootstrap) == 1
    assert folder.exists() == rank_0_lives


def test_an_engine_ends_after_its_folder_was_cleaned_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that clean up temporary files remove what is some days old."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with threads(1), threaded_llm(tiny_model("llama"), 2):
        [folder] = tmp_path.glob("vllm-blend-ranks-*")
        shutil.rmtree(folder)


def test_a_server_notices_a_dead_rank_while_it_is_idle(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    with engine(model) as one:
        [expected] = run(one, {"prompt_token_ids": [5, 6, 7]}, PARAMS)
    with async_llm(model=model, tensor_parallel_size=2) as llm:
        asyncio.run(_answers_until_a_rank_dies(llm, expected, caplog))
        engine_pid = llm.engine_pid
    assert engine_pid is None or not runs(engine_pid)


async def _answers_until_a_rank_dies(llm, expected, caplog) -> None:  # type: ignore[no-untyped-def]
    assert_same_logprobs(await final(llm, {"prompt_token_ids": [5, 6, 7]}, PARAMS), expected)
    [pid] = children(llm.engine_pid)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not llm.is_running, "the engine has ended")
    with pytest.raises(EngineDeadError, match="the engine process"):
        await final(llm, {"prompt_token_ids": [5, 6, 7]}, PARAMS)
    await until(lambda: "rank 1" in caplog.text, "it is logged why")
    assert re.search(r"rank 1 .* was killed by SIGKILL", caplog.text)
