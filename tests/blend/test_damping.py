"""Damped passages: which are, and that no other part of the engine changes an answer over them or keeps their pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from tests import tolerances
from tests.blend.prompts import plain, recomputed_positions, record_plans, tiny_prompt
from tests.blend.rules import selectors_restored
from tests.engine.compare import assert_logprobs_match, assert_same_logprobs
from tests.engine.engines import (
    BLOCK_SIZE,
    engine,
    greedy,
    hf_model,
    new_llm,
    pages_for,
    run,
    sampled,
    threads,
    tiny_model,
)
from vllm_blend import Evidence, RequestOutput, Selector, register_selector
from vllm_blend.blend.plan import BlendPlan, Segment, make_plan
from vllm_blend.blend.relevance.passages import PromptPassages, Span
from vllm_blend.blend.selectors import SELECTORS
from vllm_blend.kv_store.chunk_kv import ChunkKV

TINY = tiny_model("llama")
PARAMS = greedy(8, logprobs=2, ignore_eos=True)
RULE: dict[str, Any] = {"blend_selector": "relevant_passages", "blend_recompute_ratio": 0.4}
THIRD = [0, 0, 1, 0]  # the third chunk is relevant: 21 tokens, all of the budget


@dataclass(frozen=True)
class Chooses(Selector):
    """Chooses the spans that it is given."""

    name: ClassVar[str] = "chooses_spans"
    chooses_passages: ClassVar[bool] = True
    spans: tuple[Span, ...] = ()
    scale: Any = 0.5

    def choose_spans(self, passages: PromptPassages, cost: Callable[[Span], int], budget: int) -> list[Span] | None:
        return list(self.spans)

    def passed_over_scale(self) -> float:
        if isinstance(self.scale, Exception):
            raise self.scale
        scale: float = self.scale
        return scale

    def score(self, evidence: Evidence) -> torch.Tensor:
        raise AssertionError("it has chosen already")


def plan_of(segments: list[Segment], selector: Selector, suffix_start: int = 40) -> BlendPlan:
    ids = list(range(suffix_start + 3))
    return make_plan(segments, ids, suffix_start, selector, 0.5, [1], None, 2)


def segment(start: int, stop: int, exact: bool = False) -> Segment:
    kv = torch.zeros(2, stop - start, 1, 1)
    return Segment(start, ChunkKV(kv, kv), exact)


def passages(*bounds: Span) -> PromptPassages:
    return PromptPassages(bounds, (), (), lambda: ([], []))


def scales(plan: BlendPlan) -> list[float]:
    return [each.key_scale for each in plan.segments]


@pytest.mark.cpu_only
def test_what_lies_in_passages_of_which_nothing_is_chosen_is_damped() -> None:
    """Not the prefix, a chunk that is no passage, what is exact, or a passage of which one token is chosen, in whatever
    segments it is stored."""
    segments = [segment(0, 4), segment(4, 8), segment(8, 12, exact=True), segment(12, 16), segment(16, 18)]
    segments += [segment(18, 22), segment(24, 28), segment(28, 34), segment(34, 40)]
    bounds = ((8, 12), (12, 16), (16, 22), (24, 28), (28, 31), (31, 34), (34, 37))
    chosen = plan_of(segments, Chooses(((21, 22), (30, 31)))).choose_passages(passages(*bounds))
    assert chosen.error is None and chosen.chosen is not None and chosen.chosen.tolist() == [21, 30]
    # The last but one has a passage with a chosen token, and the last reaches beyond its passage.
    assert scales(chosen) == [1, 1, 1, 0.5, 1, 1, 0.5, 1, 1]
    assert [each.kv for each in chosen.segments] == [each.kv for each in segments]
    none = plan_of(segments, Chooses()).choose_passages(passages(*bounds))
    assert scales(none) == [1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 1]
    for selector, others in ((Chooses(((21, 22),), scale=1), False), (Chooses(((21, 22),)), True)):
        kept = plan_of(segments, selector).choose_passages(passages(*bounds), serves_others=others)
        assert set(scales(kept)) == {1.0} and kept.chosen is not None and kept.chosen.tolist() == [21]


@pytest.mark.cpu_only
def test_a_passage_whose_chosen_tokens_are_beyond_the_budget_is_damped() -> None:
    segments = [segment(0, 20), segment(20, 40)]
    plan = plan_of(segments, Chooses(((0, 40),))).choose_passages(passages((0, 20), (20, 40)))
    assert plan.chosen is not None and plan.chosen.tolist() == list(range(20)) and scales(plan) == [1, 0.5]


@pytest.mark.cpu_only
@pytest.mark.parametrize("scale", [0, 0.0, 1.5, -1, float("nan"), "x", None, [], KeyError("no such scale")])
def test_a_rule_whose_scale_cannot_be_costs_its_own_request(scale: Any) -> None:
    failed = plan_of([segment(0, 20), segment(20, 40)], Chooses(((0, 5),), scale)).choose_passages(passages((0, 20)))
    assert failed.error is not None and failed.error.startswith("the selector 'chooses_spans' failed: ")
    if isinstance(scale, (int, float)):
        assert f"passed_over_scale() returned {scale!r}: return a number above 0, and at most 1" in failed.error
    assert set(scales(failed)) == {1.0} and failed.chosen is None
    with selectors_restored(), engine(TINY, enable_blending=True) as llm:
        register_selector(Chooses)
        SELECTORS["fails"] = lambda: Chooses(((5, 9),), scale)  # type: ignore[assignment]
        bad, good = run(llm, [tiny_prompt(blend_selector="fails"), tiny_prompt()], PARAMS)
        assert bad.error is not None and "the selector 'chooses_spans' failed: " in bad.error
        assert good.error is None


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[BlendPlan]:
    """The plans of prompts from now on."""
    return record_plans(monkeypatch)


@pytest.mark.parametrize(
    ("options", "damped"),
    [
        ({}, {17: 0.9, 41: 0.9}),  # the first is exact
        ({"blend_selector": "relevant_passages(damping=0.25)"}, {17: 0.25, 41: 0.25}),
        ({"blend_selector": "relevant_passages(damping=0.5, spend=budget) + mean_shift"}, {17: 0.5, 41: 0.5}),
        ({"blend_selector": "relevant_passages(damping=1)"}, {}),
        ({"relevance": [0, 1, 0, 0]}, {20: 0.9}),  # the last fits the budget as well
        ({"relevance": [1, 0, 0, 0]}, {20: 0.9}),
        ({"blend_recompute_ratio": 0.02}, {17: 0.9, 41: 0.9}),  # of the third one token is computed
        ({"blend_recompute_ratio": 0.0}, {}),
        ({"blend_recompute_ratio": 1.0}, {}),
        ({"relevance": [1, 1, 1, 1]}, {}),  # nothing tells them apart: the question looks
        ({"blend_selector": "question_attention"}, {}),
        ({"blend_selector": "first_tokens"}, {}),
        ({"in_place_chunks": [1]}, {41: 0.9}),  # the second is computed where it stands
        ({"prefix": [], "blend_recompute_ratio": 0.45}, {12: 0.9, 36: 0.9}),
        # The third stands first and is exact there, and the budget ends within the next.
        ({"order": "free", "relevance": [1, 0, 2, 0], "blend_recompute_ratio": 0.2}, {38: 0.9, 50: 0.9}),
    ],
    ids=str,
)
def test_prompts_have_what_is_passed_over_damped(
    options: dict[str, Any], damped: dict[int, float], planned: list[BlendPlan]
) -> None:
    """Without a tokenizer a passage is one sentence, which is chosen whole or not at all."""
    with engine(TINY, enable_blending=True, skip_tokenizer_init=True) as llm:
        for _ in range(2):  # the chunks are new, then known
            run(llm, tiny_prompt(**RULE | {"relevance": THIRD} | options), PARAMS)
    for plan in planned:
        assert {each.start: each.key_scale for each in plan.segments if each.key_scale != 1} == damped
        assert not any(each.key_scale != 1 for each in plan.segments if each.exact)
    assert len(planned) == 2


def damped_and_not(llm: Any, prompt: dict[str, Any], params: Any = PARAMS) -> tuple[RequestOutput, RequestOutput]:
    """Answer a prompt, and the same without damping, and check that this makes a difference."""
    other = prompt | {"blend_selector": "relevant_passages(damping=1)"}
    with_it, without = (run(llm, each, params)[0] for each in (prompt, other))
    rows = [(each.outputs[0].logprobs or [{}])[0] for each in (with_it, without)]
    mine, theirs = (next(iter(row.values())) for row in rows)
    assert abs(mine.logprob - theirs.logprob) > 0.01
    return with_it, without


def test_everything_is_full_prefill_and_nothing_is_plain_reuse() -> None:
    prompt = tiny_prompt(**RULE, relevance=THIRD)
    with engine(TINY, enable_blending=True) as llm:
        damped_and_not(llm, prompt)
        [everything] = run(llm, prompt | {"blend_recompute_ratio": 1.0}, PARAMS)
        assert_logprobs_match(everything, hf_model(TINY))
        [nothing] = run(llm, prompt | {"blend_recompute_ratio": 0.0}, PARAMS)
        [reused] = run(llm, tiny_prompt(blend_selector="none"), PARAMS)
        assert_same_logprobs(nothing, reused)


def test_damped_pages_are_found_by_no_other_prompt() -> None:
    """Not by a plain one of the same tokens, nor by one that goes on behind the answer."""
    prompt = tiny_prompt(**RULE, relevance=THIRD)
    with engine(TINY, enable_blending=True, block_size=BLOCK_SIZE) as llm:
        damped, _ = damped_and_not(llm, prompt)
        ids = damped.prompt_token_ids
        assert ids is not None and len(ids) > 2 * BLOCK_SIZE
        [exact] = run(llm, {"prompt_token_ids": [*ids, *damped.outputs[0].token_ids]}, PARAMS)
        assert exact.num_cached_tokens == 0
        assert_logprobs_match(exact, hf_model(TINY))
        [again] = run(llm, prompt, PARAMS)  # and it takes none of the exact ones
        assert_same_logprobs(again, damped)
        assert again.blend is not None and again.blend.num_exact_tokens == 5 + 12


def test_a_batch_of_damped_and_other_prompts_answers_as_each_alone() -> None:
    """This holds for several completions, too, which share a plan."""
    made = [([0, 0, 1, 0], 0.9), ([0, 1, 0, 0], 0.4), ([0, 0, 0, 1], 0.6), ([0, 0, 1, 0], 1)]
    prompts: list[Any] = [
        tiny_prompt(**RULE | {"blend_selector": f"relevant_passages(damping={damping})"}, relevance=scores)
        for scores, damping in made
    ]
    prompts += [tiny_prompt(), plain(tiny_prompt()), tiny_prompt(**RULE, relevance=THIRD, order="free")]
    with engine(TINY, enable_blending=True) as llm:
        alone = [run(llm, prompt, PARAMS)[0] for prompt in prompts]
        for output, own in zip(run(llm, prompts, PARAMS), alone, strict=True):
            assert_same_logprobs(output, own)
        [several] = run(llm, prompts[0], sampled(1, n=2, seed=1, logprobs=2))
        [best] = run(llm, prompts[0], greedy(1, logprobs=2))
        wanted = next(iter((best.outputs[0].logprobs or [{}])[0].items()))
        for completion in several.outputs:  # both draw from the distribution that one has alone
            assert completion.logprobs is not None
            tolerances.check("logprobs", [completion.logprobs[0][wanted[0]].logprob - wanted[1].logprob])


FEATURES: dict[str, dict[str, Any]] = {
    "several steps": {"max_num_batched_tokens": 9, "max_num_seqs": 4},
    "offload": {"offload_mode": "exact", "block_size": BLOCK_SIZE},
    "KV-Compress": {"enable_kvc": True, "block_size": BLOCK_SIZE},
    "cascade": {"cascade_attention": True, "block_size": BLOCK_SIZE},
    "running ahead": {"async_scheduling": True},
}


@pytest.mark.cpu_only
@pytest.mark.parametrize("feature", FEATURES)
def test_features_change_no_damped_answer(feature: str) -> None:
    prompt = tiny_prompt(**RULE, relevance=THIRD)
    with engine(TINY, enable_blending=True) as llm:
        expected = damped_and_not(llm, prompt)
    with engine(TINY, enable_blending=True, **FEATURES[feature]) as llm:
        for output, other in zip(damped_and_not(llm, prompt), expected, strict=True):
            assert_same_logprobs(output, other)
            assert recomputed_positions(llm, 6).tolist() == list(range(20, 41))


@pytest.mark.cpu_only
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_are_verified_over_damped_pages(method: str) -> None:
    """Drafts come from the tokens of the chunks, and are as likely as without drafts."""
    prompt = tiny_prompt(**RULE, relevance=THIRD)
    with engine(TINY, enable_blending=True) as llm:
        expected = damped_and_not(llm, prompt)
    with threads(1):
        llm = new_llm(TINY, enable_blending=True, speculative_config={"method": method, "num_speculative_tokens": 3})
        for output, other in zip(damped_and_not(llm, prompt), expected, strict=True):
            assert_same_logprobs(output, other)


@pytest.mark.parametrize("rows", [2048, 9], ids=["whole", "between its parts"])
def test_a_damped_prompt_that_is_preempted_goes_on_as_it_was(rows: int) -> None:
    """While it decodes, or while parts of its blend are still to come: its pages are filled again."""
    prompt = tiny_prompt(**RULE, relevance=THIRD)
    room = BLOCK_SIZE * -(-59 // BLOCK_SIZE)
    before = {"prompt_token_ids": plain(prompt)["prompt_token_ids"][: 96 - room - 3]}
    params = [greedy(30, logprobs=3, ignore_eos=True), greedy(20, logprobs=3, ignore_eos=True)]
    with engine(TINY, enable_blending=True) as llm:
        expected = run(llm, [before, prompt], params)
        damped_and_not(llm, prompt)
        assert llm.llm_engine.scheduler.num_preemptions == 0
    arguments = {"max_num_batched_tokens": rows, "max_num_seqs": 4}
    with engine(TINY, enable_blending=True, **arguments, **pages_for(96)) as llm:
        run(llm, prompt, greedy(1))  # encodes the chunks
        for output, other in zip(run(llm, [before, prompt], params), expected, strict=True):
            assert_same_logprobs(output, other)
        assert llm.llm_engine.scheduler.num_preemptions > 0


def test_a_prompt_that_starts_again_is_damped_again(planned: list[BlendPlan]) -> None:
    """A request starts again when a chunk is lost in the middle of a step."""
    prompt: Any = tiny_prompt(**RULE, relevance=THIRD)
    with engine(TINY, enable_blending=True) as llm:
        [expected] = run(llm, prompt, PARAMS)
        core = llm.llm_engine
        core.add_request("lost", prompt, PARAMS)
        [request] = core.scheduler.waiting
        group = core.requests.groups[request]
        assert request.blend is not None
        request.blend = replace(request.blend, segments=request.blend.segments[:2])
        core.composer.start_again(group.parsed, [request])
        outputs: list[Any] = []
        while core.has_unfinished_requests():
            outputs += core.step()
        assert_same_logprobs(outputs[-1], expected)
    assert scales(planned[-1]) == scales(planned[0]) == [1, 1, 0.9, 1, 0.9]
