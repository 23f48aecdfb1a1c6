"""How the question looks at the reused cache, in the engine and spelled out: which layers, tokens, heads, how often."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from tests import tolerances
from tests.blend.prompts import recomputed_positions
from tests.blend.reference import BlendReference, Context
from tests.blend.test_reference import CachingReference, pieces_of
from tests.engine.compare import assert_same_choice, assert_same_logprobs
from tests.engine.engines import DEMO, demo_prompt, engine, greedy, hf_model, run
from vllm_blend.blend.selectors import SELECTORS, Evidence, make_selector, register_selector
from vllm_blend.blend.selectors.attention_deviation import AttentionDeviation
from vllm_blend.blend.selectors.question_attention import QuestionAttention

LAYERS = 12
RATIO = 0.15
PROMPT = 7


@dataclass(frozen=True)
class Watching(QuestionAttention):
    """Question attention that keeps what it has seen."""

    name: ClassVar[str] = "watching"
    seen: ClassVar[list[Evidence]] = []

    def score(self, evidence: Evidence) -> torch.Tensor:
        self.seen.append(evidence)
        return super().score(evidence)


@pytest.fixture(autouse=True)
def watching() -> Iterator[None]:
    register_selector(Watching)
    Watching.seen.clear()
    yield
    del SELECTORS["watching"]


@torch.no_grad()
def suffix_weights(reference: BlendReference, context: Context, suffix: list[int], beside: list[int]) -> torch.Tensor:
    """[layers, heads, tokens of the suffix, tokens of the context]: attention of the suffix, with the positions
    `beside` computed in the same forward."""
    ids, start = [*context.ids, *suffix], len(context.ids)
    positions = torch.arange(len(ids))
    active = torch.tensor([*beside, *range(start, len(ids))])
    hidden = reference._embed(ids)[active]
    result = []
    for layer, (k_old, v_old) in zip(reference._layers, context.kv, strict=True):
        q, k, v = reference._project(layer, hidden)
        blank = torch.zeros(len(suffix), *k.shape[1:])
        k_all, v_all = torch.cat([k_old, blank]), torch.cat([v_old, blank])
        k_all[active], v_all[active] = k, v
        weights = reference._weights(reference._rotate(q, active), reference._rotate(k_all, positions), active)
        result.append(weights[:, len(beside) :, :start])
        hidden = reference._finish(layer, hidden, weights, v_all)
    return torch.stack(result)


def question(llm: Any, reference: BlendReference) -> tuple[Any, Context, list[int]]:
    prompt = demo_prompt(PROMPT)
    prefix, chunks, suffix = pieces_of(llm, prompt)
    return prompt, reference.compose(prefix, chunks), suffix


def reduce(weights: torch.Tensor, rule: QuestionAttention) -> torch.Tensor:
    """[layers, heads, tokens, keys] -> [keys], as the rule's settings say."""
    first, stop = int(rule.first_layer * LAYERS), round(rule.layer_share * LAYERS)
    weights = weights[first:stop, :, -rule.tokens :]
    weights = weights.sum(2) if rule.over_tokens == "mean" else weights.amax(2)
    weights = weights.mean(1) if rule.over_heads == "mean" else weights.amax(1)
    return weights.mean(0) if rule.over_layers == "mean" else weights.amax(0)


@pytest.mark.parametrize(
    "settings",
    [
        "layer_share=0.75",
        "layer_share=0.5, first_layer=0.25",
        "layer_share=1, first_layer=0.667",
        "tokens=3",
        "tokens=1000",
        "over_heads=max",
        "over_layers=max",
        "over_tokens=max",
        "over_heads=max, over_layers=max, over_tokens=max, tokens=5, first_layer=0.5",
    ],
)
def test_the_mass_is_what_a_plain_forward_gives(settings: str) -> None:
    reference = CachingReference(hf_model(DEMO))
    with engine(enable_blending=True) as llm:
        prompt, context, suffix = question(llm, reference)
        run(llm, {**prompt, "blend_selector": f"watching({settings})", "blend_recompute_ratio": RATIO}, greedy(1))
    [evidence] = Watching.seen
    rule = make_selector(f"watching({settings})")
    assert isinstance(rule, QuestionAttention) and evidence.question_mass is not None
    expected = reduce(suffix_weights(reference, context, suffix, []), rule)[evidence.positions.cpu()]
    tolerances.check_relative("mass", evidence.question_mass, expected)


def test_a_second_look_sees_what_the_first_one_had_computed() -> None:
    reference = CachingReference(hf_model(DEMO))
    with engine(enable_blending=True) as llm:
        prompt, context, suffix = question(llm, reference)
        options = {"blend_selector": "watching(first_round=0.5)", "blend_recompute_ratio": RATIO}
        [output] = run(llm, {**prompt, **options}, greedy(4))
        chosen = recomputed_positions(llm, len(suffix)).tolist()
    budget = int(RATIO * len(context.ids))
    once, again = Watching.seen
    rule = QuestionAttention()
    scores = reduce(suffix_weights(reference, context, suffix, []), rule)
    first = reference._best(scores, context, budget // 2).tolist()
    scores = reduce(suffix_weights(reference, context, suffix, first), rule)
    scores[first] = torch.inf
    assert_same_choice(chosen, reference._best(scores, context, budget).tolist())
    assert len(once.positions) - len(again.positions) == budget // 2
    assert output.blend is not None and output.blend.num_recomputed_tokens == budget + len(suffix)


@pytest.mark.parametrize("settings", ["first_round=0.5", "over_heads=max, tokens=4", "first_round=0.3, tokens=2"])
def test_who_looks_beside_changes_nothing(settings: str) -> None:
    rules = [f"question_attention({settings})", "question_attention", "none", "question_attention(first_round=0.7)"]
    prompts = [demo_prompt(i, blend_selector=rule) for i, rule in enumerate(rules)]
    with engine(enable_blending=True) as llm:
        params = greedy(6, logprobs=2)
        together = run(llm, prompts, params)
        for prompt, output in zip(prompts, together, strict=True):
            assert_same_logprobs(output, run(llm, prompt, params)[0])


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    "settings",
    [
        {"first_layer": 0.75},
        {"first_layer": -0.1},
        {"tokens": -1},
        {"tokens": 1.5},
        {"first_round": 1.0},
        {"over_heads": "sum"},
        {"over_layers": ""},
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        QuestionAttention(**settings)


@pytest.mark.cpu_only
def test_attention_times_deviation_by_hand() -> None:
    old, new = torch.zeros(3, 2, 2), torch.zeros(3, 2, 2)
    new[0, 0, 0], new[1, 1, 1] = 2.0, -3.0
    mass = torch.tensor([5.0, 1.0, 9.0])
    evidence = Evidence(torch.arange(3), torch.arange(3), 0, mass, v_old=old, v_new=new)
    for power, expected in ((1.0, [10.0, 3.0, 0.0]), (2.0, [20.0, 9.0, 0.0]), (0.0, [5.0, 1.0, 9.0])):
        assert make_selector(f"attention_deviation(power={power})").score(evidence).tolist() == expected


def test_attention_times_deviation_in_the_engine_is_that_of_a_plain_forward() -> None:
    """The mass, beside rules that look at one of the two."""
    reference = CachingReference(hf_model(DEMO))
    with engine(enable_blending=True) as llm:
        prompt, context, suffix = question(llm, reference)
        rules = ["attention_deviation", "value_deviation", "watching"]
        prompts = [{**prompt, "blend_selector": rule, "blend_recompute_ratio": RATIO} for rule in rules]
        together = run(llm, prompts, greedy(4, logprobs=2))
        [alone] = run(llm, prompts[0], greedy(4, logprobs=2))
        chosen = recomputed_positions(llm, len(suffix)).tolist()
    assert_same_logprobs(together[0], alone)
    budget = int(RATIO * len(context.ids))
    mass = reduce(suffix_weights(reference, context, suffix, []), QuestionAttention())
    deviation = reference.blend(context, suffix, "value_deviation", budget).strengths
    scores = mass * deviation.clamp(min=0)
    assert_same_choice(chosen, reference._best(scores, context, budget).tolist())


@pytest.mark.cpu_only
@pytest.mark.parametrize("settings", [{"power": -1.0}, {"first_round": 0.5}])
def test_settings_of_attention_times_deviation_that_cannot_be(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        AttentionDeviation(**settings)


@pytest.mark.cpu_only
def test_a_look_has_at_least_one_layer() -> None:
    look = QuestionAttention(layer_share=0.2, first_layer=0.19).look(3)
    assert (look.first, look.stop) == (0, 1)
