"""Blends of more rows than a step has: their parts give what one step gives, and others get their tokens meanwhile."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import pytest

from tests.blend.prompts import assert_counts_add_up, plain, recomputed_positions, tiny_prompt
from tests.engine.compare import assert_logprobs_match, assert_same_choice, assert_same_logprobs
from tests.engine.engines import BLOCK_SIZE, engine, greedy, hf_model, pages_for, run, tiny_model
from vllm_blend.blend.selectors import SELECTORS, Selector
from vllm_blend.blend.selectors.base import Evidence
from vllm_blend.core.scheduler import Scheduler
from vllm_blend.core.step import BlendPart

MODEL = tiny_model("llama")
PARAMS = greedy(8, logprobs=3, ignore_eos=True)
SMALL: dict[str, Any] = {"enable_blending": True, "max_num_batched_tokens": 9, "max_num_seqs": 4}
LARGE: dict[str, Any] = {"enable_blending": True}
EARLIER = 96 - BLOCK_SIZE * -(-59 // BLOCK_SIZE) - 3  # tokens of a prompt that soon takes another page
UNSHIFTED = "question_attention(mean_shift=0)"
RULES = ["first_tokens", UNSHIFTED, "none", "full"]


class Scheduled(NamedTuple):
    request_id: str
    part: BlendPart | None
    samples: bool


Steps = list[list[Scheduled]]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """What every step from now on has."""
    seen: Steps = []
    schedule = Scheduler.schedule

    def recorded(self: Scheduler, ahead: bool = False) -> Any:
        output = schedule(self, ahead)
        seen.append([Scheduled(item.request.request_id, item.part, item.samples) for item in output.scheduled])
        return output

    monkeypatch.setattr(Scheduler, "schedule", recorded)
    return seen


def parts_of(steps: Steps) -> list[tuple[int, int]]:
    return [(item.part.first, item.part.stop) for step in steps for item in step if item.part is not None]


@pytest.mark.parametrize("ratio", [0.3, 0.6, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_parts_give_what_one_step_gives(rule: str, ratio: float, steps: Steps) -> None:
    options = {} if rule in ("none", "full") else {"blend_recompute_ratio": ratio}
    prompt = tiny_prompt(blend_selector=rule, **options)
    with engine(MODEL, **LARGE) as whole:
        [expected] = run(whole, prompt, PARAMS)
        chosen = recomputed_positions(whole, 6)
        assert not parts_of(steps)
    with engine(MODEL, **SMALL) as divided:
        for _ in range(2):  # the chunks are new, then known
            steps.clear()
            [output] = run(divided, prompt, PARAMS)
            assert_same_choice(recomputed_positions(divided, 6).tolist(), chosen.tolist())
            assert_same_logprobs(output, expected)
            assert_counts_add_up(output)
            rows = len(chosen) + 6
            parts = parts_of(steps)
            if rows <= 9:
                assert not parts
            else:
                assert [first for first, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
                assert parts[-1][1] == rows and all(stop - first <= 9 for first, stop in parts)
        hooks = divided.llm_engine.decoder.cache_fuse_metadata
        assert len(hooks["our_slot_mapping"]) == len(hooks["imp_indices"]) == rows
    if ratio == 1.0 and rule != "none":
        assert_logprobs_match(output, hf_model(MODEL))


@pytest.mark.parametrize("rule", ["value_deviation", "auto"])
def test_rules_that_need_all_rows_at_once_take_one_step(rule: str, steps: Steps) -> None:
    prompt = tiny_prompt(blend_selector=rule, blend_recompute_ratio=0.5)
    with engine(MODEL, **LARGE) as whole:
        [expected] = run(whole, prompt, PARAMS)
    with engine(MODEL, **SMALL) as llm:
        [output] = run(llm, prompt, PARAMS)
        assert_same_logprobs(output, expected)
    assert not parts_of(steps)


def test_others_get_their_tokens_between_the_parts(steps: Steps) -> None:
    prompt = tiny_prompt(blend_selector="first_tokens", blend_recompute_ratio=1.0)
    with engine(MODEL, **SMALL) as llm:
        run(llm, prompt, greedy(1))  # encodes the chunks
        steps.clear()
        [first, second] = run(llm, [{"prompt_token_ids": [5, 6, 7]}, prompt], [greedy(30, ignore_eos=True), PARAMS])
        assert_logprobs_match(second, hf_model(MODEL))
        assert len(first.outputs[0].token_ids) == 30
    with_parts = [step for step in steps if any(item.part is not None for item in step)]
    assert len(with_parts) >= 6
    for step in with_parts:
        assert any(item.request_id == first.request_id and item.samples for item in step)


def test_a_blend_that_is_preempted_between_its_parts_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier request takes the last page while parts of the blend are still to come."""
    done: list[int] = []
    preempt = Scheduler.preempt_last

    def recorded(self: Scheduler) -> Any:
        done.append(self.running[-1].num_blended_rows)
        return preempt(self)

    monkeypatch.setattr(Scheduler, "preempt_last", recorded)
    prompt = tiny_prompt(blend_selector=UNSHIFTED, blend_recompute_ratio=0.6)
    before = {"prompt_token_ids": plain(tiny_prompt())["prompt_token_ids"][:EARLIER]}
    params = [greedy(30, logprobs=3, ignore_eos=True), PARAMS]
    with engine(MODEL, **LARGE) as whole:
        expected = run(whole, [before, prompt], params)
    assert not done
    with engine(MODEL, **SMALL, **pages_for(96)) as llm:
        run(llm, prompt, greedy(1))  # encodes the chunks
        for output, other in zip(run(llm, [before, prompt], params), expected, strict=True):
            assert_same_logprobs(output, other)
    assert any(rows > 0 for rows in done)


class Failing(Selector):
    name = "failing"
    default_ratio = 0.5
    looks_at = SELECTORS["question_attention"].looks_at

    def score(self, evidence: Evidence) -> Any:
        raise ZeroDivisionError("on purpose")


def test_a_selector_that_fails_costs_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SELECTORS, "failing", Failing)
    with engine(MODEL, **SMALL, async_scheduling=True) as llm:  # its next part is queued before the error is read
        good = tiny_prompt(blend_selector=UNSHIFTED, blend_recompute_ratio=0.5)
        bad = tiny_prompt(blend_selector="failing", blend_recompute_ratio=0.5)
        outputs = run(llm, [bad, good, good], PARAMS)
        assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length", "length"]
        assert outputs[0].error is not None and "on purpose" in outputs[0].error
        assert_same_logprobs(outputs[1], outputs[2])


@pytest.mark.parametrize("ends", ["abort", "finish"])
def test_a_blend_that_is_aborted_between_its_parts_returns_its_pages(ends: str) -> None:
    prompt = tiny_prompt(blend_selector="first_tokens", blend_recompute_ratio=1.0)
    with engine(MODEL, **SMALL) as llm:  # which asserts at its end that it is empty
        run(llm, prompt, greedy(1))
        core = llm.llm_engine
        core.add_request("a", cast(Any, prompt), greedy(4, ignore_eos=True))
        for _ in range(3):
            core.step()
        [request] = core.scheduler.running
        assert 0 < request.num_blended_rows < 47 and request.num_computed_tokens == 0
        if ends == "abort":
            core.abort_request("a")
        else:
            while core.has_unfinished_requests():
                core.step()
