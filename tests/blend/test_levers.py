"""What levers do to scores, by hand; how text names them; and that everything recomputed is still full prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from tests.blend.prompts import assert_counts_add_up, tiny_prompt
from tests.engine.compare import assert_logprobs_match
from tests.engine.engines import DEMO, demo_prompt, engine, greedy, hf_model, run, tiny_model
from vllm_blend.blend.plan import make_plan
from vllm_blend.blend.selectors import Evidence, LooksAt, Selector, choose, make_selector, top_indices
from vllm_blend.blend.selectors.levers.base import above_all
from vllm_blend.blend.selectors.levers.chunk_heads import ChunkHeads
from vllm_blend.blend.selectors.levers.chunk_minimum import ChunkMinimum
from vllm_blend.blend.selectors.levers.coverage import Coverage
from vllm_blend.blend.selectors.levers.smoothing import Smoothing
from vllm_blend.blend.selectors.spec import Composed, parse_selector
from vllm_blend.registry import Registry

# Chunks of 3, 4 and 2 tokens from position 10 on, all of them candidates.
OFFSETS = torch.tensor([0, 1, 2, 0, 1, 2, 3, 0, 1])
MASS = torch.tensor([9.0, 1.0, 2.0, 5.0, 8.0, 0.0, 7.0, 3.0, 4.0])
SPECS = [
    "question_attention+smoothing(window=3)",
    "value_deviation + chunk_heads + chunk_minimum(tokens=1)",
    "question_attention(over_heads=max, first_round=0.5)+coverage(share=0.5)",
    "first_tokens+smoothing",
    "question_attention+mean_shift",
    "gradual+mean_shift(strength=0.5)",
]


def evidence() -> Evidence:
    return Evidence(torch.arange(10, 19), OFFSETS, seed=0, question_mass=MASS)


def chosen(spec: str, count: int) -> list[int]:
    return choose(make_selector(spec), evidence(), count).tolist()


@pytest.mark.cpu_only
def test_the_heads_of_chunks_come_first() -> None:
    assert chosen("question_attention+chunk_heads(tokens=1)", 4) == [0, 3, 4, 7]
    assert chosen("question_attention+chunk_heads(tokens=1)", 2) == [0, 3]  # where not all fit, the best
    assert chosen("question_attention+chunk_heads", 6) == [0, 1, 3, 4, 7, 8]


@pytest.mark.cpu_only
def test_every_chunk_gets_its_best() -> None:
    assert chosen("question_attention+chunk_minimum(tokens=1)", 3) == [0, 4, 8]
    assert chosen("question_attention+chunk_minimum(tokens=1)", 4) == [0, 4, 6, 8]
    assert chosen("question_attention+chunk_minimum(tokens=2)", 6) == [0, 2, 4, 6, 7, 8]
    assert chosen("question_attention+chunk_minimum(tokens=9)", 9) == list(range(9))


@pytest.mark.cpu_only
def test_neighbours_of_the_same_chunk_count() -> None:
    smooth = Smoothing(3).apply(MASS, evidence())
    expected = [5.0, 4.0, 1.5, 6.5, 13 / 3, 5.0, 3.5, 3.5, 3.5]
    torch.testing.assert_close(smooth, torch.tensor(expected))
    wide = Smoothing(99).apply(MASS, evidence())
    torch.testing.assert_close(wide, torch.tensor([4.0] * 3 + [5.0] * 4 + [3.5] * 2))
    assert MASS[0] == 9  # what the selector gave is not written to


@pytest.mark.cpu_only
def test_no_more_than_what_holds_the_share() -> None:
    assert MASS.sum() == 39
    for share, count in ((1 / 39, 1), (9 / 39, 1), (9.1 / 39, 2), (24 / 39, 3), (0.99, 8), (1.0, 8)):
        assert Coverage(share).count(evidence(), 9) == count, share
    assert Coverage(0.99).count(evidence(), 5) == 5
    assert chosen("question_attention+coverage(share=0.6)", 9) == [0, 4, 6]
    assert chosen("question_attention+coverage(share=0.6)+chunk_heads(tokens=1)", 9) == [0, 3, 7]


@pytest.mark.cpu_only
def test_levers_apply_in_their_order() -> None:
    one = make_selector("question_attention+smoothing(window=3)+chunk_heads(tokens=1)").score(evidence())
    by_hand = ChunkHeads(1).apply(Smoothing(3).apply(MASS, evidence()), evidence())
    torch.testing.assert_close(one, by_hand)


@pytest.mark.cpu_only
def test_what_text_makes() -> None:
    plain = make_selector("question_attention(layer_share=0.5)")
    assert plain.name == "question_attention" and plain.look(12).stop == 6
    composed = make_selector("question_attention(layer_share=0.5,first_round=0.25)+chunk_minimum")
    assert isinstance(composed, Composed) and composed.levers == (ChunkMinimum(2),)
    assert composed.looks_at is LooksAt.QUESTION and composed.first_share() == 0.25
    assert composed.look(12).stop == 6
    gradual = make_selector("gradual(first=3)+smoothing")
    assert gradual.looks_at is LooksAt.LAYERS and gradual.shares(0.1, [1, 2]) == pytest.approx([0.3, 0.1])


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonesuch+smoothing", r"'nonesuch\+smoothing' is unknown: use one of .*question_attention"),
        ("question_attention+nonesuch", r"the lever 'nonesuch' is unknown: use one of .*smoothing"),
        ("question_attention+", "the lever '' is unknown"),
        ("question_attention(", "is unknown"),
        (
            "question_attention(depth=1)",
            r"'depth=1' is not a setting of 'question_attention': .*layer_share",
        ),
        ("question_attention(0.5)", "'0.5' is not a setting"),
        ("question_attention(tokens=1,tokens=2)", "'tokens=2' is not a setting"),
        ("question_attention(layer_share=x)", "layer_share"),
        ("question_attention+smoothing(window=4)", "window=4 must be an odd number"),
        ("question_attention+chunk_heads(tokens=0)", "tokens=0 must be a whole number of tokens, at least 1"),
        ("question_attention+chunk_minimum(tokens=1.5)", "tokens=1.5 must be"),
        ("question_attention+coverage(share=0)", r"share=0 must be in \(0, 1\]"),
        ("value_deviation+coverage", "coverage measures the question's attention"),
        ("none+smoothing", "'none' leaves nothing to choose"),
        ("auto+smoothing", "'auto' has levers of its own"),
        ("question_attention+mean_shift+smoothing+mean_shift", "the lever 'mean_shift' is given more than once"),
        ("question_attention(layer_share=nan)", "layer_share=nan must be a number, such as 0.75"),
        ("question_attention(layer_share=0.5))", r"layer_share=0.5\) must be a number"),
        ("question_attention+mean_shift(strength=x)", "strength=x must be a number, such as 1.0"),
        ("question_attention+chunk_heads(tokens=99999999999999999999)", "must be a whole number"),
        ("attention_deviation(power=inf)", "power=inf must be a number"),
        ("attention_deviation(power=-1)", "power=-1 must be a finite number, at least 0"),
        ("gradual(first=0.5)", "first=0.5 must be a finite number, at least 1"),
        ("gradual(first=-2)", "first=-2 must be a finite number, at least 1"),
        ("random(seed=1.5)", "seed=1.5 must be a whole number"),
        ("", "'' is unknown"),
    ],
)
def test_text_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_selector(text)


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", [None, 3, ["auto"], {"auto": 1}, b"auto"])
def test_a_name_that_is_no_text_is_an_error(name: Any) -> None:
    with pytest.raises(ValueError, match=r"blend_selector=.* must be text"):
        make_selector(name)


@pytest.mark.cpu_only
def test_spaces_around_a_name_do_not_matter() -> None:
    assert make_selector(" auto ") == make_selector("auto")
    assert make_selector(" question_attention( ) ") == make_selector("question_attention")


@pytest.mark.cpu_only
def test_what_a_rule_of_ones_own_does_is_kept_under_levers() -> None:
    @dataclass(frozen=True)
    class Half(Selector):
        name: ClassVar[str] = "half"

        def score(self, evidence: Evidence) -> torch.Tensor:
            return evidence.positions.float()

        def count(self, scores: torch.Tensor, evidence: Evidence, budget: int) -> int:
            return budget // 2

        def mean_shift(self) -> float:
            return 0.5

    selectors: Registry[type[Selector]] = Registry("selector", "blend_selector", {"half": Half})
    composed = parse_selector("half+smoothing", selectors)
    assert len(choose(composed, evidence(), 8)) == 4
    assert composed.mean_shift() == 0.5
    assert parse_selector("half+mean_shift", selectors).mean_shift() == 1.0


@pytest.mark.cpu_only
def test_a_rule_of_ones_own_that_shifts_is_not_divided() -> None:
    @dataclass(frozen=True)
    class Shifting(Selector):
        name: ClassVar[str] = "shifting"
        strength: float = 1.0

        def score(self, evidence: Evidence) -> torch.Tensor:
            return evidence.positions.float()

        def mean_shift(self) -> float:
            return self.strength

    for strength, is_divisible in ((1.0, False), (0.0, True)):
        assert make_plan([], [0, 0], 1, Shifting(strength), 0.5, [1], None, 4).is_divisible == is_divisible


@pytest.mark.cpu_only
@pytest.mark.parametrize(("small", "largest"), [(1e-9, 1.0), (1e-3, 3e9)])
def test_what_comes_first_keeps_its_order_however_small_its_scores(small: float, largest: float) -> None:
    """In float32, adding more than the range of the scores would make small ones equal, and the largest as large."""
    scores = torch.tensor([0.0, 2 * small, small, largest])
    first = torch.tensor([True, True, True, False])
    assert top_indices(above_all(scores, first), 1).tolist() == [1]
    assert top_indices(above_all(scores, first), 2).tolist() == [1, 2]
    assert top_indices(above_all(scores, first), 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["", ["auto"], "random(seed=x)", "question_attention+mean_shift+mean_shift"])
def test_a_prompt_whose_rule_cannot_be_is_refused_alone(name: Any) -> None:
    with engine(tiny_model("llama"), enable_blending=True) as llm:
        outputs = run(llm, [tiny_prompt(), tiny_prompt(blend_selector=name), tiny_prompt()], greedy(3))
        assert [output.error is None for output in outputs] == [True, False, True]
        assert "blend_selector=" in str(outputs[1].error) and outputs[1].outputs[0].token_ids == []
        assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids != []


@pytest.mark.parametrize("rule", SPECS)
def test_ratio_1_is_full_prefill(rule: str) -> None:
    for model, prompt in ((tiny_model("llama"), tiny_prompt()), (DEMO, demo_prompt(11, passages=6))):
        with engine(model, enable_blending=True) as llm:
            options: Any = {**prompt, "blend_selector": rule, "blend_recompute_ratio": 1.0}
            run(llm, options, greedy(1))
            [output] = run(llm, options, greedy(6, logprobs=2, ignore_eos=True))
            assert_logprobs_match(output, hf_model(model))
            assert_counts_add_up(output)
            assert output.blend is not None and output.blend.num_reused_tokens == 0


@pytest.mark.parametrize("rule", SPECS)
def test_a_rule_with_levers_is_an_option_like_any(rule: str) -> None:
    with engine(enable_blending=True, blend_selector=rule, blend_recompute_ratio=0.2) as llm:
        [output] = run(llm, demo_prompt(3), greedy(4))
        assert_counts_add_up(output)
        assert output.blend is not None and output.blend.selector == rule and output.blend.num_recomputed_tokens > 0


def test_coverage_computes_less_where_less_is_needed() -> None:
    with engine(enable_blending=True) as llm:
        bound = run(llm, demo_prompt(3, blend_selector="question_attention", blend_recompute_ratio=0.3), greedy(2))[0]
        rule = "question_attention+coverage(share=0.3)"
        less = run(llm, demo_prompt(3, blend_selector=rule, blend_recompute_ratio=0.3), greedy(2))[0]
        assert less.blend is not None and bound.blend is not None
        assert 0 < less.blend.num_recomputed_tokens < bound.blend.num_recomputed_tokens
        assert_counts_add_up(less)
