"""Over an engine process: a tenant's call of many prompts, and a short request of another tenant beside it."""

from __future__ import annotations

import asyncio

import pytest

from tests.engine.async_engines import async_llm
from tests.kv_store.stored_chunks import memory_folder
from vllm_blend import SamplingParams
from vllm_blend.engine.async_llm import AsyncLLM
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.kv_store.owners import Owner

TOKENS = 64  # of a passage
CHUNK_CACHE_GIB = 2.0**-7  # a few passages


async def ended(llm: AsyncLLM, request_id: str, tokens: int, tenant: str, call: str, order: list[str]) -> None:
    params = SamplingParams(max_tokens=tokens, min_tokens=tokens, ignore_eos=True, temperature=0.0)
    async for output in llm.generate("Who", params, request_id, tenant=tenant, call=call):
        if output.finished:
            assert len(output.outputs[0].token_ids) == tokens
            order.append(request_id)


def test_a_short_request_is_answered_before_another_tenants_call_of_many_prompts() -> None:
    async def run() -> list[str]:
        order: list[str] = []
        many = [asyncio.ensure_future(ended(llm, f"many-{i}", 120, "a", "1", order)) for i in range(6)]
        while llm.num_unfinished_requests < len(many):
            await asyncio.sleep(0)
        await ended(llm, "first", 1, "b", "1", order)
        await ended(llm, "second", 1, "a", "2", order)
        await asyncio.gather(*many)
        return order

    with async_llm(max_model_len=256, num_gpu_blocks_override=80, max_num_seqs=2) as llm:
        order = asyncio.run(run())
    assert order[:2] == ["first", "second"] and sorted(order[2:]) == [f"many-{i}" for i in range(6)]


def test_a_tenants_passages_are_reused_whatever_another_one_stores_and_retains() -> None:
    """In the memory, and on the disk after the memory has forgotten them. A limit holds for the tenant that has it."""

    async def ask(llm: AsyncLLM, passage: int, tenant: str, limit: int | None = None) -> dict[str, int]:
        chunks = [[20 + passage % 200, 20 + passage // 200, *range(30, 30 + TOKENS - 2)]]
        prompt = {"prefix": [], "chunks": chunks, "suffix": [5, 6]}
        params = SamplingParams(max_tokens=1, temperature=0.0)
        outputs = llm.generate(prompt, params, f"{tenant}-{passage}", tenant=tenant, max_store_bytes=limit)  # type: ignore[arg-type]
        found = [output.num_found_tokens async for output in outputs][-1]
        return {where: count for where, count in found.items() if count}

    async def run(llm: AsyncLLM) -> None:
        assert await ask(llm, 0, "bob") == {} and await ask(llm, 0, "bob") == {"host": TOKENS}
        keys = []
        for passage in range(1, 40):
            await ask(llm, passage, "alice")
            parsed = ParsedPrompt([20 + passage, 20, *range(30, 30 + TOKENS - 2)], chunk_bounds=((0, TOKENS),))
            keys += [each["key"] for each in await llm.call("encode_chunks", parsed, Owner("alice"))]
            await llm.call("retain_chunks", keys, 100, 3600.0, "alice")
        held = {metric.name: metric.value for metric in await llm.get_metrics()}
        assert held["vllm_blend:tenant_chunk_bytes_memory_alice"] > 3 * held["vllm_blend:tenant_chunk_bytes_memory_bob"]
        assert await ask(llm, 0, "bob") == {"host": TOKENS}
        one = int(held["vllm_blend:tenant_chunk_bytes_memory_bob"])
        for passage in range(40, 50):
            await ask(llm, passage, "carol", 2 * one)
        assert await llm.call("flush")
        held = {metric.name: metric.value for metric in await llm.get_metrics()}
        for tier in ("memory", "disk"):
            assert 0 < held[f"vllm_blend:tenant_chunk_bytes_{tier}_carol"] <= 2 * one, tier
            assert held[f"vllm_blend:tenant_chunk_bytes_{tier}_bob"] == one, tier
        with pytest.raises(ValueError, match="max_store_bytes=0 must be a positive integer"):
            await ask(llm, 0, "carol", 0)

    with (
        memory_folder() as folder,
        async_llm(
            enable_blending=True,
            blend_encoding_context="page",
            blend_chunk_cache_gib=CHUNK_CACHE_GIB,
            chunk_store_path=str(folder),
            chunk_store_gib=2 * CHUNK_CACHE_GIB,
            max_model_len=256,
            num_gpu_blocks_override=80,
        ) as llm,
    ):
        asyncio.run(run(llm))
