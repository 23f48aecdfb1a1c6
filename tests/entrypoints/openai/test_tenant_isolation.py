"""Tenants of one server: what one of them has stored the others neither find nor see, in any tier, also after the
engine was killed and started again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.engines import threads
from tests.entrypoints.openai.servers import engine_args, serving
from tests.kv_store.test_remote_redis import Server as Redis
from tests.waiting import DEADLINE, wait_until
from vllm_blend import EngineArgs
from vllm_blend.engine.async_llm import AsyncLLM

pytestmark = pytest.mark.cpu_only

NAMES = ("alice", "bob", "carol")
PASSAGES = [f"Tulmaris Works is a maker of lamps that was set up in {year} by the river.\n\n" for year in (1801, 1802)]
LONG: Any = {"prompt": "Where is it?", "max_tokens": 900, "ignore_eos": True, "n": 64}  # more than half a minute's work

SHED = {"text": "The keys of the shed are under the third stone."}


@contextmanager
def tenants(folder: Path, **arguments: Any) -> Iterator[tuple[AsyncLLM, list[httpx.Client]]]:
    """A server with a key for each of three tenants, and their clients."""
    keys = folder / "keys"
    keys.write_text("".join(f"{name} key-of-{name}\n" for name in NAMES))
    with ExitStack() as stack:
        with threads(1):
            engine = AsyncLLM.from_engine_args(EngineArgs(**engine_args() | arguments))
        stack.callback(engine.shutdown)
        url = stack.enter_context(serving(engine, api_keys=str(keys)))
        headers = [{"Authorization": f"Bearer key-of-{name}"} for name in NAMES]
        yield engine, [stack.enter_context(httpx.Client(base_url=url, timeout=DEADLINE, headers=h)) for h in headers]


def ask(client: httpx.Client) -> dict[str, Any]:
    """Return what the usage says of a prompt with the passages."""
    prompt = {"prefix": "Read.\n\n", "chunks": PASSAGES, "suffix": "When was it set up?"}
    answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    details: dict[str, Any] = answer.json()["usage"]["prompt_tokens_details"]
    return details


def test_memory_the_disk_and_a_killed_engine(tmp_path: Path) -> None:
    with tenants(tmp_path, chunk_store_path=str(tmp_path / "store")) as (engine, (alice, bob, carol)):
        new, known = ask(alice), ask(alice)
        assert new["cached_tokens"] == 0 and not any(new["tiers"].values())
        assert known["tiers"]["host"] == known["reused_tokens"] == new["stored_tokens"] > 0
        assert ask(bob) == new, "as if it had never been asked before"
        passage = check_ids(alice, bob)
        assert asyncio.run(engine.call("flush"))
        kill_in_mid_run(engine, alice, bob)
        assert ask(carol) == new, "nothing of the others' on the disk"
        found = ask(alice)
        assert found["tiers"]["disk"] == known["reused_tokens"] and found["stored_tokens"] == 0
        question = {"messages": [{"role": "user", "content": "When?"}], "max_tokens": 1, "documents": [passage]}
        assert alice.post("/v1/chat/completions", json=question).status_code == 200  # ids outlive the engine
        assert carol.post("/v1/chat/completions", json=question).status_code == 400
        check_a_server_after(engine, tmp_path / "keys", passage)
        status = carol.get("/status")
        assert status.json()["passages"] == [] and "Tulmaris" not in status.text + carol.get("/metrics").text


def check_ids(owner: httpx.Client, other: httpx.Client) -> dict[str, str]:
    """Store a passage, and have another tenant try to use its id, which is as any id that never was."""
    stored = owner.post("/v1/chunks", json=SHED).json()["id"]
    answers = {}
    for name in (stored, "chunk-" + "0" * 32):
        asked = [
            other.get(f"/v1/chunks/{name}"),
            other.patch(f"/v1/chunks/{name}", json={"priority": 100}),
            other.delete(f"/v1/chunks/{name}"),
            other.get("/v1/chunks", params={"after": name}),
            other.post("/v1/chat/completions", json={"messages": [], "documents": [{"id": name}]}),
        ]
        answers[name] = [(answer.status_code, answer.text.replace(name, "ID")) for answer in asked]
    theirs, nothings = answers.values()
    assert theirs == nothings and {status for status, _ in theirs} == {404, 400}
    assert other.get("/v1/chunks").json()["data"] == []
    assert other.post("/v1/chunks", json=SHED).json()["id"] != stored
    assert owner.get(f"/v1/chunks/{stored}").json()["priority"] == 50
    return {"id": stored}


def check_a_server_after(engine: AsyncLLM, keys: Path, passage: dict[str, str]) -> None:
    """A new server does not know the ids of the one before it. A passage that is stored again has its id again, and KV
    that outlived the server is found."""

    def num_encoded() -> float:
        return next(
            each.value for each in asyncio.run(engine.get_metrics()) if each.name == "vllm_blend:chunks_encoded"
        )

    path, before = f"/v1/chunks/{passage['id']}", num_encoded()
    headers = {"Authorization": "Bearer key-of-alice"}
    with serving(engine, api_keys=str(keys)) as url, httpx.Client(base_url=url, headers=headers) as alice:
        unknown = alice.get(path)
        assert unknown.status_code == 404 and "ids do not outlive" in unknown.json()["error"]["message"]
        assert alice.post("/v1/chunks", json=SHED, timeout=DEADLINE).json()["id"] == passage["id"]
        assert alice.get(path).status_code == 200 and num_encoded() == before


def kill_in_mid_run(engine: AsyncLLM, streaming: httpx.Client, waiting: httpx.Client) -> None:
    """Kill the engine process: requests that run get 503, or an event that says it, and so do new ones until it runs
    again. Connections are kept."""
    with ThreadPoolExecutor(1) as pool, streaming.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as s:
        lines = s.iter_lines()
        next(lines)
        whole = pool.submit(waiting.post, "/v1/completions", json=LONG)
        wait_until(lambda: engine.num_unfinished_requests == 2)
        assert engine.engine_pid is not None
        os.kill(engine.engine_pid, signal.SIGKILL)
        text = "\n".join(lines)
    assert '"code": "engine_unavailable"' in text and text.rstrip().endswith("data: [DONE]")
    late = waiting.post("/v1/completions", json=LONG)
    for answer in (whole.result(), late, waiting.get("/health")):
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_unavailable"
        assert "SIGKILL" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"] == "5" and answer.headers["x-request-id"]
    wait_until(lambda: waiting.get("/health").status_code == 200)
    status = streaming.get("/status").json()
    assert status["engine_up"] and status["kv_cache_usage"] == 0 == status["requests"]["running"]


@pytest.mark.redis
def test_redis(tmp_path: Path) -> None:
    """No memory to speak of: what is found comes from the server. Without it passages are computed again."""
    redis = Redis(tmp_path)
    try:
        with tenants(tmp_path, chunk_store_url=redis.url, blend_chunk_cache_gib=1e-6) as (engine, (alice, bob, _)):
            new = ask(alice)
            assert asyncio.run(engine.call("flush"))

            def all_is_found() -> bool:
                """With so little memory, a passage waits for the one before it to be written, and may be given up."""
                known = ask(alice)
                assert asyncio.run(engine.call("flush"))
                return bool(known["tiers"]["remote"] == known["reused_tokens"] == new["stored_tokens"] > 0)

            wait_until(all_is_found)
            assert ask(bob) == new, "as if it had never been asked before"
            redis.stop()
            again = ask(alice)
            assert again["tiers"]["remote"] == 0 and again["stored_tokens"] == new["stored_tokens"]
    finally:
        redis.stop()
