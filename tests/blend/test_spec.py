"""How text names a rule and its settings, and what is said of text that cannot be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from tests.blend.prompts import tiny_prompt
from tests.blend.rules import selectors_restored
from tests.engine.engines import engine, greedy, run, tiny_model
from vllm_blend import Evidence, Selector, register_selector
from vllm_blend.blend.selectors import make_selector
from vllm_blend.blend.selectors.question_attention import QuestionAttention


@pytest.mark.cpu_only
def test_what_text_makes() -> None:
    assert make_selector("question_attention(layer_share=0.5,first_layer=0.25)") == QuestionAttention(0.5, 0.25, 0.5)
    assert make_selector(" question_attention ( mean_shift = 0 ) ") == QuestionAttention(mean_shift=0)
    assert make_selector(" question_attention( ) ") == make_selector("question_attention") == QuestionAttention()
    assert make_selector(" auto ") == make_selector("auto") == QuestionAttention()
    assert make_selector("auto(mean_shift=1)") == QuestionAttention(mean_shift=1)


@pytest.mark.cpu_only
def test_a_rule_of_ones_own_takes_words_and_whole_numbers_and_may_have_any_name() -> None:
    @dataclass(frozen=True)
    class Own(Selector):
        name: ClassVar[str] = "own + rule"
        which: str = "first"
        count: int = 2

        def score(self, evidence: Evidence) -> torch.Tensor:
            return evidence.positions.float()

    with selectors_restored():
        register_selector(Own)
        assert make_selector("own + rule") == Own()
        with pytest.raises(ValueError, match="adds to a rule"):
            make_selector("own + rule(count=1)")  # what has such a name takes no settings
        register_selector(type("Named", (Own,), {"name": "own"}))
        assert make_selector("own(which=last, count=3)") == type(make_selector("own"))("last", 3)  # type: ignore[call-arg]
        with pytest.raises(ValueError, match=r"count=1.5 must be a whole number, such as 2"):
            make_selector("own(count=1.5)")


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonesuch", r"'nonesuch' is unknown: use one of .*question_attention"),
        ("question_attention(", "is unknown"),
        ("question_attention(layer_share=0.5))", "is unknown"),
        ("", "'' is unknown"),
        ("question_attention+mean_shift", r"a setting, in parentheses, as in question_attention\(mean_shift=0.5\)"),
        ("late_attention + mean_shift(strength=0.5)", r"question_attention\(mean_shift=0.5\), and the other levers"),
        ("question_attention(layer_share=0.5)+smoothing(window=3)", "the other levers are gone"),
        ("question_attention(depth=1)", r"'depth=1' is not a setting of 'question_attention': .*mean_shift"),
        ("question_attention(0.5)", "'0.5' is not a setting"),
        ("question_attention(layer_share=1,layer_share=1)", "'layer_share=1' is not a setting"),
        ("question_attention(layer_share=x)", "layer_share=x must be a number, such as 0.75"),
        ("question_attention(layer_share=nan)", "layer_share=nan must be a number, such as 0.75"),
        ("random(seed=1.5)", "seed=1.5 must be a whole number"),
        ("random(seed=99999999999999999999)", "must be a whole number"),
        ("value_deviation(seed=1)", "'seed=1' is not a setting of 'value_deviation'"),
    ],
)
def test_text_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_selector(text)


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", [None, 3, ["auto"], {"auto": 1}, b"auto"])
def test_a_name_that_is_not_text_is_an_error(name: Any) -> None:
    with pytest.raises(ValueError, match=r"blend_selector=.* must be text"):
        make_selector(name)


@pytest.mark.parametrize("name", ["", ["auto"], "random(seed=x)", "question_attention+mean_shift"])
def test_a_prompt_whose_rule_cannot_be_is_refused_alone(name: Any) -> None:
    with engine(tiny_model("llama"), enable_blending=True) as llm:
        outputs = run(llm, [tiny_prompt(), tiny_prompt(blend_selector=name), tiny_prompt()], greedy(3))
        assert [output.error is None for output in outputs] == [True, False, True]
        assert "blend_selector=" in str(outputs[1].error) and outputs[1].outputs[0].token_ids == []
        assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids != []
