"""Settings, as they are asked for."""

from __future__ import annotations

import pytest

from vllm_blend.quality.settings import COMPANIES, QUICK_RULES, RATIOS, RULES, Setting, make_settings

pytestmark = pytest.mark.cpu_only


def test_every_rule_meets_every_ratio_and_company() -> None:
    settings = make_settings(["none", "random", "question_attention@0.3,0.1"], [0.2, 0.05], ["page", "bos"])
    assert [setting.name for setting in settings[:5]] == [
        "none (page)",
        "random 5% (page)",
        "random 20% (page)",
        "question_attention 10% (page)",
        "question_attention 30% (page)",
    ]
    assert [setting.company for setting in settings] == ["page"] * 5 + ["bos"] * 5
    assert settings[0].prompt == {"blend_selector": "none"}
    assert settings[1].prompt == {"blend_selector": "random", "blend_recompute_ratio": 0.05}


def test_the_defaults_can_be_measured() -> None:
    assert len(make_settings()) == len(COMPANIES) * (1 + (len(RULES) - 1) * len(RATIOS))
    assert len(make_settings(QUICK_RULES)) == 3


def test_settings_of_a_rule_are_kept() -> None:
    [setting] = make_settings(["question_attention(layer_share=0.75, mean_shift=0)@0.1"])
    assert setting == Setting("question_attention(layer_share=0.75, mean_shift=0)", 0.1, "filler")


@pytest.mark.parametrize(
    ("rules", "ratios", "companies", "message"),
    [
        (["randm"], [0.1], ["page"], "blend_selector='randm' is unknown"),
        (["random@a"], [0.1], ["page"], "'random@a' must end with shares"),
        (["random"], [1.5], ["page"], "the rule 'random': a ratio=1.5"),
        (["none@0.1"], [0.1], ["page"], "none always recomputes 0: leave @ out"),
        (["none"], [0.1], ["pages"], "blend_encoding_context='pages'"),
        (["random"], [0.1, 0.1], ["page"], r"random 10% \(page\) is asked for twice"),
        (["none"], [0.1], [], "nothing to compare"),
    ],
)
def test_what_cannot_be_is_found_out_before_anything_runs(
    rules: list[str], ratios: list[float], companies: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_settings(rules, ratios, companies)
