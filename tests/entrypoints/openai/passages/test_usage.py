"""The counts of a request are numbers that add up to its prompt."""

from __future__ import annotations

from tests.engine.engines import demo_prompt, engine, greedy
from vllm_blend import LLM
from vllm_blend.entrypoints.openai.passages import PromptTokensDetails, usage_details
from vllm_blend.outputs import RequestOutput


def details(llm: LLM, prompt: object) -> tuple[PromptTokensDetails, RequestOutput]:
    [output] = llm.generate(prompt, greedy(1), use_tqdm=False)  # type: ignore[arg-type]
    found = usage_details(output)
    parts = (found["cached_tokens"], found["stored_tokens"], found["recomputed_tokens"])
    assert sum(parts) == len(output.prompt_token_ids) and min(parts) >= 0
    assert sum(found["tiers"].values()) == found["cached_tokens"] == output.num_cached_tokens
    return found, output


def test_counts_of_a_plain_and_of_a_blended_prompt() -> None:
    with engine(enable_blending=True, blend_recompute_ratio=0.2) as llm:
        text = "Question: Who? " * 8
        first, _ = details(llm, text)
        assert first["recomputed_tokens"] > 0 and first["cached_tokens"] == first["stored_tokens"] == 0
        again, _ = details(llm, text)
        assert again["cached_tokens"] == again["tiers"]["prefix_cache"] > again["reused_tokens"] == 0
        first, _ = details(llm, demo_prompt(0, 4))
        assert first["stored_tokens"] > 0 == first["reused_tokens"]
        again, output = details(llm, demo_prompt(0, 4))
        assert again["reused_tokens"] == again["cached_tokens"] > again["recomputed_tokens"] > 0
        assert again["tiers"]["host"] + again["tiers"]["device"] == again["cached_tokens"]
        both = usage_details([output, output])
        assert both["reused_tokens"] == 2 * again["reused_tokens"]
        assert both["tiers"]["disk"] == 0


def test_before_anything_is_known() -> None:
    output = RequestOutput("1", None, [1, 2, 3], None, [], finished=False)
    assert usage_details(output)["cached_tokens"] == 0 and usage_details([])["recomputed_tokens"] == 0
