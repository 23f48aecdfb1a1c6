"""The verdict: what passes, what is recommended, and what it says."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_blend.quality.intervals import share
from vllm_blend.quality.settings import Setting
from vllm_blend.quality.verdict import State, Thresholds, as_json, decide, judge

pytestmark = pytest.mark.cpu_only

LIMITS = Thresholds()
SMALL, LARGE = Setting("auto", 0.08, "page"), Setting("auto", 0.15, "page")
REUSE, FILLER = Setting("none", 0.0, "page"), Setting("auto", 0.08, "bos")


def row(setting: Setting | None, agreed: int = 95, gain: float = 0.0, work: float = 0.2, **more: Any) -> dict[str, Any]:
    """A row of 100 questions."""
    found = share(agreed, 100)
    name = "full prefill" if setting is None else setting.name
    values = {"dataset": "d", "setting": name, "questions": 100, "work": work, "f1": 0.5 + gain, "f1_gain": gain}
    values |= {"f1_gain_low": gain - 0.005, "f1_gain_high": gain + 0.005}
    return values | {"agreement": found.value, "agreement_low": found.low, "agreement_high": found.high} | more


@pytest.mark.parametrize(
    ("agreed", "gain", "more", "state"),
    [
        (95, 0.0, {}, State.PASSES),
        (80, 0.0, {}, State.UNCERTAIN),
        (79, 0.0, {}, State.FAILS),
        (95, -0.01, {}, State.PASSES),
        (95, -0.02, {}, State.FAILS),
        (95, -0.02, {"f1_gain_high": 0.0}, State.PASSES),  # the interval goes through zero
        (95, 0.2, {}, State.PASSES),
    ],
)
def test_a_setting_passes_by_agreement_and_by_f1(agreed: int, gain: float, more: dict[str, Any], state: State) -> None:
    assert judge(row(SMALL, agreed, gain, **more), LIMITS) is state


def test_the_cheapest_that_passes_is_recommended() -> None:
    rows = [row(None), row(REUSE, 20, work=0.02), row(SMALL, 90, work=0.12), row(LARGE, 97, work=0.2)]
    verdict = decide([*rows, row(FILLER, 96, work=0.11)], [REUSE, SMALL, LARGE, FILLER], LIMITS)
    assert (verdict.state, verdict.best, verdict.status) == (State.PASSES, FILLER, 0)
    assert verdict.text.startswith(
        "Blend this model by --blend-selector 'auto' --blend-recompute-ratio 0.08 --blend-encoding-context bos, for 11."
    )
    assert (
        "d: 96% of 100 answers are full prefill's (95% interval 90 to 98), F1 50.0 of 50.0 (-0.5 to +0.5)"
        in verdict.text
    )


def test_what_is_certain_goes_before_what_is_cheaper() -> None:
    verdict = decide([row(None), row(SMALL, 85, work=0.1), row(LARGE, 97)], [SMALL, LARGE], LIMITS)
    assert (verdict.state, verdict.best) == (State.PASSES, LARGE)


def test_a_ratio_that_is_better_than_a_larger_one_was_lucky() -> None:
    verdict = decide([row(None), row(SMALL, 97), row(LARGE, 70)], [SMALL, LARGE], LIMITS)
    assert (verdict.state, verdict.best, verdict.status) == (State.FAILS, None, 1)
    other = decide([row(None), row(FILLER, 97), row(LARGE, 70)], [FILLER, LARGE], LIMITS)  # in another company
    assert other.best == FILLER


def test_a_setting_has_to_pass_everywhere() -> None:
    elsewhere = [row(None, dataset="e"), row(SMALL, 82, dataset="e"), row(LARGE, 60, dataset="e")]
    verdict = decide([row(None), row(SMALL, 97), row(LARGE, 97), *elsewhere], [SMALL], LIMITS)
    assert (verdict.state, verdict.best, verdict.status) == (State.UNCERTAIN, SMALL, 3)
    assert verdict.text.startswith("More questions are needed to say so, but this may be enough:")
    assert "  e: 82% of 100 answers" in verdict.text and "Ask about 1500 questions of each data set." in verdict.text
    assert decide([row(None), row(LARGE, 97), *elsewhere], [LARGE], LIMITS).state is State.FAILS


def test_a_refusal_names_what_came_nearest() -> None:
    verdict = decide([row(None), row(REUSE, 20), row(SMALL, 75)], [REUSE, SMALL], LIMITS)
    assert verdict.status == 1 and verdict.text.startswith("Do not blend this model: no setting keeps 80% of full")
    assert "The nearest is auto 8% (page):\n  d: 75% of 100 answers" in verdict.text


def test_a_model_that_cannot_answer_cannot_be_judged() -> None:
    verdict = decide([row(None) | {"f1": 0.05}, row(SMALL, 99)], [SMALL], LIMITS)
    assert (verdict.status, verdict.best) == (1, None)
    assert "d: cannot tell: full prefill itself has F1 5.0" in verdict.text


def test_few_questions_are_not_certain() -> None:
    low = {"agreement_low": share(12, 12).low}  # 76%
    verdict = decide([row(None), row(SMALL, 100, questions=12, **low)], [SMALL], LIMITS)
    assert verdict.state is State.UNCERTAIN and "Ask about 50 questions" in verdict.text
    hardly = decide([row(None), row(SMALL, 80)], [SMALL], LIMITS)
    assert "Ask many more questions, or allow a smaller agreement" in hardly.text


def test_a_file_has_every_setting() -> None:
    rows = [row(None), row(SMALL, 90), row(LARGE, 97)]
    written = as_json(decide(rows, [SMALL, LARGE], LIMITS), rows, LIMITS)
    assert written["state"] == "passes" and written["best"] == {"rule": "auto", "ratio": 0.08, "company": "page"}
    assert [each["state"] for each in written["settings"]] == ["passes", "passes"]
    assert written["data"] == {"d": {"questions": 100, "f1": 0.5}}


@pytest.mark.parametrize(
    ("limits", "message"), [({"min_agreement": 80}, "--min-agreement 80"), ({"max_f1_loss": 5}, "--max-f1-loss 5")]
)
def test_limits_are_shares(limits: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Thresholds(**limits)
