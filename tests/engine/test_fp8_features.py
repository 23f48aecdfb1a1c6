"""What else an engine does over a cache of e4m3: features, ranks, stores, sizes, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.blend.prompts import plain, tiny_prompt
from tests.chunks.llms import chunked_llm
from tests.distributed.ranks import threaded_llm
from tests.engine.compare import assert_identical, assert_same_logprobs, blend_of
from tests.engine.e4m3_reference import FP8, PARAMS, assert_near
from tests.engine.engines import (
    BLOCK_SIZE,
    DEMO,
    assert_empty,
    demo_prompt,
    engine,
    feature,
    memory_store,
    new_llm,
    run,
    threads,
    tiny_model,
)
from tests.features.cascade.test_cascade import answers
from tests.features.spec_decode.engines import counts
from vllm_blend import LLM
from vllm_blend.devices import resolve_cache_dtype
from vllm_blend.engine_args import EngineArgs
from vllm_blend.features.kv_compress.metrics import METRICS
from vllm_blend.features.offload.extension import ChunkOffload
from vllm_blend.kv_store.chunk_kv import ChunkKV, is_finite
from vllm_blend.kv_store.disk import DiskChunkStore
from vllm_blend.kv_store.export_folder import export_folder
from vllm_blend.kv_store.import_folder import import_folder
from vllm_blend.kv_store.store_config import DiskStoreConfig
from vllm_blend.ops.e4m3 import E4M3

pytestmark = pytest.mark.cpu_only
TINY = tiny_model("llama")


@pytest.mark.parametrize("backend", ["cpu", "torch_native"])
def test_offloaded_chunks_answer_as_those_on_the_device(backend: str) -> None:
    prompts: list[Any] = [demo_prompt(index, 6) for index in range(2)]
    arguments: dict[str, Any] = {"enable_blending": True, "attention_backend": backend, **FP8}
    with engine(**arguments) as llm:
        expected = run(llm, prompts, PARAMS)
    moving: dict[str, Any] = {
        "offload_mode": "exact",
        "offload_device_fraction": 0.2,
        "offload_predictor": "query_digest",
    }
    with engine(**arguments, **moving) as llm:
        ranked = [prompt | {"chunk_ranking": [3, 1, 0, 2, 5, 4]} for prompt in prompts]
        for output, other in zip(run(llm, ranked, PARAMS), expected, strict=True):
            assert_near(output, other)
        scheduler = feature(llm.llm_engine, ChunkOffload).scheduler
        assert scheduler.num_evictions > 0 and scheduler.host.data.dtype is E4M3


def test_drafts_change_no_answer() -> None:
    prompts = [demo_prompt(index, 5) for index in range(3)]
    with engine(enable_blending=True, **FP8) as llm:
        expected = run(llm, prompts, PARAMS)
    llm = new_llm(enable_blending=True, speculative_config={"method": "ngram", "num_speculative_tokens": 4}, **FP8)
    with threads(1):
        for output, other in zip(run(llm, prompts, PARAMS), expected, strict=True):
            assert_near(output, other)
    assert counts(llm)[2] > 0
    assert_empty(llm)


@pytest.mark.parametrize("backend", ["cpu", "torch_native"])
def test_cascades_change_no_answer(backend: str) -> None:
    with chunked_llm(attention_backend=backend, kv_cache_dtype="fp8") as chunked:
        expected = answers(chunked, mode="reuse")
    with chunked_llm(attention_backend=backend, kv_cache_dtype="fp8", cascade_attention=True) as chunked:
        for output, other in zip(answers(chunked, mode="reuse"), expected, strict=True):
            assert_near(output, other)


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_compression_evicts_what_it_evicts_from_a_full_cache(metric: str) -> None:
    """At rate 1 nothing is evicted, and answers stay; at 0.4 an engine answers from less KV."""
    small: dict[str, Any] = {"enable_kvc": True, "protected_window_size": 6, "num_sinks": 1, "kvc_interval": 4}
    small |= {"prefill_metric_collection_window_size": 8, "kvc_metric": metric}
    prompt = plain(tiny_prompt())
    with engine(TINY, **FP8) as llm:
        [expected] = run(llm, prompt, PARAMS)
    with engine(TINY, target_compression_rate=1.0, **small, **FP8) as llm:
        assert_near(run(llm, prompt, PARAMS)[0], expected)
    with engine(TINY, target_compression_rate=0.4, **small, **FP8) as llm:
        [alone] = run(llm, prompt, PARAMS)
        together = run(llm, [prompt, plain(tiny_prompt(prefix=[9, 8, 7, 6, 5]))], PARAMS)
        assert alone.error is None and len(alone.outputs[0].token_ids) == 10
        assert_near(together[0], alone)
        evicted = next(m.value for m in llm.get_metrics() if m.name == "vllm_blend:kvs_evicted")
        assert evicted > 0


def test_two_ranks_answer_as_one() -> None:
    prompts: list[Any] = [demo_prompt(index, 4, blend_selector="value_deviation") for index in range(3)]
    arguments: dict[str, Any] = {"enable_blending": True, "kv_cache_dtype": "fp8"}
    with engine(DEMO, **arguments) as llm:
        expected = run(llm, prompts, PARAMS)
    with threads(1), threaded_llm(DEMO, 2, **arguments) as two:
        for output, other in zip(run(two, prompts, PARAMS), expected, strict=True):
            assert_near(output, other)
            assert blend_of(output) == blend_of(other)
        assert_empty(two)


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[tuple[LLM, Path]]:
    """An engine that has written a prompt's chunks to a folder."""
    llm = new_llm(TINY, enable_blending=True, chunk_store_path=str(tmp_path / "store"), **FP8)
    run(llm, tiny_prompt(), PARAMS)
    llm.llm_engine.chunk_store.flush()
    yield llm, tmp_path
    llm.llm_engine.chunk_store.close()


def kept_by(llm: LLM) -> dict[str, ChunkKV]:
    chunks = llm.llm_engine.chunk_store.memory._chunks
    return {key: stored.chunk for key, stored in chunks.items()}


def bits(kv: ChunkKV) -> list[bytes]:
    assert kv.k.dtype is kv.v.dtype is E4M3
    return [bytes(t.contiguous().view(torch.uint8).numpy().tobytes()) for t in (kv.k, kv.v)]


def test_stored_chunks_come_back_bit_for_bit(stored: tuple[LLM, Path]) -> None:
    """From the disk, and out as folders and in again; what another dtype has computed is not found."""
    first, path = stored
    written = {key: bits(kv) for key, kv in kept_by(first).items()}
    [expected] = run(first, tiny_prompt(), PARAMS)
    assert export_folder(path / "store", path / "folders") == {"written": len(written)}
    settings = DiskStoreConfig(path / "again", 1 << 20, "0" * 32)
    assert import_folder(path / "folders", settings) == {"stored": len(written)}
    for folder in ("store", "again"):
        llm = new_llm(TINY, enable_blending=True, chunk_store_path=str(path / folder), **FP8)
        [output] = run(llm, tiny_prompt(), PARAMS)
        assert {key: bits(kv) for key, kv in kept_by(llm).items()} == written
        assert llm.llm_engine.composer.num_encoded == 0
        assert_identical(output, expected)
        llm.llm_engine.chunk_store.close()
    other = new_llm(TINY, enable_blending=True, chunk_store_path=str(path / "store"), block_size=BLOCK_SIZE)
    run(other, tiny_prompt(), PARAMS)
    assert other.llm_engine.composer.num_encoded == len(written)
    assert {kv.k.dtype for kv in kept_by(other).values()} == {torch.float32}
    other.llm_engine.chunk_store.close()


def test_other_scales_are_another_model(stored: tuple[LLM, Path]) -> None:
    first, path = stored
    llm = new_llm(TINY, enable_blending=True, chunk_store_path=str(path / "store"), dtype="bfloat16", **{**FP8})
    assert llm.llm_engine.fingerprint.digest != first.llm_engine.fingerprint.digest
    assert llm.llm_engine.fingerprint.dtype == first.llm_engine.fingerprint.dtype == "float8_e4m3fn"
    store = llm.llm_engine.chunk_store.below[0].storage
    assert isinstance(store, DiskChunkStore) and all(store.get(key) is None for key in kept_by(first))
    llm.llm_engine.chunk_store.close()


def test_a_nan_in_a_chunk_is_found() -> None:
    numbers = torch.arange(256, dtype=torch.uint8)
    assert is_finite(numbers[(numbers & 0x7F) != 0x7F].view(E4M3))
    for nan in (0x7F, 0xFF):
        assert not is_finite(torch.tensor([0, nan], dtype=torch.uint8).view(E4M3))


def test_sizes_are_those_of_eight_bits() -> None:
    """Pages, chunks in memory, and what the engine counts and plans with are a quarter of what they are in float32."""
    sizes = []
    for cache in ("auto", "fp8"):
        with engine(TINY, enable_blending=True, block_size=BLOCK_SIZE, kv_cache_dtype=cache) as llm:
            run(llm, tiny_prompt(), PARAMS)
            inner = llm.llm_engine
            worker = inner.model_executor.driver_worker
            pages = worker.model_runner.cache
            tokens = sum(kv.num_tokens for kv in kept_by(llm).values())
            store = memory_store(llm)
            assert pages.key.nbytes + pages.value.nbytes == worker.pool.num_blocks * worker.pool.block_bytes
            assert store.num_bytes == tokens * worker.shape.bytes_per_token
            assert inner.composer.bytes_per_token == inner.planner.bytes_per_token == worker.shape.bytes_per_token
            sizes.append((worker.shape.bytes_per_token, worker.pool.block_bytes, store.num_bytes))
    assert sizes[0] == tuple(4 * size for size in sizes[1])


def test_chunks_can_be_taken_out_and_put_in_again() -> None:
    with engine(TINY, enable_blending=True, **FP8) as llm:
        [expected] = run(llm, tiny_prompt(), PARAMS)
        chunks = {key: kv.copy() for key, kv in kept_by(llm).items()}
        llm.llm_engine.chunk_store.clear()
        for kv in chunks.values():
            assert kv.content is not None
            llm.llm_engine.load_chunk(kv.content, kv)
        before = llm.llm_engine.composer.num_encoded
        [output] = run(llm, tiny_prompt(), PARAMS)
        assert llm.llm_engine.composer.num_encoded == before
        assert_same_logprobs(output, expected)
        [kv, *_] = chunks.values()
        assert kv.content is not None
        with pytest.raises(ValueError, match=r"it is float32 .*, but this model's is float8_e4m3fn"):
            llm.llm_engine.load_chunk(kv.content, ChunkKV(kv.k.float(), kv.v.float()))


@pytest.mark.parametrize("asked", ["auto", "float32", "fp8", "fp8_e4m3"])
def test_known_dtypes(asked: str) -> None:
    found = resolve_cache_dtype(asked, torch.float32)
    assert found is (E4M3 if asked.startswith("fp8") else torch.float32)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype='bfloat16', but the model runs in float32: give dtype='bflo"):
        LLM(TINY, device="cpu", dtype="float32", kv_cache_dtype="bfloat16")
    with pytest.raises(ValueError, match="kv_cache_dtype='fp8_e5m2' is unknown: use one of 'auto', 'fp8', 'fp8_e4m3'"):
        EngineArgs("m", kv_cache_dtype="fp8_e5m2").create_engine_config()
    stores: dict[str, Any] = {"enable_blending": True, "chunk_store_path": "/tmp/never", "chunk_store_format": "int8"}
    with pytest.raises(ValueError, match="kv_cache_dtype='fp8' and chunk_store_format='int8' exclude each other"):
        EngineArgs("m", kv_cache_dtype="fp8", **stores).create_engine_config()
