"""The connection to Ray that engines make for themselves: the last one that needs it ends it."""

from __future__ import annotations

from functools import partial

import pytest
import ray

from tests.engine.engines import DEMO, greedy, new_llm, run, threads
from vllm_blend.engine.errors import EngineDeadError
from vllm_blend.executor.ray_cluster import join_cluster


def test_a_connection_lives_as_long_as_its_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose program disconnects is dead, and ends without touching a later connection."""
    small = partial(ray.init, num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    monkeypatch.setattr(ray, "init", small)
    one, two = join_cluster(), join_cluster()
    one()
    assert ray.is_initialized()
    with threads(1):
        llm = new_llm(DEMO, tensor_parallel_size=2, distributed_executor_backend="ray")
        ray.shutdown()
        with pytest.raises(
            EngineDeadError, match=r"rank 1 .* is out of reach, as this process has left the Ray cluster"
        ):
            run(llm, "Where is it?", greedy(4))
    three = join_cluster()
    llm.shutdown()
    two()
    assert ray.is_initialized()
    three()
    assert not ray.is_initialized()
