"""Selectors: the registered ones by hand, a user's own, and one that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from tests.blend.prompts import assert_counts_add_up, recomputed_positions, tiny_prompt
from tests.blend.rules import selectors_restored
from tests.engine.compare import assert_logprobs_match, assert_same_logprobs, blend_of
from tests.engine.engines import engine, greedy, hf_model, run, tiny_model
from tests.models.tiny import HEAD_DIM
from vllm_blend import Evidence, LooksAt, Selector, register_selector
from vllm_blend.blend.selectors import make_selector, top_indices
from vllm_blend.blend.selectors.question_attention import QuestionAttention

TINY = tiny_model("llama")
PARAMS = greedy(6, logprobs=2, ignore_eos=True)


@pytest.fixture
def register() -> Iterator[Callable[[type[Selector]], type[Selector]]]:
    """`register_selector`, for the time of a test."""
    with selectors_restored():
        yield register_selector


def evidence(n: int, **fields: Any) -> Evidence:
    positions = torch.arange(10, 10 + n)
    return Evidence(**{"positions": positions, "chunk_offsets": torch.arange(n) % 4, "seed": 7, **fields})


@pytest.mark.cpu_only
def test_best_is_stable_and_ascending() -> None:
    assert top_indices(torch.tensor([1.0, 3.0, 1.0, 3.0, 0.0]), 3).tolist() == [0, 1, 3]
    assert top_indices(torch.tensor([0.0, 0.0, 0.0]), 2).tolist() == [0, 1]
    assert top_indices(torch.tensor([1.0]), 5).tolist() == [0]


@pytest.mark.cpu_only
def test_deviations_by_hand() -> None:
    old, new = torch.zeros(3, 2, 2), torch.zeros(3, 2, 2)
    new[0, 0, 0], new[1, :, 0], new[2, 1, 1] = 2.0, 1.5, -3.0
    value = make_selector("value_deviation").score(evidence(3, v_old=old, v_new=new))
    assert value.tolist() == [4.0, 4.5, 9.0]
    assert evidence(3, k_old=new, k_new=old).k_deviation().tolist() == [4.0, 4.5, 9.0]
    for deviation in (evidence(3).k_deviation, evidence(3).v_deviation):
        with pytest.raises(ValueError, match="compared at check layers only"):
            deviation()


@pytest.mark.cpu_only
def test_first_tokens_takes_the_same_of_every_chunk() -> None:
    chosen = top_indices(make_selector("first_tokens").score(evidence(12)), 6)
    assert chosen.tolist() == [0, 1, 4, 5, 8, 9]


@pytest.mark.cpu_only
def test_random_is_fixed_by_the_prompt() -> None:
    selector = make_selector("random")
    score = selector.score(evidence(50))
    assert torch.equal(score, selector.score(evidence(50)))
    assert not torch.equal(score, selector.score(evidence(50, seed=8)))


@pytest.mark.cpu_only
def test_an_unknown_selector_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"blend_selector='nonesuch'.*'auto'.*value_deviation"):
        make_selector("nonesuch")


@pytest.mark.cpu_only
def test_a_name_is_needed_and_belongs_to_one_selector(register: Callable[[type[Selector]], type[Selector]]) -> None:
    class Nameless(Selector):
        def score(self, evidence: Evidence) -> torch.Tensor:
            return evidence.positions.float()

    with pytest.raises(ValueError, match="Nameless needs a class attribute `name`"):
        register(Nameless)

    class Impostor(Nameless):
        name: ClassVar[str] = "full"

    with pytest.raises(ValueError, match="'full' is registered already"):
        register(Impostor)

    class Second(Nameless):
        name: ClassVar[str] = "auto"

    with pytest.raises(ValueError, match=r"Second cannot be named 'auto': that stands for 'question_attention"):
        register(Second)


def test_what_auto_stands_for_is_the_default_and_what_is_reported() -> None:
    with engine(TINY, enable_blending=True) as llm:
        rules = ["auto", "question_attention"]
        outputs = [run(llm, tiny_prompt(blend_selector=rule), PARAMS)[0] for rule in rules]
        outputs.append(run(llm, tiny_prompt(), PARAMS)[0])
    assert [output.blend and output.blend.selector for output in outputs] == ["question_attention"] * 3
    for output in outputs[1:]:
        assert_same_logprobs(output, outputs[0])


@pytest.mark.parametrize("looks_at", list(LooksAt))
def test_a_selector_of_ones_own(looks_at: LooksAt, register: Callable[[type[Selector]], type[Selector]]) -> None:
    """Works by name, sees what it asked for, and nothing after the context."""
    seen: list[Evidence] = []
    kind = looks_at

    @dataclass(frozen=True)
    class LastFirst(Selector):
        name: ClassVar[str] = "last_first"
        looks_at: ClassVar[LooksAt] = kind
        default_ratio: ClassVar[float] = 0.2

        def score(self, evidence: Evidence) -> torch.Tensor:
            seen.append(evidence)
            return evidence.positions.float()

    register(LastFirst)
    with engine(TINY, enable_blending=True, blend_check_layers=[2]) as llm:
        prompt = tiny_prompt(blend_selector="last_first")
        [output] = run(llm, prompt, PARAMS)
        context = len(output.prompt_token_ids) - len(prompt["suffix"])
        budget = int(0.2 * context)
        chosen = recomputed_positions(llm, len(prompt["suffix"])).tolist()
        assert chosen == list(range(context - budget, context))
        assert_counts_add_up(output)
        [only] = seen
        exact = len(prompt["prefix"]) + len(prompt["chunks"][0])
        assert only.positions.tolist() == list(range(exact, context))
        offsets = [offset for chunk in prompt["chunks"][1:] for offset in range(len(chunk))]
        assert only.chunk_offsets.tolist() == offsets
        assert (only.question_mass is not None) == (looks_at is LooksAt.QUESTION)
        for tensor in (only.k_new, only.k_old, only.v_new, only.v_old):
            assert (tensor is not None) == (looks_at is LooksAt.LAYERS)
            assert tensor is None or tensor.shape == (context - exact, 2, HEAD_DIM)


def test_the_question_looks_on_its_own_layers_whatever_other_requests_look_on(
    register: Callable[[type[Selector]], type[Selector]],
) -> None:
    """The mass is the mean over a selector's own layers, in one pass with a request that looks on others."""
    seen: dict[str, list[torch.Tensor]] = {}

    def looking_on(share: float) -> type[Selector]:
        @dataclass(frozen=True)
        class Looking(QuestionAttention):
            name: ClassVar[str] = f"looks_on_{share}"
            layer_share: float = share
            first_layer: float = 0.0

            def score(self, evidence: Evidence) -> torch.Tensor:
                assert evidence.question_mass is not None
                seen.setdefault(self.name, []).append(evidence.question_mass)
                return super().score(evidence)

        return register(Looking)

    shares = [0.25, 0.5, 1.0]
    names = [looking_on(share).name for share in shares]
    with engine(TINY, enable_blending=True) as llm:
        layers = llm.llm_engine.model_executor.driver_worker.num_layers
        assert [QuestionAttention(share, 0.0).look(layers).stop for share in shares] == [1, 2, 3]
        for name in names:
            run(llm, tiny_prompt(blend_selector=name), PARAMS)
        run(llm, [tiny_prompt(blend_selector=name) for name in reversed(names)], PARAMS)
    for name in names:
        alone, together = seen[name]
        torch.testing.assert_close(alone, together, rtol=1e-2, atol=1e-3)
    assert not torch.allclose(seen[names[0]][0], seen[names[2]][0], rtol=5e-2)


def failing(fault: str, evidence: Evidence) -> Any:
    n = len(evidence.positions)
    if fault == "raises":
        raise KeyError("no such thing")
    return {
        "too short": torch.zeros(n - 1),
        "too long": torch.zeros(n + 1),
        "a matrix": torch.zeros(n, 1),
        "a list": [0.0] * n,
        "none": None,
    }[fault]


@pytest.mark.parametrize("looks_at", list(LooksAt))
@pytest.mark.parametrize("fault", ["raises", "too short", "too long", "a matrix", "a list", "none"])
def test_a_selector_that_fails_costs_its_own_request(
    fault: str, looks_at: LooksAt, register: Callable[[type[Selector]], type[Selector]]
) -> None:
    kind = looks_at

    @dataclass(frozen=True)
    class Broken(Selector):
        name: ClassVar[str] = "broken"
        looks_at: ClassVar[LooksAt] = kind

        def score(self, evidence: Evidence) -> torch.Tensor:
            scores: torch.Tensor = failing(fault, evidence)
            return scores

    register(Broken)
    good: list[Any] = [
        tiny_prompt(blend_selector="value_deviation", blend_recompute_ratio=0.3),
        tiny_prompt(blend_selector="question_attention", blend_recompute_ratio=0.3),
        {"prompt_token_ids": [3, 1, 4, 1, 5]},
    ]
    with engine(TINY, enable_blending=True) as llm:
        expected = [run(llm, prompt, PARAMS)[0] for prompt in good]
        prompts = [good[0], tiny_prompt(blend_selector="broken"), *good[1:]]
        first, broken, *rest = run(llm, prompts, PARAMS)
        assert broken.error is not None
        assert "'broken' failed" in broken.error
        assert broken.outputs[0].finish_reason == "error"
        assert broken.outputs[0].token_ids == []
        for output, alone in zip([first, *rest], expected, strict=True):
            assert output.error is None
            assert_same_logprobs(output, alone)
            assert blend_of(output) == blend_of(alone)
        assert_logprobs_match(rest[-1], hf_model(TINY))


@pytest.mark.parametrize("shift", [1.5, "0.5", None, lambda: 0.5])
def test_a_mean_shift_of_ones_own_must_be_a_share(
    shift: Any, register: Callable[[type[Selector]], type[Selector]]
) -> None:
    """Checked before anything runs."""

    class Shifting(Selector):
        name: ClassVar[str] = "shifting"
        mean_shift: Any = staticmethod(shift) if callable(shift) else shift

        def score(self, evidence: Evidence) -> torch.Tensor:
            return evidence.positions.float()

    register(Shifting)
    with (
        engine(TINY, enable_blending=True) as llm,
        pytest.raises(ValueError, match=r"the selector 'shifting' has mean_shift=.*: make it a number from 0 to 1"),
    ):
        run(llm, tiny_prompt(blend_selector="shifting"), PARAMS)
