"""Small chunked prompts of random tokens, and what blends made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.engines import TINY_VOCABULARY
from vllm_blend import LLM, RequestOutput
from vllm_blend.blend.plan import BlendPlan
from vllm_blend.engine.blend_planner import BlendPlanner


def tiny_prompt(**options: Any) -> dict[str, Any]:
    """Four chunks of unequal length, one of them twice."""
    ids = [(7 * i * i + 3 * i + 1) % TINY_VOCABULARY for i in range(70)]
    chunks = [ids[5:17], ids[17:20], ids[20:41], ids[5:17]]
    return {"prefix": ids[:5], "chunks": chunks, "suffix": ids[41:47], **options}


def plain(prompt: dict[str, Any]) -> dict[str, list[int]]:
    """The same prompt without its seams."""
    return {
        "prompt_token_ids": [*prompt["prefix"], *(t for chunk in prompt["chunks"] for t in chunk), *prompt["suffix"]]
    }


def recomputed_positions(llm: LLM, num_suffix_tokens: int) -> torch.Tensor:
    """Return the context positions that the last blend computed, and check that the suffix stands behind them."""
    metadata = llm.llm_engine.decoder.cache_fuse_metadata
    indices, n = metadata["imp_indices"], metadata["org_seq_len"]
    start = n - num_suffix_tokens
    assert indices[-num_suffix_tokens:].tolist() == list(range(start, n))
    assert (indices[:-num_suffix_tokens] < start).all()
    chosen: torch.Tensor = indices[:-num_suffix_tokens]
    return chosen


def record_plans(monkeypatch: pytest.MonkeyPatch) -> list[BlendPlan]:
    """Return a list that gets the plans of blended prompts from now on."""
    seen: list[BlendPlan] = []
    plan_stored = BlendPlanner.plan_stored

    def recorded(self: BlendPlanner, *arguments: Any) -> BlendPlan:
        seen.append(plan_stored(self, *arguments))
        return seen[-1]

    monkeypatch.setattr(BlendPlanner, "plan_stored", recorded)
    return seen


def assert_counts_add_up(output: RequestOutput) -> None:
    blend = output.blend
    assert blend is not None
    found = blend.num_exact_tokens + blend.num_reused_tokens
    assert found + blend.num_encoded_tokens + blend.num_recomputed_tokens == len(output.prompt_token_ids)
    assert output.num_cached_tokens == sum(output.num_found_tokens.values()) == found
