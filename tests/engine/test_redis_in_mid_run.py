"""Engines that share chunks through a real Redis, which hangs or dies, and comes back, while they answer."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clock import Clock
from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import PATIENCE, assert_empty, engine, new_llm, run, threads
from tests.engine.test_persistent_store import PARAMS, SECONDS, TINY, metrics, prompts, store_of
from tests.kv_store.test_remote_redis import Server, set_timeout
from tests.waiting import wait_until
from vllm_blend import LLM, RequestOutput
from vllm_blend.kv_store import circuit_breaker
from vllm_blend.kv_store.prefetch import NUM_THREADS
from vllm_blend.kv_store.remote import MAX_CALLS, RemoteChunkStore

pytestmark = pytest.mark.redis

COUNT = 30  # prompts, each of which shares chunks with the next
MAX_FAILURES = 3 + 2 * NUM_THREADS  # before a server is left alone: those of calls that were under way by then count


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.stop()


def remote(llm: LLM) -> RemoteChunkStore:
    [tier] = store_of(llm).below
    assert isinstance(tier.storage, RemoteChunkStore)
    return tier.storage


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
def test_answers_stay_what_they_are(server: Server, fault: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, circuit_breaker)  # by which a server that fails is left alone
    with threads(1), engine(TINY, enable_blending=True) as plain:
        wanted = run(plain, prompts(COUNT), PARAMS)
        first = new_llm(TINY, enable_blending=True, chunk_store_url=server.url)
        run(first, prompts(COUNT), PARAMS)
        assert store_of(first).flush(SECONDS)
        # No memory to speak of: every prompt asks the server.
        llm = new_llm(TINY, enable_blending=True, chunk_store_url=server.url, blend_chunk_cache_gib=1e-6)
        inner = llm.llm_engine
        for index, prompt in enumerate(prompts(COUNT)):
            inner.add_request(str(index), prompt, PARAMS)  # type: ignore[arg-type]
        done: dict[str, RequestOutput] = {}
        broken = mended = False
        while inner.has_unfinished_requests():
            if mended:  # before every step: calls of before may still fail
                clock.advance(remote(llm).config.retry_seconds)
            done |= {output.request_id: output for output in inner.step() if output.finished}
            if len(done) >= COUNT // 4 and not broken:
                before, broken = metrics(llm), True
                set_timeout(remote(llm), 0.3)
                wait_until(lambda: remote(llm)._calls._value == MAX_CALLS)  # calls with the longer timeout are answered
                server.process.send_signal(fault)
            if len(done) >= COUNT // 2 and not mended:
                away, mended = metrics(llm), True
                failures = remote(llm)._breaker.num_failures
                server.stop()
                server.start()
                set_timeout(remote(llm), PATIENCE)
                run(first, prompts(COUNT), PARAMS)
                first.llm_engine.chunk_store.clear()
                run(first, prompts(COUNT), PARAMS)  # what it computes again, the server gets again
                assert store_of(first).flush(SECONDS)
        for index, output in enumerate(wanted):
            assert_same_logprobs(done[str(index)], output)
        assert before["chunks_encoded"] == before["chunk_store_remote_faults"] == 0 < before["chunk_store_remote_hits"]
        assert failures <= MAX_FAILURES, "the server is not left alone"
        assert away["chunk_store_remote_faults"] > 0 and away["chunks_encoded"] > 0
        assert metrics(llm)["chunk_store_remote_hits"] > away["chunk_store_remote_hits"], "it is used again"
        assert_empty(llm)
        for each in (llm, first):
            store_of(each).close(SECONDS)
