"""The planner: which prompts are blended, and settings that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from tests.blend.prompts import tiny_prompt
from tests.engine.engines import TINY_VOCABULARY, new_llm, tiny_model
from vllm_blend.config import BlendConfig
from vllm_blend.engine import setup
from vllm_blend.engine.blend_planner import BlendPlanner
from vllm_blend.prompt_parser import parse_prompt

pytestmark = pytest.mark.cpu_only


def test_a_context_of_the_least_tokens_is_blended() -> None:
    given: Any = tiny_prompt()
    prompt = parse_prompt(given, None, TINY_VOCABULARY)
    for least, is_blended in ((53, True), (54, False)):
        planner = BlendPlanner(BlendConfig(enable_blending=True, min_tokens=least), 2, 1)
        assert planner.blends(prompt) is is_blended


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"blend_selector": "question_atention"}, "blend_selector"),
        ({"blend_encoding_context": "question_atention"}, "blend_encoding_context"),
        ({"blend_selector": "value_deviation", "blend_check_layers": [99]}, "blend_check_layers"),
        ({"blend_selector": "question_attention", "blend_recompute_ratios": [0.5]}, "blend_recompute_ratios"),
    ],
)
def test_a_wrong_setting_costs_no_loading(options: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(setup, "make_executor", load)
    with pytest.raises(ValueError, match=named):
        new_llm(tiny_model("llama"), enable_blending=True, **options)
