"""Chunk KV in pinned host memory: it arrives whole and in time, and the answers are those of chunk KV on the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.engine.compare import blend_of
from tests.gpu.test_engine import MODEL, TOLERANCE, first_difference, prompts
from vllm_blend import LLM, RequestOutput, SamplingParams
from vllm_blend.blend.selectors import SELECTORS
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.host_memory import Arena, pinned_buffer
from vllm_blend.kv_store.pinned_memory import PinnedChunkStore
from vllm_blend.kv_store.transfer import InFlight, LayerwiseLoad, StagingRing

pytestmark = pytest.mark.gpu

LAYERS, HEADS, HEAD_DIM = 5, 2, 64
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=3)
DELAY = 50_000_000  # GPU cycles, about 30 ms: longer than any copy here
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 4096, "max_num_seqs": 16, "blend_chunk_cache_gib": 0.25}


def random_chunk(tokens: int, seed: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> ChunkKV:
    generator = torch.Generator(device).manual_seed(seed)
    shape = (LAYERS, tokens, HEADS, HEAD_DIM)
    k, v = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2))
    return ChunkKV(k, v)


def new_store(mebibytes: int) -> PinnedChunkStore:
    return PinnedChunkStore(Arena(pinned_buffer(mebibytes << 20, "blend_chunk_cache_gib")), InFlight())


def ring_of(tokens: int, num_slots: int = 3, dtype: torch.dtype = torch.bfloat16) -> StagingRing:
    row = 2 * HEADS * HEAD_DIM * dtype.itemsize
    return StagingRing(HEADS, HEAD_DIM, dtype, torch.device("cuda"), num_slots, tokens * row)


def arrived(load: LayerwiseLoad) -> ChunkKV:
    """Everything that a load brings, copied on the GPU as it comes."""
    k, v = [], []
    for layer in range(LAYERS):
        pieces = [(arrival.k.clone(), arrival.v.clone()) for arrival in load.layer(layer)]
        k.append(torch.cat([piece[0] for piece in pieces], 1))
        v.append(torch.cat([piece[1] for piece in pieces], 1))
    return ChunkKV(torch.cat(k), torch.cat(v))


def assert_equal(loaded: ChunkKV, chunks: Sequence[ChunkKV]) -> None:
    assert torch.equal(loaded.k.cpu(), torch.cat([chunk.k.cpu() for chunk in chunks], 1))
    assert torch.equal(loaded.v.cpu(), torch.cat([chunk.v.cpu() for chunk in chunks], 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("slot_tokens", [7, 64, 1000])
@pytest.mark.parametrize("compiled", [True, False])
def test_what_was_stored_arrives(
    compiled: bool, slot_tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks longer and shorter than a slot, one of them in ordinary memory; by the compiled copy and by torch."""
    if not compiled:
        monkeypatch.setattr("vllm_blend.ops.cuda_library.is_available", lambda: False)
    store = new_store(8)
    chunks = [random_chunk(tokens, tokens, dtype) for tokens in (40, 1, 333, 64)]
    kept = [store.put(str(index), chunk) for index, chunk in enumerate(chunks)]
    assert all(chunk.k.is_pinned() and chunk.v.is_pinned() for chunk in kept)
    assert_equal(arrived(LayerwiseLoad(ring_of(slot_tokens, dtype=dtype), kept, LAYERS)), chunks)
    kept[1] = ChunkKV(chunks[1].k.cpu(), chunks[1].v.cpu())
    assert_equal(arrived(LayerwiseLoad(ring_of(slot_tokens, dtype=dtype), kept, LAYERS)), chunks)


def test_a_chunk_that_leaves_in_mid_load_arrives_whole() -> None:
    """Its memory is not given to others while it is being copied from."""
    store, ring = new_store(4), ring_of(64)
    chunks = [random_chunk(500, seed) for seed in range(2)]  # of 1.25 MiB each
    kept = [store.put(str(index), chunk) for index, chunk in enumerate(chunks)]
    torch.cuda.synchronize()
    torch.cuda._sleep(DELAY)  # holds the ring: most copies are queued, not done
    load = LayerwiseLoad(ring, kept, LAYERS)
    store.in_flight.hold(load, load)
    result = arrived(load)
    assert not load.query()
    del kept, load
    store.clear()
    for seed in range(6):
        store.put(f"other{seed}", random_chunk(500, 10 + seed))
    assert store.num_unpinned == 0
    assert_equal(result, chunks)
    torch.cuda.synchronize()
    store.in_flight.release()
    assert store.arena.num_bytes_used == store.num_bytes


def test_a_chunk_is_usable_while_it_is_being_stored() -> None:
    """`put` does not wait for the GPU; the GPU's reads and the host's do wait for the copy."""
    store, ring, source = new_store(4), ring_of(64), random_chunk(300, 1)
    store.put("first", ChunkKV(source.k + 0, source.v + 0))  # loading a kernel for the first time waits for the GPU
    torch.cuda.synchronize()
    torch.cuda._sleep(DELAY)
    late = ChunkKV(source.k + 0, source.v + 0)
    kept = store.put("a", late)
    assert kept.written is not None
    assert not kept.written.query()
    result = arrived(LayerwiseLoad(ring, [kept], LAYERS))
    assert torch.equal(kept.copy().v, source.v.cpu())
    assert_equal(result, [source])


def test_loads_share_the_ring() -> None:
    """One after another and interrupted, without waiting for the device in between."""
    store, ring = new_store(8), ring_of(32)
    chunks = [random_chunk(150, seed) for seed in range(4)]
    kept = [store.put(str(index), chunk) for index, chunk in enumerate(chunks)]
    torch.cuda._sleep(DELAY)
    results = []
    for chunk in kept:
        cut_short = LayerwiseLoad(ring, kept, LAYERS)
        list(cut_short.layer(0))
        cut_short.abandon()
        results.append(arrived(LayerwiseLoad(ring, [chunk], LAYERS)))
    for result, chunk in zip(results, chunks, strict=True):
        assert_equal(result, [chunk])


def test_pinned_bytes_are_those_of_the_budget() -> None:
    buffer = pinned_buffer(3 << 20, "blend_chunk_cache_gib")
    assert len(buffer) == 3 << 20
    assert torch.from_numpy(buffer).is_pinned()
    with pytest.raises(ValueError, match="lower blend_chunk_cache_gib"):
        pinned_buffer(1 << 50, "blend_chunk_cache_gib")


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, LLM]]:
    """The same engine with chunk KV on the GPU and on the host. Without graphs, which only the first could use for the
    question's pass: they compute more rows at once, and round otherwise."""
    common = {"device": "cuda", "dtype": request.param, "enable_blending": True, "enforce_eager": True, **SMALL}
    yield LLM(MODEL, **common), LLM(MODEL, **common, blend_chunk_device="cpu")
    torch.cuda.empty_cache()


def assert_bit_for_bit(left: Sequence[RequestOutput], right: Sequence[RequestOutput]) -> None:
    for a, b in zip(left, right, strict=True):
        assert a.error is None
        assert b.error is None
        assert blend_of(a) == blend_of(b)
        assert a.blend is not None
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.outputs[0].logprobs == b.outputs[0].logprobs


@pytest.mark.parametrize("selector", sorted(SELECTORS))
def test_every_selector_answers_bit_for_bit_as_from_the_gpu(selector: str, engines: tuple[LLM, LLM]) -> None:
    asked = prompts(3, blend_selector=selector)
    for prompt in asked * 2:  # one by one: first encoded, then from the store
        assert_bit_for_bit(*(llm.generate([prompt], GREEDY, use_tqdm=False) for llm in engines))
    assert_bit_for_bit(*(llm.generate(asked, GREEDY, use_tqdm=False) for llm in engines))


def test_mixed_batches_answer_bit_for_bit_as_from_the_gpu(engines: tuple[LLM, LLM]) -> None:
    """Blends of every rule at once, some of which need a pass of their question and some do not."""
    asked = [prompts(8, blend_selector=name)[index] for index, name in enumerate(sorted(SELECTORS)[:8])]
    for _ in range(2):
        assert_bit_for_bit(*(llm.generate(asked, GREEDY, use_tqdm=False) for llm in engines))


def test_chunks_live_in_pinned_memory(engines: tuple[LLM, LLM]) -> None:
    llm = engines[1]
    llm.generate(prompts(2), GREEDY, use_tqdm=False)
    store = llm.llm_engine.chunk_store.memory
    assert isinstance(store, PinnedChunkStore)
    assert store.arena.num_bytes == store.budget_bytes == 1 << 28
    assert all(stored.chunk.k.is_pinned() for stored in store._chunks.values())
    assert len(store) > 0
    assert store.num_unpinned == 0


def test_eviction_and_preemption_change_no_answer() -> None:
    """Pages for a part of what the requests generate, and pinned memory for half of their chunks (of 39 MiB)."""
    outputs = []
    asked = prompts(8, blend_selector="question_attention")
    longer = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=1)
    for chunk_device, gib in (("cuda", 0.25), ("cpu", 0.25), ("cpu", 0.02)):
        llm = LLM(
            MODEL, device="cuda", dtype="float32", enable_blending=True, enforce_eager=True,
            blend_chunk_device=chunk_device, blend_chunk_cache_gib=gib, num_gpu_blocks_override=241, max_num_seqs=8,
            max_model_len=1024,
        )  # fmt: skip
        outputs.append([*llm.generate(asked, longer, use_tqdm=False), *llm.generate(asked, longer, use_tqdm=False)])
        assert llm.llm_engine.scheduler.num_preemptions > 0
        assert all(output.error is None for output in outputs[-1])
    assert llm.llm_engine.composer.num_encoded > len(llm.llm_engine.chunk_store)
    assert_bit_for_bit(outputs[0], outputs[1])
    for whole, scarce in zip(outputs[1], outputs[2], strict=True):  # other chunks are encoded together: other rounding
        assert whole.outputs[0].token_ids == scarce.outputs[0].token_ids
        assert first_difference(whole, scarce) <= TOLERANCE["float32"]


def test_the_gpu_is_not_charged_for_chunks_on_the_host() -> None:
    """The same share of the GPU holds more pages."""
    blocks = []
    for chunk_device in ("cuda", "cpu"):
        llm = LLM(
            MODEL, device="cuda", dtype="bfloat16", enable_blending=True, blend_chunk_device=chunk_device,
            blend_chunk_cache_gib=1, gpu_memory_utilization=0.3, max_num_seqs=8, enforce_eager=True,
        )  # fmt: skip
        blocks.append(llm.llm_engine.blocks.num_blocks)
        size = llm.llm_engine.model_executor.driver_worker.model_runner.cache.key[:, 0].nbytes * 2
        del llm
        torch.cuda.empty_cache()
    assert (blocks[1] - blocks[0]) * size > 0.7 * 2**30


@pytest.mark.parametrize("selector", ["question_attention", "value_deviation"])
def test_a_blend_waits_for_the_device_only_to_read_its_token(selector: str) -> None:
    llm = LLM(MODEL, device="cuda", dtype="bfloat16", enable_blending=True, blend_chunk_device="cpu", **SMALL)
    params = SamplingParams(temperature=0, max_tokens=4)
    asked = prompts(2, blend_selector=selector, blend_recompute_ratio=0.15)
    llm.generate(asked, params, use_tqdm=False)  # the chunks are stored, everything lazy is done
    engine = llm.llm_engine
    execute = engine.model_executor.execute_model

    def strictly(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return execute(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.model_executor, "execute_model", strictly)
        outputs = llm.generate(asked, params, use_tqdm=False)
    assert all(output.error is None for output in outputs)
