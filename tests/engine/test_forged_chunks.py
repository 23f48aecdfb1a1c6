"""Engines whose stores hold forged chunks with valid checksums answer as an engine without a store does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tolerances
from tests.blend.prompts import plain, tiny_prompt
from tests.chunks.llms import new_chunked_llm, random_ids
from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import TINY_VOCABULARY, assert_empty, engine, new_llm, run, threads
from tests.engine.test_persistent_store import PARAMS, SECONDS, TINY, metrics, store_of
from tests.kv_store.test_remote_redis import Server
from vllm_blend import LLM, RequestOutput
from vllm_blend.chunks.chunk import Chunk
from vllm_blend.kv_store import pending
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.disk import DiskChunkStore
from vllm_blend.kv_store.keys import ChunkId, ModelFingerprint
from vllm_blend.kv_store.layout import StoredFormat
from vllm_blend.kv_store.pending import Arrivals
from vllm_blend.kv_store.remote import RemoteChunkStore
from vllm_blend.kv_store.segment import Extent
from vllm_blend.kv_store.store_config import DiskStoreConfig, RemoteStoreConfig

Shape = tuple[int, int, int, int]  # layers, tokens, kv_heads, head_dim
LAYOUTS: dict[str, Callable[[Shape], Shape]] = {
    "fewer layers": lambda s: (s[0] - 1, *s[1:]),
    "more layers": lambda s: (s[0] + 1, *s[1:]),
    "fewer tokens": lambda s: (s[0], s[1] - 1, *s[2:]),
    "more tokens": lambda s: (s[0], s[1] + 40, *s[2:]),  # into the pages behind
    "other heads": lambda s: (*s[:2], 2 * s[2], s[3]),
    "another head size": lambda s: (*s[:3], 2 * s[3]),
    "the same bytes": lambda s: (*s[:2], 2 * s[2], s[3] // 2),
}
FORGERIES = [*LAYOUTS, "dtype", "tokens"]


def forged(model: ModelFingerprint, chunk: ChunkId, how: str) -> ChunkKV:
    """KV that would change the answer if any of it were used."""
    shape: Shape = (model.num_layers, len(chunk.token_ids), model.num_kv_heads, model.head_dim)
    own = getattr(torch, model.dtype)
    dtype = (torch.float16 if own is torch.float32 else torch.float32) if how == "dtype" else own
    changed = LAYOUTS[how](shape) if how in LAYOUTS else shape
    k, v = torch.randn(2, *changed, generator=torch.manual_seed(3)).to(dtype) * 9
    others = tuple((token + 1) % TINY_VOCABULARY for token in chunk.token_ids)
    return ChunkKV(k, v, content=ChunkId(chunk.key, chunk.context, others) if how == "tokens" else None)


class Forger:
    """Another program that writes to the engine's store."""

    def __init__(self, llm: LLM, where: str, format: StoredFormat) -> None:
        self.model = llm.llm_engine.fingerprint
        self.store: DiskChunkStore | RemoteChunkStore
        if "://" in where:
            self.store = RemoteChunkStore(RemoteStoreConfig(where, self.model.digest, format, timeout=SECONDS))
        else:
            settings = DiskStoreConfig(where, 1 << 26, self.model.digest, format, fingerprint=self.model)
            self.store = DiskChunkStore(settings)

    def forge(self, llm: LLM, prompt: dict[str, Any], how: str) -> int:
        """Replace all that is stored for a prompt; how many chunks that is."""
        prefix, chunks = llm.llm_engine.identify_chunks(prompt["prefix"], prompt["chunks"])
        assert prefix is not None
        ids = {chunk.key: chunk for chunk in (prefix, *chunks)}
        for key, chunk in ids.items():
            self.store.put(key, forged(self.model, chunk, how))
            assert key in self.store
        return len(ids)

    def close(self) -> None:
        if isinstance(self.store, DiskChunkStore):
            self.store.close()


@pytest.fixture(scope="module")
def expected() -> Iterator[list[RequestOutput]]:
    with threads(1), engine(TINY, enable_blending=True) as llm:
        yield [run(llm, prompt, PARAMS)[0] for prompt in prompts()]


def prompts() -> list[dict[str, Any]]:
    """A blended prompt between two plain ones, whose pages are its neighbours."""
    return [plain(tiny_prompt()), tiny_prompt(), plain(tiny_prompt(suffix=[3, 1, 4]))]


def check(
    llm: LLM, where: str, format: StoredFormat, expected: list[RequestOutput], hows: list[str], tier: str
) -> None:
    forger, seen = Forger(llm, where, format), 0
    for how in hows:
        llm.llm_engine.chunk_store.clear()
        seen += forger.forge(llm, tiny_prompt(), how)
        for output, wanted in zip(run(llm, prompts(), PARAMS), expected, strict=True):
            assert_same_logprobs(output, wanted)
        assert metrics(llm)[f"chunk_store_{tier}_faults"] == seen, how
        assert store_of(llm).flush(SECONDS)
        assert_empty(llm)
    # What was computed again has taken the place of the last forgeries.
    before = metrics(llm)
    llm.llm_engine.chunk_store.clear()
    [output] = run(llm, tiny_prompt(), PARAMS)
    after = metrics(llm)
    assert after[f"chunk_store_{tier}_hits"] > before[f"chunk_store_{tier}_hits"]
    assert after["chunks_encoded"] == before["chunks_encoded"]
    if format == "auto":
        assert_same_logprobs(output, expected[1])
    forger.close()
    store_of(llm).close(SECONDS)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("format", ["auto", "int8"])
def test_forged_chunks_on_a_disk(tmp_path: Path, expected: Any, format: StoredFormat, early: bool) -> None:
    """`early`: layers are asked for one by one; otherwise each chunk is read as a whole."""
    with threads(1):
        llm = new_llm(TINY, enable_blending=True, chunk_store_path=str(tmp_path), chunk_store_format=format)
        if not early:
            store_of(llm).below[0].read_many = None
        check(llm, str(tmp_path), format, expected, FORGERIES, "disk")


@pytest.mark.parametrize("kind", ["file", pytest.param("redis", marks=pytest.mark.redis)])
def test_forged_chunks_on_a_server(tmp_path: Path, expected: Any, kind: str) -> None:
    server = Server(tmp_path) if kind == "redis" else None
    url = f"file://{tmp_path}" if server is None else server.url
    with threads(1):
        llm = new_llm(TINY, enable_blending=True, chunk_store_url=url)
        check(llm, url, "auto", expected, [how for how in FORGERIES if how != "tokens"], "remote")
    if server is not None:
        server.stop()


def test_memory_is_no_way_around(expected: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing writes there unchecked; a chunk that got there all the same is not used."""
    with threads(1), engine(TINY, enable_blending=True) as llm, caplog.at_level(logging.WARNING):
        _, chunks = llm.llm_engine.identify_chunks(tiny_prompt()["prefix"], tiny_prompt()["chunks"])
        for how in FORGERIES:
            llm.llm_engine.chunk_store.put(chunks[2].key, forged(llm.llm_engine.fingerprint, chunks[2], how))
            caplog.clear()
            for output, wanted in zip(run(llm, prompts(), PARAMS), expected, strict=True):
                assert_same_logprobs(output, wanted)
            assert caplog.text.count(f"stored chunk {chunks[2].key} not used") == 1, how


@pytest.mark.parametrize("early", [True, False])
def test_what_a_tier_lets_through_is_not_used(
    tmp_path: Path, expected: Any, early: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The composer checks by itself what has arrived; `early`: while it is asked whether a prompt may start early."""
    monkeypatch.setattr(pending, "READ_BYTES", 1)
    with threads(1):
        llm = new_llm(TINY, enable_blending=True, chunk_store_path=str(tmp_path))
        [tier] = store_of(llm).below
        disk: Any = tier.storage
        get = disk.get
        disk.get = lambda key, allocate, expected: get(key, allocate)
        tier.read_many = (lambda keys, allocate, expected: disk.read_many(keys, allocate)) if early else None
        asked, offered = threading.Event(), []
        read, kv, start_early = disk.space.files.read, Arrivals.kv, llm.llm_engine.composer.start_early

        def held(extent: Extent, start: int, into: torch.Tensor) -> None:
            assert not (early and start) or asked.wait(SECONDS)
            read(extent, start, into)

        def note(arrivals: Arrivals, key: str, deadline: float) -> ChunkKV | None:
            found = kv(arrivals, key, deadline)
            offered.extend([] if found is None else [key])
            return found

        def ask() -> bool:
            starts = start_early()
            if offered:
                asked.set()
            return starts

        monkeypatch.setattr(disk.space.files, "read", held)
        monkeypatch.setattr(Arrivals, "kv", note)
        monkeypatch.setattr(llm.llm_engine.composer, "start_early", ask)
        forger = Forger(llm, str(tmp_path), "auto")
        count = forger.forge(llm, tiny_prompt(), "the same bytes")
        [output] = run(llm, tiny_prompt(), PARAMS)
        assert_same_logprobs(output, expected[1])
        assert bool(offered) == early and caplog.text.count("not used, it will be computed again") >= count
        forger.close()
        store_of(llm).close(SECONDS)


@pytest.mark.parametrize("how", ["more tokens", "dtype", "tokens"])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_registered_chunk_is_not_taken_from_a_forged_store(tmp_path: Path, where: str, how: str) -> None:
    ids = random_ids(20, 1)
    computed: list[torch.Tensor] = []
    chunk: Chunk | None = None
    for _ in range(2):
        chunked = new_chunked_llm(**({"chunk_store_path": str(tmp_path)} if where == "disk" else {}))
        if where == "memory" and chunk is not None:
            forgery = forged(chunked.llm_engine.fingerprint, chunk.stored, how)
            chunked.llm_engine.chunk_store.put(chunk.id, forgery)
        with threads(1):
            chunk = chunked.register_chunk(ids)
        assert chunked.llm_engine.composer.num_encoded == 1
        kv = chunked.llm_engine.chunk_store.get(chunk.id)
        assert kv is not None
        computed.append(kv.k.clone())
        if where == "memory":
            continue
        store_of(chunked.llm).close(SECONDS)
        forger = Forger(chunked.llm, str(tmp_path), "auto")
        forger.store.put(chunk.id, forged(forger.model, chunk.stored, how))
        forger.close()
    tolerances.check_kv(*computed)
