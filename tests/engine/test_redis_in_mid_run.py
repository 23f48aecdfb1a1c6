"""Engines that share chunks through a real Redis, which hangs or dies, and comes back, while they answer."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import assert_empty, engine, new_llm, run, threads
from tests.engine.test_persistent_store import PARAMS, SECONDS, TINY, metrics, prompts, store_of
from tests.kv_store.test_remote_redis import Server
from vllm_blend import RequestOutput
from vllm_blend.engine import chunk_stores
from vllm_blend.kv_store.remote import RemoteStoreConfig

pytestmark = pytest.mark.redis

COUNT = 30  # prompts, each of which shares chunks with the next


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.stop()


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
def test_answers_stay_what_they_are(server: Server, fault: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    with threads(1), engine(TINY, enable_blending=True) as plain:
        wanted = run(plain, prompts(COUNT), PARAMS)
        first = new_llm(TINY, enable_blending=True, chunk_store_url=server.url)
        run(first, prompts(COUNT), PARAMS)
        assert store_of(first).flush(SECONDS)
        impatient = partial(RemoteStoreConfig, timeout=1.0, max_failures=3, retry_seconds=0.2)
        monkeypatch.setattr(chunk_stores, "RemoteStoreConfig", impatient)
        # No memory to speak of: every prompt asks the server.
        llm = new_llm(TINY, enable_blending=True, chunk_store_url=server.url, blend_chunk_cache_gib=1e-6)
        inner = llm.llm_engine
        for index, prompt in enumerate(prompts(COUNT)):
            inner.add_request(str(index), prompt, PARAMS)  # type: ignore[arg-type]
        done: dict[str, RequestOutput] = {}
        start = time.monotonic()
        broken = mended = False
        while inner.has_unfinished_requests():
            done |= {output.request_id: output for output in inner.step() if output.finished}
            if len(done) >= COUNT // 4 and not broken:
                before, broken = metrics(llm), True
                server.process.send_signal(fault)
            if len(done) >= COUNT // 2 and not mended:
                away, mended = metrics(llm), True
                server.stop()
                server.start()
                run(first, prompts(COUNT), PARAMS)
                first.llm_engine.chunk_store.clear()
                run(first, prompts(COUNT), PARAMS)  # what it computes again, the server gets again
                assert store_of(first).flush(SECONDS)
        assert time.monotonic() - start < SECONDS
        for index, output in enumerate(wanted):
            assert_same_logprobs(done[str(index)], output)
        # A busy machine may miss the deadline once before anything is wrong; without that nothing is computed.
        assert before["chunks_encoded"] <= before["chunk_store_remote_faults"] < before["chunk_store_remote_hits"]
        assert away["chunk_store_remote_faults"] > 0 and away["chunks_encoded"] > 0
        assert metrics(llm)["chunk_store_remote_hits"] > away["chunk_store_remote_hits"], "it is used again"
        assert_empty(llm)
        for each in (llm, first):
            store_of(each).close(SECONDS)
