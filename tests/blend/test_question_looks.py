"""On which layers the question looks at the reused cache, in the engine and spelled out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from tests import tolerances
from tests.blend.reference import BlendReference, Context
from tests.blend.test_reference import CachingReference, pieces_of
from tests.engine.engines import DEMO, demo_prompt, engine, greedy, hf_model, run
from vllm_blend.blend.selectors import SELECTORS, Evidence, register_selector
from vllm_blend.blend.selectors.question_attention import QuestionAttention

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
def suffix_weights(reference: BlendReference, context: Context, suffix: list[int]) -> torch.Tensor:
    """[layers, heads, tokens of the suffix, tokens of the context]: attention of the suffix."""
    ids, start = [*context.ids, *suffix], len(context.ids)
    positions = torch.arange(len(ids))
    active = positions[start:]
    hidden = reference._embed(ids)[active]
    result = []
    for layer, (k_old, v_old) in zip(reference._layers, context.kv, strict=True):
        q, k, v = reference._project(layer, hidden)
        k_all, v_all = torch.cat([k_old, k]), torch.cat([v_old, v])
        weights = reference._weights(reference._rotate(q, active), reference._rotate(k_all, positions), active)
        result.append(weights[..., :start])
        hidden = reference._finish(layer, hidden, weights, v_all)
    return torch.stack(result)


def question(llm: Any, reference: BlendReference) -> tuple[Any, Context, list[int]]:
    prompt = demo_prompt(PROMPT)
    prefix, chunks, suffix = pieces_of(llm, prompt)
    return prompt, reference.compose(prefix, chunks), suffix


@pytest.mark.parametrize(
    ("settings", "first", "stop"),
    [
        ("", 6, 9),
        ("first_layer=0", 0, 9),
        ("layer_share=0.5, first_layer=0.25", 3, 6),
        ("layer_share=1, first_layer=0.667", 8, 12),
    ],
)
def test_the_mass_is_what_a_plain_forward_gives(settings: str, first: int, stop: int) -> None:
    reference = CachingReference(hf_model(DEMO))
    with engine(enable_blending=True) as llm:
        prompt, context, suffix = question(llm, reference)
        run(llm, {**prompt, "blend_selector": f"watching({settings})", "blend_recompute_ratio": RATIO}, greedy(1))
    [evidence] = Watching.seen
    assert evidence.question_mass is not None
    expected = suffix_weights(reference, context, suffix)[first:stop].sum(2).mean((0, 1))
    tolerances.check_relative("mass", evidence.question_mass, expected[evidence.positions.cpu()])


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    "settings",
    [
        {"first_layer": 0.75},
        {"first_layer": -0.1},
        {"layer_share": 0.0},
        {"layer_share": 1.01},
        {"mean_shift": -0.1},
        {"mean_shift": 1.1},
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        QuestionAttention(**settings)


@pytest.mark.cpu_only
def test_shares_of_layers_are_rounded_and_a_look_has_at_least_one_layer() -> None:
    looks = [QuestionAttention().look(layers) for layers in (1, 2, 10, 12, 28, 32)]
    assert [(look.first, look.stop) for look in looks] == [(0, 1), (1, 2), (5, 8), (6, 9), (14, 21), (16, 24)]
    narrow = QuestionAttention(layer_share=0.2, first_layer=0.19).look(3)
    assert (narrow.first, narrow.stop) == (0, 1)
