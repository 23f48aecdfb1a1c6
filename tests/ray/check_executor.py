"""Ranks that Ray places: they answer as one rank does, on another node too; what cannot be had is said in time; a rank
that dies ends its engine; and nothing stays behind.

The cluster has two nodes, each a raylet of this machine with one CPU: two ranks never share a node.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tests.engine.async_engines import async_llm, final, until
from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import DEMO, demo_prompt, engine, greedy, ids_of, new_llm, run, threads, tiny_model
from tests.waiting import wait_until
from vllm_blend import LLM, SamplingParams
from vllm_blend.engine.errors import EngineDeadError
from vllm_blend.executor import ray as executor_module
from vllm_blend.executor.base import WorkerLostError
from vllm_blend.executor.ray import RayExecutor
from vllm_blend.executor.ray_worker import RankActor

ON_RAY: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
PARAMS = greedy(8, logprobs=1)
PROMPT = "Where is the city?"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Cluster]:
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 << 20})
    try:
        made.add_node(num_cpus=1, object_store_memory=100 << 20)
        ray.init(made.address, log_to_driver=False)
        made.wait_for_nodes()
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Groups and actors go with their engine, and their CPUs are free again."""
    yield
    wait_until(lambda: not groups() and ray.available_resources().get("CPU") == 2.0, every=0.1)


def groups() -> list[str]:
    """Return the placement groups that are there."""
    return [name for name, about in placement_group_table().items() if about["state"] != "REMOVED"]


def executor_of(llm: LLM) -> RayExecutor:
    executor = llm.llm_engine.model_executor
    assert isinstance(executor, RayExecutor)
    return executor


def blended(ratio: float) -> Any:
    return demo_prompt(0, 4, blend_selector="question_attention", blend_recompute_ratio=ratio)


def test_a_life() -> None:
    """Ranks on two nodes answer as one does, with chunks computed and with chunks reused. One of them is killed: that
    is an error, now and later."""
    prompts = [blended(1.0), blended(0.15), PROMPT]
    with engine(DEMO, enable_blending=True) as one:
        expected = [run(one, prompts, PARAMS) for _ in range(2)]
    with threads(1):
        llm = new_llm(DEMO, enable_blending=True, **ON_RAY)
        assert len(groups()) == 1
        answers = [run(llm, prompts, PARAMS) for _ in range(2)]
        for mine, theirs in zip(chain(*answers), chain(*expected), strict=True):
            assert_same_logprobs(mine, theirs)
            assert mine.num_found_tokens == theirs.num_found_tokens
        assert answers[1][1].num_found_tokens["host"] > 0
        [plain] = run(llm, {"prompt_token_ids": ids_of(llm, blended(1.0))}, PARAMS)
        assert plain.blend is None
        assert_same_logprobs(answers[1][0], plain)
        [pid] = executor_of(llm).pids
        os.kill(pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(
                EngineDeadError, match=rf"the worker of rank 1 \(the actor in process {pid} on .*has died"
            ):
                run(llm, prompts, PARAMS)
    llm.shutdown()
    assert ray.is_initialized()  # the test has connected, so the engine does not disconnect


def test_too_few_resources_are_told_in_time() -> None:
    message = (
        r"tensor_parallel_size=6 .* needs 6 CPUs, of which one on this node, but after 1 seconds the Ray cluster has 2 "
        "CPUs in 2 nodes, of which 2 are free"
    )
    with pytest.raises(ValueError, match=message):
        new_llm(DEMO, tensor_parallel_size=6, distributed_executor_backend="ray", ray_placement_timeout=1.0)


class DyingActor(RankActor):
    """Stands for an actor whose process is killed before it has called rank 0."""

    def run(self, settings: bytes) -> int:
        os._exit(1)


def test_a_rank_that_never_calls_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "RankActor", DyingActor)
    with pytest.raises(WorkerLostError, match=r"the worker of rank 1 \(the actor in process \d+ on .*\) has died"):
        new_llm(DEMO, **ON_RAY)


def test_a_model_that_ranks_cannot_share_is_refused_as_ever() -> None:
    model = tiny_model("llama", intermediate_size=33)
    with pytest.raises(ValueError, match="intermediate_size is 33, which 2 ranks cannot share equally"):
        new_llm(model, **ON_RAY)


def test_an_engine_process_joins_the_cluster_and_misses_its_rank(caplog: pytest.LogCaptureFixture) -> None:
    with engine(DEMO, enable_blending=True) as one:
        [expected] = run(one, blended(0.15), PARAMS)
    with async_llm(enable_blending=True, blend_encoding_context="page", **ON_RAY) as llm:
        asyncio.run(_answers_until_a_rank_dies(llm, expected, caplog))


async def _answers_until_a_rank_dies(llm, expected, caplog) -> None:  # type: ignore[no-untyped-def]
    assert_same_logprobs(await final(llm, blended(0.15), PARAMS), expected)
    assert len(groups()) == 1
    request = asyncio.create_task(final(llm, PROMPT, greedy(900)))
    [pid] = rank_pids()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        await request
    await until(lambda: "rank 1" in caplog.text, "it is logged why")


def rank_pids() -> list[int]:
    actors = ray._private.state.actors()
    return [
        about["Pid"]
        for about in actors.values()
        if about["ActorClassName"] == "RankActor" and about["State"] == "ALIVE"
    ]


def answer_in_actor(model: str, arguments: dict[str, Any]) -> tuple[str, int]:
    """Return an engine's answer, and how many placement groups there are meanwhile."""
    llm = LLM(model, **arguments)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    [output] = llm.generate([PROMPT], params, use_tqdm=False)
    found = len(groups())
    llm.shutdown()
    return output.outputs[0].text, found


@pytest.mark.parametrize(("num_bundles", "is_enough"), [(2, True), (1, False)])
def test_an_actor_in_a_group_has_its_ranks_there(num_bundles: int, is_enough: bool) -> None:
    with engine(DEMO) as one:
        [expected] = run(one, PROMPT, greedy(8))
    group = placement_group([{"CPU": 1}] * num_bundles)
    try:
        work = ray.remote(answer_in_actor).options(
            num_cpus=1, max_retries=0, scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0)
        )
        answer = work.remote(DEMO, ON_RAY | {"device": "cpu"})
        if is_enough:
            assert ray.get(answer) == (expected.outputs[0].text, 1)
        else:
            with pytest.raises(ValueError, match=r"needs 1 bundles with a whole CPU .* but the group is"):
                ray.get(answer)
    finally:
        remove_placement_group(group)
