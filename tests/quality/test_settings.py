"""Settings, and the runs that they make."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from vllm_blend.quality.catalogue import RATIOS, SETTINGS
from vllm_blend.quality.settings import Setting, find_settings, make_runs


def test_what_computes_the_same_has_the_same_key() -> None:
    runs = make_runs(find_settings(["value_deviation", "gradual", "random"], SETTINGS), (0.0, 0.1, 1.0))
    by_ratio = {ratio: {run.key for run in runs if run.ratio == ratio} for ratio in (0.0, 0.1, 1.0)}
    assert [len(keys) for keys in by_ratio.values()] == [1, 3, 1]
    gradual = next(run for run in runs if run.setting.name == "gradual" and run.ratio == 0.1)
    assert gradual.engine == {"blend_check_layers": [1, 2, 3, 4]}
    assert gradual.prompt == {"blend_selector": "gradual", "blend_recompute_ratio": 0.1}
    other = Setting("arranged", {"blend_selector": "random"}, arrange=lambda sample, prompt: prompt)
    assert make_runs([other], (0.0,))[-1].key not in by_ratio[0.0]
    assert make_runs([Setting("engine", engine={"block_size": 32})], (0.0,))[-1].key not in by_ratio[0.0]


def test_a_setting_runs_at_its_own_ratios_only() -> None:
    runs = make_runs([Setting("some", ratios=(0.15, 0.4))], RATIOS)
    assert [(run.setting.name, run.ratio) for run in runs] == [
        ("plain reuse", 0.0),
        ("recompute all", 1.0),
        ("some", 0.15),
    ]


@pytest.mark.parametrize(
    ("settings", "ratios", "message"),
    [
        ([Setting("a", {"blend_selector": "attentoin"})], (0.0,), "'a' is invalid: blend_selector='attentoin'"),
        ([Setting("a", engine={"blend_selectr": 1})], (0.0,), "'a' is invalid: .*blend_selectr"),
        ([Setting("a", engine={"block_size": 3})], (0.0,), "'a' is invalid: block_size=3"),
        (SETTINGS, (0.0, 1.5), "a ratio=1.5"),
        (SETTINGS, (0.0, 0.2, 0.1), "must be in rising order"),
        (SETTINGS, (0.1,), "must include 0"),
    ],
)
def test_what_cannot_be_is_found_out_before_anything_runs(
    settings: Sequence[Setting], ratios: tuple[float, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_runs(settings, ratios)


def test_settings_are_found_by_name() -> None:
    assert [s.name for s in find_settings(["random", "gradual"], SETTINGS)] == ["gradual", "random"]
    assert find_settings(None, SETTINGS) == SETTINGS
    with pytest.raises(ValueError, match=r"'randm' is unknown: there are value_deviation"):
        find_settings(["randm"], SETTINGS)
    with pytest.raises(ValueError, match="the name of several"):
        find_settings(None, [Setting("a"), Setting("a")])
