"""The settings of the sweep can all be run, and say where they come from."""

from __future__ import annotations

from vllm_blend.blend.selectors import BEST, SELECTORS
from vllm_blend.quality.catalogue import LEVERS, RATIOS, RULES, SETTINGS
from vllm_blend.quality.settings import make_runs


def test_every_selector_and_auto_are_run_at_every_ratio() -> None:
    runs = make_runs(SETTINGS, RATIOS)
    chosen = {(run.setting.prompt.get("blend_selector"), run.ratio) for run in runs}
    rules = {name for name, rule in SELECTORS.items() if rule.fixed_ratio is None} | {BEST}
    assert {(rule, ratio) for rule in rules for ratio in RATIOS} <= chosen
    assert {setting.name for setting in RULES} == rules


def test_every_setting_has_a_name_of_its_own_and_a_source() -> None:
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)
    assert all(setting.paper for setting in SETTINGS)
    assert all(set(setting.ratios or ()) <= set(RATIOS) for setting in LEVERS)
