"""Over an engine process: a tenant's call of many prompts, and a short request of another tenant beside it."""

from __future__ import annotations

import asyncio

from tests.engine.async_engines import async_llm
from vllm_blend import SamplingParams
from vllm_blend.engine.async_llm import AsyncLLM


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
