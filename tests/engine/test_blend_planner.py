"""The planner: which prompts are blended, and whose words it remembers."""

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


def parsed(**options: Any) -> Any:
    prompt: Any = tiny_prompt(order="free", **options)
    return parse_prompt(prompt, None, TINY_VOCABULARY)


def test_a_context_of_the_least_tokens_is_blended() -> None:
    prompt = parsed()
    for least, is_blended in ((53, True), (54, False)):
        planner = BlendPlanner(BlendConfig(enable_blending=True, min_tokens=least), 2, 1)
        assert planner.blends(prompt) is is_blended


def test_words_are_remembered_for_their_salt_alone() -> None:
    planner = BlendPlanner(BlendConfig(enable_blending=True), 2, 1)
    for _ in range(2):
        planner.arrange(parsed())
    known = set(planner.words._known)
    assert len(known) == 3  # of four chunks two are alike
    planner.arrange(parsed(cache_salt="a"))
    assert len(set(planner.words._known) - known) == 3


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"blend_selector": "relevnt_passages"}, "blend_selector"),
        ({"blend_encoding_context": "relevnt_passages"}, "blend_encoding_context"),
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
