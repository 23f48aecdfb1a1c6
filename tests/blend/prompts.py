"""Small chunked prompts of random tokens."""

from __future__ import annotations

from typing import Any

from tests.engine.engines import TINY_VOCABULARY
from vllm_blend import RequestOutput


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


def assert_counts_add_up(output: RequestOutput) -> None:
    blend = output.blend
    assert blend is not None
    counts = blend.num_exact_tokens + blend.num_reused_tokens + blend.num_recomputed_tokens
    assert counts == len(output.prompt_token_ids)
    assert output.num_cached_tokens == blend.num_exact_tokens + blend.num_reused_tokens
